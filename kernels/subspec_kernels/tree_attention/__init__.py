"""Attention of tree nodes to a paged context and to their ancestors."""

from __future__ import annotations

import torch

from subspec_kernels.grow_mask import unpack_mask
from subspec_kernels.native import is_loaded
from subspec_kernels.tree_attention import reference

__all__ = ["tree_attention"]


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    node_keys: torch.Tensor,
    node_values: torch.Tensor,
    mask: torch.Tensor,
    levels: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """Triton on CUDA; on a CPU the native op where it is loaded, else plain torch.

    See ``reference.tree_attention``. Triton reads the mask in packed words, the native op in
    bools: the other form is converted in each call, so callers keep their device's own.
    """
    tables = (block_table, context_lens, node_keys, node_values)
    rest = (levels, scale, soft_cap, window)
    if query.is_cuda:
        from subspec_kernels.tree_attention import triton

        return triton.tree_attention(query, key_cache, value_cache, *tables, mask, *rest)
    if is_loaded() and query.shape[-1] % 16 == 0:
        if mask.dtype == torch.int64:
            mask = unpack_mask(mask, node_keys.shape[2])
        out: torch.Tensor = torch.ops.subspec.tree_attention(
            query, key_cache, value_cache, *tables, mask, *rest
        )
        return out
    return reference.tree_attention(query, key_cache, value_cache, *tables, mask, *rest)
