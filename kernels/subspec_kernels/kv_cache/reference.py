"""vLLM's CPU paged cache in plain torch (layout of ISA "vec" and "vec16").

A block is [kv_heads, block, 2 * dim] in name; in memory its first half holds the keys as
[dim, block], its second half the values as [block, dim] (vLLM csrc/cpu/cpu_attn_vec.hpp).
"""

from __future__ import annotations

import torch

from subspec_kernels.kv_compact import CacheViews, kv_compact


def cache_halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys [blocks, kv_heads, dim, block] and values [blocks, kv_heads, block, dim].

    Args:
        cache: [blocks, kv_heads, block, 2 * dim], blocks contiguous inside.
    """
    blocks, kv_heads, block, two_dim = cache.shape
    dim = two_dim // 2
    flat = cache.view(blocks, kv_heads, block * two_dim)
    keys = flat[..., : block * dim].view(blocks, kv_heads, dim, block)
    values = flat[..., block * dim :].view(blocks, kv_heads, block, dim)
    return keys, values


def gather_context(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    length: int,
    keys_out: torch.Tensor,
    values_out: torch.Tensor,
) -> None:
    """Copy the first ``length`` positions of one request out of its blocks.

    Args:
        cache: [blocks, kv_heads, block, 2 * dim].
        block_ids: int64 [at least ceil(length / block)], the request's blocks in order.
        length: positions to copy.
        keys_out: [kv_heads, length, dim], written.
        values_out: like ``keys_out``.
    """
    block = cache.shape[2]
    keys, values = cache_halves(cache)
    used = block_ids[: -(-length // block)]
    kv_heads, dim = keys.shape[1], keys.shape[2]
    wide_keys = keys.index_select(0, used).permute(1, 0, 3, 2).reshape(kv_heads, -1, dim)
    wide_values = values.index_select(0, used).permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    keys_out.copy_(wide_keys[:, :length])
    values_out.copy_(wide_values[:, :length])


def gather_slots(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, kv_heads, dim] of the given slots.

    Args:
        cache: [blocks, kv_heads, block, 2 * dim].
        slots: int64 [n], ``block id * block + offset``.
    """
    block = cache.shape[2]
    keys, values = cache_halves(cache)
    blocks, offsets = slots // block, slots % block
    return keys[blocks, :, :, offsets], values[blocks, :, offsets]


def move_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy rows between slots; overlaps are safe, since all rows are read before one is written.

    Args:
        cache: [blocks, kv_heads, block, 2 * dim], written in place.
        source: int64 [n] slots to read.
        target: int64 [n] distinct slots to write.
    """
    keys, values = cache_halves(cache)
    for rows in (keys.permute(0, 3, 1, 2), values.transpose(1, 2)):
        kv_compact(CacheViews([rows]), source[None], target[None])
