"""Accepted keys and values move to contiguous slots of vLLM's caches (design D3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from subspec_kernels.kv_compact import CacheViews, kv_compact
from torch.nn.utils.rnn import pad_sequence
from vllm.model_executor.layers.attention import Attention

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration.attention import TreeAttentionImpl
from vllm_subspec.verify.compaction import compaction_moves
from vllm_subspec.verify.walk import Walk


class Compactor:
    """The caches of all layers, those together that share a block table and look alike.

    Args:
        layers: attention layers by name, their caches allocated.
        groups: the KV cache group of each.

    Raises:
        UnsupportedError: a layer's attention backend knows no trees.
    """

    def __init__(self, layers: Mapping[str, Attention], groups: Mapping[str, int]) -> None:
        alike: dict[Any, list[torch.Tensor]] = {}
        for name, layer in layers.items():
            if not isinstance(layer.impl, TreeAttentionImpl):
                raise UnsupportedError(
                    f"the attention backend of {name}, {type(layer.impl).__name__}, knows no "
                    "trees: set --attention-backend to TRITON_ATTN or FLASH_ATTN, or run without "
                    "SubSpec"
                )
            for view in layer.impl.cache_views(layer.kv_cache):
                key = groups[name], view.shape, view.stride(), view.dtype
                alike.setdefault(key, []).append(view)
        self._caches = [(key[0], CacheViews(views)) for key, views in alike.items()]

    def compact(self, walk: Walk, roots: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
        """Bring each request's path together, in all layers.

        Args:
            walk: what was accepted.
            roots: index of each request's root among the batch's tokens.
            slots: int64 [tokens] per KV cache group: where each token's keys and values lie.
        """
        moves = compaction_moves(walk.rows)
        if not len(moves.src):
            return
        counts = torch.bincount(moves.requests, minlength=len(roots)).tolist()
        starts = torch.tensor(roots)[moves.requests]
        device = slots[0].device
        source, target = (
            pad_sequence(torch.split(starts + rows, counts), True, -1).to(device)
            for rows in (moves.src, moves.dst)
        )
        for group, caches in self._caches:
            of_tokens = slots[group]
            read = of_tokens[source].masked_fill(source < 0, -1)
            kv_compact(caches, read, of_tokens[target])
