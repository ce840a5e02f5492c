"""vLLM's CPU paged cache in plain torch (layout of ISA "vec" and "vec16").

A block is [kv_heads, block, 2 * dim] in name; in memory its first half holds the keys as
[dim, block], its second half the values as [block, dim] (vLLM csrc/cpu/cpu_attn_vec.hpp).
"""

from __future__ import annotations

import torch


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


def paged_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as views [blocks, block, kv_heads, dim] of keys and values, as attention takes them.

    Strided in one step each: a draft asks for them once a layer and level.

    Args:
        cache: [blocks, kv_heads, block, 2 * dim], each head's block dense.

    Raises:
        ValueError: a head's block is not dense.
    """
    blocks, kv_heads, block, two_dim = cache.shape
    by_block, by_head, by_position, by_dim = cache.stride()
    if (by_position, by_dim) != (two_dim, 1):
        raise ValueError(
            f"a cache with strides {cache.stride()} has no dense blocks of {block} x {two_dim}; "
            f"pass vLLM's CPU cache as it was allocated"
        )
    dim, start = two_dim // 2, cache.storage_offset()
    shape = (blocks, block, kv_heads, dim)
    keys = cache.as_strided(shape, (by_block, 1, by_head, block), start)
    values = cache.as_strided(shape, (by_block, dim, by_head, 1), start + block * dim)
    return keys, values


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
