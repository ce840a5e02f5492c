"""Attention of tree nodes to a paged context and to their ancestors."""

from __future__ import annotations

import torch

from subspec_kernels.native import is_loaded
from subspec_kernels.tree_attention import reference

__all__ = ["tree_attention"]


def tree_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
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
    """The native op where it is loaded, else plain torch; see ``reference.tree_attention``.

    Plain torch copies the context in each call, which the native op does not.
    """
    tensors = (query, cache, block_table, context_lens, node_keys, node_values, mask, levels)
    if is_loaded() and query.shape[-1] % 16 == 0:
        out: torch.Tensor = torch.ops.subspec.tree_attention(*tensors, scale, soft_cap, window)
        return out
    return reference.tree_attention(*tensors, scale, soft_cap, window)
