"""Compaction: accepted keys and values move to contiguous slots (design D3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moves:
    """KV moves of a batch, int64 [moves] each; slots are relative to the root's slot 0.

    Within a request all moves happen at once: a source may be another move's destination.
    """

    requests: Tensor
    src: Tensor
    dst: Tensor


def compaction_moves(rows: Tensor) -> Moves:
    """Moves that bring the j-th visited row's KV to relative slot j.

    Verification wrote row i (0 = root, i + 1 = node i) to relative slot i. Rows that lie
    where they belong, the root among them, do not move.

    Args:
        rows: int64 [R, n + 1], as in :class:`~vllm_subspec.verify.walk.Walk`, padded with -1.
    """
    places = torch.arange(rows.shape[1], device=rows.device)
    requests, dst = ((rows != places) & (rows >= 0)).nonzero(as_tuple=True)
    return Moves(requests, rows[requests, dst], dst)


def move_rows(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy ``cache[src[i]]`` to ``cache[dst[i]]`` for all i at once, in place.

    Args:
        cache: [slots, ...].
        src: int64 [moves]; may overlap ``dst``, since all rows are read before one is written.
        dst: int64 [moves], distinct.
    """
    cache[dst] = cache[src]
