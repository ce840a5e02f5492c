"""vLLM's attention, plus the two cases it lacks: tree nodes, and drafts with own KV.

Metadata of a class of ours marks trees; everything else passes through. What any backend of vLLM
needs for that comes first, its CPU backend after it (the GPUs' are in ``cuda_attention``),
registered over ``CPU_ATTN`` by vLLM's own ``register_backend``
(v1/attention/backends/registry.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from subspec_kernels.kv_cache import paged_views
from subspec_kernels.tree_attention import tree_attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_subspec.draft.scratch import DraftScratch
from vllm_subspec.errors import UnsupportedError


@dataclass(frozen=True)
class TreeRows:
    """One request's tree within the batch's tokens.

    Attributes:
        start: index of the root among the batch's tokens; its nodes follow in level order.
        batch_row: the request's row of the block table.
        num_context: int32 [1], positions before the root.
        mask: bool [n + 1, n + 1], true at a row itself and at its ancestors.
        depths: int32 [n + 1], levels below the root.
    """

    start: int
    batch_row: int
    num_context: torch.Tensor
    mask: torch.Tensor
    depths: torch.Tensor
    _within: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def mask_within(self, window: int) -> torch.Tensor:
        """The mask as the device's tree attention takes it; computed once per step and window.

        Args:
            window: positions a row may look back over, itself included; below 1: no limit.
        """
        if window not in self._within:
            self._within[window] = self._limited(window)
        return self._within[window]

    def _limited(self, window: int) -> torch.Tensor:
        if window < 1:
            return self.mask
        return self.mask & (self.depths > self.depths[:, None] - window)


@dataclass
class WithTrees:
    """What metadata of a batch have when some of its requests verify a tree wider than a chain."""

    trees: Sequence[TreeRows] = field(default=(), kw_only=True)


@dataclass
class TreeAttentionMetadata(CPUAttentionMetadata, WithTrees):
    """vLLM's CPU metadata, with trees."""


_WITH_TREES: Mapping[type, type[WithTrees]] = {CPUAttentionMetadata: TreeAttentionMetadata}


def with_trees(
    metadata: Mapping[str, Any],
    trees: Sequence[TreeRows],
    kinds: Mapping[type, type[WithTrees]] = _WITH_TREES,
) -> dict[str, Any]:
    """A batch's metadata by layer, marked with its trees; layers go on sharing theirs.

    Args:
        metadata: what vLLM's builders made; left as it is.
        trees: at least one, as the device's tree attention takes them.
        kinds: the marked class of each of vLLM's.
    """
    marked = {
        id(of_layer): kinds[type(of_layer)](**vars(of_layer), trees=trees)
        for of_layer in metadata.values()
    }
    return {name: marked[id(of_layer)] for name, of_layer in metadata.items()}


class TreeAttentionImpl:
    """Over one of vLLM's attention impls: its own forward, then over again for rows of trees.

    Raises:
        UnsupportedError: the layer does what tree attention does not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, used in self._refused():
            if used:
                raise UnsupportedError(f"SubSpec does not draft through {name} yet")

    def _refused(self) -> Iterable[tuple[str, bool]]:
        yield "ALiBi", self.alibi_slopes is not None
        yield "attention sinks", self.sinks is not None
        is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        yield "an fp8 KV cache (use --kv-cache-dtype auto)", is_quantized
        yield "KV sharing between layers", self.kv_sharing_target_layer_name is not None

    @property
    def window(self) -> int:
        """Positions a query looks back over, itself included; below 1: no limit."""
        raise NotImplementedError

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's cache, both as [blocks, block, kv_heads, dim]."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        args = (output, output_scale, output_block_scale)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, *args)
        if isinstance(attn_metadata, WithTrees):
            for tree in attn_metadata.trees:
                self._verify(query, key, value, kv_cache, attn_metadata, tree, output)
        return output

    def _verify(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        tree: TreeRows,
        output: torch.Tensor,
    ) -> None:
        rows = slice(tree.start, tree.start + len(tree.depths))
        out = tree_attention(
            query[rows][None],
            *self.cache_views(kv_cache),
            metadata.block_table[tree.batch_row][None],
            tree.num_context,
            key[rows].transpose(0, 1)[None],
            value[rows].transpose(0, 1)[None],
            tree.mask_within(self.window)[None],
            tree.depths[None],
            self.scale,
            self.logits_soft_cap,
            self.window,
        )
        output[rows] = out[0]


@dataclass
class DraftContext:
    """Where the requests of a growth have their context.

    Attributes:
        block_tables: int32 [requests, blocks] per KV cache group, each request's blocks in order.
        lengths: int32 [requests], positions before the root.
    """

    block_tables: list[torch.Tensor]
    lengths: torch.Tensor


def draft_attention(
    layer: Any,
    kv_cache: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: DraftContext,
    group: int,
    scratch: DraftScratch,
    index: int,
) -> torch.Tensor:
    """One level of nodes through one attention layer: context in vLLM's blocks, own KV beside.

    Args:
        layer: vLLM's ``Attention``.
        kv_cache: where the context's keys and values are, in the layout of the layer's own.
        query: [requests * m, heads * dim].
        key: [requests * m, kv_heads * dim].
        value: like ``key``.
        context: of the requests.
        group: the layer's KV cache group.
        scratch: gets the nodes' keys and values.
        index: of the layer in the scratch.

    Returns:
        [requests * m, heads * dim].
    """
    impl = layer.impl
    kv_shape = (-1, impl.num_kv_heads, impl.head_size)
    keys, values = scratch.append(index, key.view(kv_shape), value.view(kv_shape))
    out = tree_attention(
        query.view(scratch.num_requests, -1, impl.num_heads, impl.head_size),
        *impl.cache_views(kv_cache),
        context.block_tables[group],
        context.lengths,
        keys,
        values,
        scratch.mask(impl.window),
        scratch.levels,
        impl.scale,
        impl.logits_soft_cap,
        impl.window,
    )
    return out.view(query.shape)


def override_cpu_attention(active: bool) -> None:
    """Let models built from now on in this process use our backend, or vLLM's own again.

    vLLM remembers its choice of a backend, so an engine that ran here before would decide for
    the next one.
    """
    if active:
        path = f"{__name__}.{SubSpecCPUAttentionBackend.__name__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
    else:
        AttentionBackendEnum.CPU_ATTN.clear_override()
    _cached_get_attn_backend.cache_clear()


class SubSpecCPUAttentionBackend(CPUAttentionBackend):
    """``CPU_ATTN`` with tree nodes and draft steps."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SubSpecCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SubSpecCPUAttentionMetadataBuilder


class SubSpecCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Keeps the cache in the plain layout: AMX packs keys in a way that we cannot read."""

    def _set_isa_to_layers(self, layer_names: list[str]) -> None:
        if self.isa == "amx":
            self.isa = "vec"
        if self.isa not in ("vec", "vec16"):
            raise UnsupportedError(
                f"attention kernel {self.isa!r} keeps the KV cache in a layout that SubSpec does "
                f"not read yet; it runs on x86 CPUs. Turn SubSpec off on this machine."
            )
        super()._set_isa_to_layers(layer_names)


class SubSpecCPUAttentionImpl(TreeAttentionImpl, CPUAttentionBackendImpl):
    """vLLM's own on a CPU, and trees."""

    @property
    def window(self) -> int:
        return self.sliding_window

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_views(kv_cache)
