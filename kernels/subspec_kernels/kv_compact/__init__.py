"""Overlap-safe moves of rows within the paged KV cache, for all layers together."""

from __future__ import annotations

import torch

from subspec_kernels.kv_compact import reference
from subspec_kernels.kv_compact.reference import CacheViews

__all__ = ["CacheViews", "kv_compact"]


def kv_compact(caches: CacheViews, source: torch.Tensor, target: torch.Tensor) -> None:
    """Triton on CUDA, else plain torch; see ``reference.kv_compact``."""
    if source.is_cuda:
        from subspec_kernels.kv_compact import triton

        triton.kv_compact(caches, source, target)
    else:
        reference.kv_compact(caches, source, target)
