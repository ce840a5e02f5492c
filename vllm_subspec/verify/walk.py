"""The walk: follow the target's own draws down a verified tree (design D4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_subspec.draft.tree import Tree


@dataclass(frozen=True, eq=False)
class Walk:
    """What R requests commit after one pass. Row 0 is the root, row i + 1 is node i.

    Attributes:
        rows: int64 [R, n + 1], rows visited from the root (so column 0 is 0), then -1.
        tokens: int64 [R, n + 1], the target's draw at each of ``rows``: the tokens to commit,
            the last of them the bonus that no child holds; then -1.
        lengths: int64 [R], rows visited = tokens committed, 1..n + 1.
    """

    rows: Tensor
    tokens: Tensor
    lengths: Tensor


def walk(tokens: Tensor, parents: Tensor, counts: Tensor, drawn: Tensor) -> Walk:
    """From each root, go on to the child that holds the token drawn here, until none does.

    A tree's proposal is deterministic, so committing the target's draws is exact for any tree.

    Args:
        tokens: int64 [R, n], padded trees in level order, siblings distinct.
        parents: int64 [R, n], index among the request's nodes, -1 for the root.
        counts: int64 [R], nodes of each tree; entries beyond are ignored.
        drawn: int64 [R, n + 1], the target's draw at each row.
    """
    requests, nodes = tokens.shape
    rows = torch.arange(nodes + 1, device=tokens.device)
    real = rows < counts[:, None] + 1
    parent_rows = torch.where(real[:, 1:], parents + 1, 0)
    followed = (tokens == drawn.gather(1, parent_rows)) & real[:, 1:]
    followed = torch.cat([followed.new_ones(requests, 1), followed], 1)
    ancestor = torch.cat([parent_rows.new_zeros(requests, 1), parent_rows], 1)
    # Pointer doubling: a row is visited if it and all its ancestors were followed.
    for _ in range(nodes.bit_length()):
        followed = followed & followed.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    # Level order makes the path's rows ascend: sorting moves the rows not visited to the end.
    visited = torch.where(followed, rows, nodes + 1).sort(dim=1).values
    off_path = visited > nodes
    committed = drawn.gather(1, visited.masked_fill(off_path, 0)).masked_fill(off_path, -1)
    return Walk(visited.masked_fill(off_path, -1), committed, followed.sum(1))


def walk_trees(trees: Sequence[Tree], drawn: Tensor) -> Walk:
    """:func:`walk` for trees of different sizes.

    Args:
        trees: one per request, at least one; ``Tree.empty()`` for a request without a draft.
        drawn: int64 [sum of len(tree) + 1], the draws of all rows, request after request.
    """
    device = drawn.device
    counts = [len(tree) for tree in trees]
    return walk(
        pad_sequence([tree.tokens for tree in trees], batch_first=True).to(device),
        pad_sequence([tree.parents for tree in trees], batch_first=True).to(device),
        torch.tensor(counts, device=device),
        pad_sequence(list(torch.split(drawn, [n + 1 for n in counts])), batch_first=True),
    )
