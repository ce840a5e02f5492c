"""vLLM's attention on a GPU, by its Triton and FlashAttention backends, plus trees and drafts.

Both keep one cache a layer, by name [blocks, kv_heads, block, 2 * dim], each head's key before
its value; in memory heads or positions, even layers, may come first (v1/kv_cache_layout.py), so
only strides tell. Tree attention takes such views as they are: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from subspec_kernels.grow_mask import pack_mask
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_subspec.integration import attention
from vllm_subspec.integration.attention import TreeAttentionImpl, TreeRows, WithTrees


class PackedTreeRows(TreeRows):
    """``TreeRows`` on a GPU, whose tree attention reads masks in packed words.

    ``mask_within`` returns int64 [n + 1, words] (``subspec_kernels.grow_mask.pack_mask``).
    """

    @classmethod
    def of(cls, rows: TreeRows, device: torch.device) -> PackedTreeRows:
        """The same rows on ``device``; copies of some kilobytes that the host does not wait for."""
        there = [
            tensor.to(device, non_blocking=True)
            for tensor in (rows.num_context, rows.mask, rows.depths)
        ]
        return cls(rows.start, rows.batch_row, *there)

    def _limited(self, window: int) -> torch.Tensor:
        return pack_mask(super()._limited(window))


@dataclass
class TritonTreeMetadata(TritonAttentionMetadata, WithTrees):
    """vLLM's Triton metadata, with trees."""


@dataclass
class FlashTreeMetadata(FlashAttentionMetadata, WithTrees):
    """vLLM's FlashAttention metadata, with trees."""


_WITH_TREES: Mapping[type, type[WithTrees]] = {
    TritonAttentionMetadata: TritonTreeMetadata,
    FlashAttentionMetadata: FlashTreeMetadata,
}


def with_trees(metadata: Mapping[str, Any], trees: Sequence[TreeRows]) -> dict[str, Any]:
    """``attention.with_trees`` for the two backends here; where the trees lie does not matter."""
    device = next(iter(metadata.values())).block_table.device
    packed = [PackedTreeRows.of(rows, device) for rows in trees]
    return attention.with_trees(metadata, packed, _WITH_TREES)


class _CudaTreeAttentionImpl(TreeAttentionImpl):
    """What the impls of both backends share."""

    def _refused(self) -> Iterable[tuple[str, bool]]:
        yield from super()._refused()
        kind = self.kv_cache_dtype
        yield f"a KV cache of {kind} (use --kv-cache-dtype auto)", kind != "auto"
        # Only the Triton backend knows these chunks.
        yield "chunked local attention", getattr(self, "chunk_lookback", -1) > -1

    @property
    def window(self) -> int:
        return self.sliding_window[0] + 1  # vLLM keeps (positions behind, ahead), -1 for all

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return keys, values


class _EagerAttentionBuilder:
    """Keeps attention out of vLLM's full CUDA graphs, which would replay a batch without trees.

    vLLM then takes graphs of the pieces between attention layers.
    """

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER


class SubSpecTritonAttentionImpl(_CudaTreeAttentionImpl, TritonAttentionImpl):
    """vLLM's Triton attention, and trees."""


class SubSpecTritonAttentionMetadataBuilder(_EagerAttentionBuilder, TritonAttentionMetadataBuilder):
    """vLLM's own; see ``_EagerAttentionBuilder``."""


class SubSpecTritonAttentionBackend(TritonAttentionBackend):
    """``TRITON_ATTN`` with tree nodes and draft steps."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return SubSpecTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return SubSpecTritonAttentionMetadataBuilder


class SubSpecFlashAttentionImpl(_CudaTreeAttentionImpl, FlashAttentionImpl):
    """vLLM's FlashAttention, and trees."""


class SubSpecFlashAttentionMetadataBuilder(_EagerAttentionBuilder, FlashAttentionMetadataBuilder):
    """vLLM's own; see ``_EagerAttentionBuilder``."""


class SubSpecFlashAttentionBackend(FlashAttentionBackend):
    """``FLASH_ATTN`` with tree nodes and draft steps."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SubSpecFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SubSpecFlashAttentionMetadataBuilder


_OURS = {
    AttentionBackendEnum.TRITON_ATTN: SubSpecTritonAttentionBackend,
    AttentionBackendEnum.FLASH_ATTN: SubSpecFlashAttentionBackend,
}


def override_cuda_attention(active: bool) -> None:
    """Let models built from now on in this process use our backends, or vLLM's own again.

    See ``attention.override_cpu_attention``.
    """
    for backend, ours in _OURS.items():
        if active:
            register_backend(backend, f"{__name__}.{ours.__name__}")
        else:
            backend.clear_override()
    _cached_get_attn_backend.cache_clear()
