# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Ancestor masks in packed words, in one launch: a program for each request and 256 words.

A call reads each node's parent and the parent's words, and writes as many words: some kilobytes,
bound by the latency of a launch.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from subspec_kernels.grow_mask.reference import check_arguments

_BLOCK = 256


def grow_mask(words: torch.Tensor, parents: torch.Tensor, first_slot: int) -> torch.Tensor:
    """See ``reference.grow_mask``; the arguments are on one device. No workspace."""
    check_arguments(words, parents, first_slot)
    requests, nodes = parents.shape
    count = words.shape[2]
    out = words.new_empty(requests, nodes, count)
    grow_words[(requests, triton.cdiv(nodes * count, _BLOCK))](
        words,
        parents,
        out,
        first_slot,
        nodes,
        count,
        *words.stride(),
        *parents.stride(),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["first_slot"])  # it differs from level to level
def grow_words(
    words,
    parents,
    out,
    first_slot,
    nodes,
    count,
    words_request_stride,
    words_node_stride,
    words_word_stride,
    parents_request_stride,
    parents_node_stride,
    BLOCK: tl.constexpr,
):
    """Words ``BLOCK * program`` and on of one request's level, counted over all its nodes."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    node, word = index // count, index % count
    inside = index < nodes * count
    parents += request * parents_request_stride
    parent = tl.load(parents + node * parents_node_stride, mask=inside, other=0)
    words += request * words_request_stride
    seen = tl.load(words + parent * words_node_stride + word * words_word_stride, mask=inside)
    slot = first_slot + node
    bit = tl.full([BLOCK], 1, tl.int64) << (slot % 64).to(tl.int64)
    seen |= tl.where(slot // 64 == word, bit, 0)
    tl.store(out + request * nodes * count + index, seen, mask=inside)
