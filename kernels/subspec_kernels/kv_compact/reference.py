"""Plain torch moves of rows within the paged KV cache.

A call reads and writes each moved row once in every cache, through a copy of those rows; it is
bound by memory, and by a few operations a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CacheViews:
    """Caches whose rows move together; made once, used for every ``kv_compact``.

    Slot ``s`` of a cache is row ``s % block`` of block ``s // block``. Strides are free, so views
    express vLLM's layouts: on a GPU, [blocks, kv_heads, block, 2 * dim] by name, they are both
    halves of ``cache.transpose(1, 2)`` of every layer, on a CPU ``kv_cache.paged_views``.

    Args:
        caches: keys and values of layers that share a block table, [blocks, block, kv_heads, dim]
            each, of one shape, strides, dtype and device.

    Attributes:
        caches: the same; they are held, for ``pointers`` says where they lie.
        pointers: int64 [caches] on their device, the addresses.

    Raises:
        ValueError: there is none, one is not as above, or one differs from the first.
    """

    def __init__(self, caches: Sequence[Tensor]) -> None:
        if not caches or caches[0].ndim != 4:
            given = list(caches[0].shape) if caches else "none"
            raise ValueError(
                f"caches are {given}: give at least one, each [blocks, block, kv_heads, dim]"
            )
        first = _describe(caches[0])
        for index, cache in enumerate(caches):
            if _describe(cache) != first:
                raise ValueError(
                    f"cache {index} is of {_describe(cache)}, the first of {first}: give caches "
                    "that differ to CacheViews of their own"
                )
        self.caches = tuple(caches)
        addresses = [cache.data_ptr() for cache in caches]
        self.pointers = torch.tensor(addresses, dtype=torch.int64, device=caches[0].device)


def _describe(cache: Tensor) -> str:
    shape, strides = tuple(cache.shape), cache.stride()
    return f"shape {shape}, strides {strides}, {cache.dtype} on {cache.device}"


def kv_compact(caches: CacheViews, source: Tensor, target: Tensor) -> None:
    """Copy ``source`` rows to ``target`` rows in every cache, at once within a request.

    After verification the accepted path's rows come together so (arXiv 2509.18344, section 3). A
    request's target may be the source of another of its moves: all its rows are read before one is
    written. Requests do not share slots.

    Args:
        caches: changed in place.
        source: int64 [requests, moves], slots to read; below 0 there is no move.
        target: int64 [requests, moves], slots to write, distinct where there is a move.

    Raises:
        ValueError: ``source`` and ``target`` are not int64 [requests, moves] both, on the caches'
            device.
    """
    check_arguments(caches, source, target)
    moved = source >= 0
    source, target = source[moved], target[moved]
    block = caches.caches[0].shape[1]
    read = source // block, source % block
    written = target // block, target % block
    for cache in caches.caches:
        cache[written] = cache[read]


def check_arguments(caches: CacheViews, source: Tensor, target: Tensor) -> None:
    """Raise what ``kv_compact`` promises."""
    for name, slots in (("source", source), ("target", target)):
        if slots.ndim != 2 or slots.dtype != torch.int64 or slots.device != caches.pointers.device:
            raise ValueError(
                f"{name} slots are {slots.dtype} {list(slots.shape)} on {slots.device}: give int64 "
                f"[requests, moves] on {caches.pointers.device}, where the caches are"
            )
    if source.shape != target.shape:
        raise ValueError(
            f"there are {list(source.shape)} source and {list(target.shape)} target slots: give "
            "one target to each source"
        )
