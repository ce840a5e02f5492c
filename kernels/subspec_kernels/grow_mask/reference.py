"""Ancestor masks in packed words, in plain torch.

Bit ``j`` of word ``w`` is scratch slot ``64 w + j``; bit 63 is the sign of the int64. A call reads
the parents' words and writes as many: some kilobytes, bound by latency.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 64


def grow_mask(words: Tensor, parents: Tensor, first_slot: int) -> Tensor:
    """The next level's words: each node sees what its parent sees, and itself.

    Tree attention (arXiv 2509.18344, section 3) lets a node attend to its ancestors alone. The
    slots are those of ``vllm_subspec.draft.growth.DraftForward``: the root has slot 0, which
    ``grow_mask(zeros, zeros, 0)`` gives for a batch, and a level's nodes lie side by side.

    Args:
        words: int64 [requests, m, w], any strides: what the nodes of the level above see.
        parents: int64 [requests, n], any strides: for each node the row of its parent, 0..m - 1.
        first_slot: scratch slot of the level's first node.

    Returns:
        int64 [requests, n, w].

    Raises:
        ValueError: a shape or dtype is not as above, or slots ``first_slot`` to
            ``first_slot + n - 1`` do not lie within ``64 w``.
    """
    check_arguments(words, parents, first_slot)
    nodes, count = parents.shape[1], words.shape[2]
    of_parents = words.gather(1, parents[..., None].expand(-1, -1, count))
    slots = torch.arange(first_slot, first_slot + nodes, device=words.device)
    is_own_word = torch.arange(count, device=words.device) == slots[:, None] // WORD_BITS
    own_bits = torch.ones_like(slots) << slots % WORD_BITS
    return of_parents | torch.where(is_own_word, own_bits[:, None], 0)


def check_arguments(words: Tensor, parents: Tensor, first_slot: int) -> None:
    """Raise what ``grow_mask`` promises."""
    if words.ndim != 3 or words.dtype != torch.int64:
        raise ValueError(
            f"words are {words.dtype} {list(words.shape)}: give int64 [requests, nodes, words]"
        )
    if parents.ndim != 2 or parents.dtype != torch.int64 or len(parents) != len(words):
        raise ValueError(
            f"parents are {parents.dtype} {list(parents.shape)}: give int64 [{len(words)}, nodes], "
            "one row for each request of the words"
        )
    last, end = first_slot + parents.shape[1] - 1, WORD_BITS * words.shape[2]
    if first_slot < 0 or last >= end:
        raise ValueError(
            f"slots {first_slot} to {last} do not fit into {words.shape[2]} words, which hold "
            f"slots 0 to {end - 1}: give {max(last, 0) // WORD_BITS + 1} words"
        )


def pack_mask(mask: Tensor) -> Tensor:
    """bool [..., s] to int64 [..., s / 64 rounded up]; bits beyond ``s`` are 0."""
    slots = mask.shape[-1]
    bits = torch.nn.functional.pad(mask, (0, -slots % WORD_BITS)).to(torch.int64)
    bits = bits.reshape(*mask.shape[:-1], -(-slots // WORD_BITS), WORD_BITS)
    return (bits << torch.arange(WORD_BITS, device=mask.device)).sum(-1)


def unpack_mask(words: Tensor, num_slots: int) -> Tensor:
    """int64 [..., w] to bool [..., num_slots], with ``num_slots`` at most ``64 w``."""
    bits = words[..., None] >> torch.arange(WORD_BITS, device=words.device) & 1
    return bits.flatten(-2)[..., :num_slots].bool()
