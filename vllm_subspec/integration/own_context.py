"""A draft that keeps keys and values of the context itself, as a model apart from the target would.

Sharing the target's (arXiv 2509.18344, section 3.3) saves this memory and work, and drafts better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from subspec_kernels.grow_mask import pack_mask
from vllm.model_executor.layers.attention import Attention

from vllm_subspec.draft.scratch import DraftScratch, Tensors


class OwnContext:
    """The draft's keys and values of each request's context, in blocks like vLLM's and beside them.

    Args:
        layers: attention layers, their KV caches allocated.
        dtype: of keys and values.
    """

    def __init__(self, layers: Sequence[Attention], dtype: torch.dtype) -> None:
        self.caches = [torch.zeros_like(layer.kv_cache) for layer in layers]
        self.scratch = DraftScratch(dtype, torch.device("cpu"))
        self._layers = layers
        self._lengths: dict[str, int] = {}

    @property
    def requests(self) -> set[str]:
        """Ids of those whose context is kept."""
        return set(self._lengths)

    def forget(self, req_id: str) -> None:
        """A request is over."""
        self._lengths.pop(req_id, None)

    def missing(self, req_id: str, num_context: int) -> range:
        """Positions of a request's context that the draft has not computed yet."""
        return range(min(self._lengths.get(req_id, 0), num_context), num_context)

    def begin(self, positions: range) -> Tensors:
        """Make ready for one forward over ``positions``: a chain, each row seeing those before.

        Returns:
            As ``DraftScratch.advance``.
        """
        count = len(positions)
        heads = [(layer.num_kv_heads, layer.head_size) for layer in self._layers]
        self.scratch.begin(heads, 1, count)
        causal = torch.ones(1, count, count, dtype=torch.bool).tril()
        return self.scratch.advance(0, pack_mask(causal))

    def keep(self, req_id: str, positions: range, tables: Sequence[torch.Tensor]) -> None:
        """Store what that forward computed.

        Args:
            req_id: whose context it is.
            positions: as in ``begin``.
            tables: int32 [blocks] for each layer, the request's blocks in order.
        """
        at = torch.arange(positions.start, positions.stop)
        for index, (layer, cache) in enumerate(zip(self._layers, self.caches, strict=True)):
            keys, values = layer.impl.cache_views(cache)
            size = keys.shape[1]
            rows = tables[index][at // size].long(), at % size
            for view, computed in zip((keys, values), self.scratch.rows(index), strict=True):
                view[rows] = computed[0].transpose(0, 1)
        self._lengths[req_id] = positions.stop
