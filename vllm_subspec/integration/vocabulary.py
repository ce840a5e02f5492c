"""The two ends of the model: the embedding table, and the head that may be tied to it.

Under a budget the table is memory-mapped (a pass looks up few rows), the head streams behind the
layers, in pieces no larger than a layer, or stays; drafting uses the head's shadow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_subspec.integration.linear import View
from vllm_subspec.memory import unmap_pages
from vllm_subspec.plan.ledger import EMBEDDING_CACHE_BYTES
from vllm_subspec.shadow import ShadowLinear

_LOOKUPS = EMBEDDING_CACHE_BYTES // (64 << 10)
"""Rows of a mapped table after which its pages are given up: a miss maps 64 KiB around it."""

Stream = Callable[[], Iterator[torch.Tensor]]


class Vocabulary:
    """Finds the embedding table and the head while vLLM builds the model.

    Neither passes through the offloader's seam, which is for decoder layers, so their modules are
    met as they are registered.

    Args:
        view: which view computes now.
        finish: called once all rows of the table, and those of an untied head, are loaded.
    """

    def __init__(self, view: View, finish: Callable[[], None]) -> None:
        self.embedding: VocabParallelEmbedding | None = None
        self.head: ParallelLMHead | None = None
        self._view = view
        self._finish = finish
        self._missing: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meet what is registered inside the block: the first table and the first head count."""
        handle = register_module_module_registration_hook(self._meet)
        try:
            yield
        finally:
            handle.remove()

    def _meet(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        known = module is self.embedding or module is self.head
        if known or not isinstance(module, VocabParallelEmbedding):
            return
        if type(module.quant_method) is not UnquantizedEmbeddingMethod:
            return  # a quantised checkpoint is refused elsewhere
        if isinstance(module, ParallelLMHead):
            if self.head is not None:
                return
            self.head = module
        elif self.embedding is None:
            self.embedding = module
        else:
            return
        module.quant_method = VocabularyMethod(module.quant_method, self._view, self._finish)
        self._count(module)

    def _count(self, module: VocabParallelEmbedding) -> None:
        weight = module.weight
        load = weight.weight_loader
        key = id(weight)
        self._missing[key] = module.org_vocab_size * weight.shape[1]

        def load_and_count(param: Any, loaded: torch.Tensor, *args: Any, **kw: Any) -> Any:
            result = load(param, loaded, *args, **kw)
            self._missing[key] -= loaded.numel()
            if all(self._missing.get(id(w), 0) <= 0 for w in self.weights().values()):
                self._finish()
            return result

        weight.weight_loader = load_and_count

    @property
    def is_tied(self) -> bool:
        """Whether head and table are one tensor."""
        both = self.embedding is not None and self.head is not None
        return both and self.head.weight is self.embedding.weight

    def weights(self) -> dict[str, nn.Parameter]:
        """The distinct tensors by name, "embedding" and "head"; a tied pair is the former."""
        found = {}
        if self.embedding is not None:
            found["embedding"] = self.embedding.weight
        if self.head is not None and not self.is_tied:
            found["head"] = self.head.weight
        return found


class VocabularyMethod(QuantizeMethodBase):
    """vLLM's unquantised method, with a head that may be streamed and has a shadow.

    Attributes:
        shadow: of the head, for draft view.
        stream: gives the head's row pieces [rows, hidden] in order, each valid until the next is
            asked for; ``None`` where the head stays.
        is_mapped: the weight is a file's mapping, of which ``EMBEDDING_CACHE_BYTES`` may stay.
        keeps_plain: leave the weight as it was loaded. vLLM packs a copy of it otherwise, of the
            table even, which no budget has room for.
    """

    def __init__(self, inner: QuantizeMethodBase, view: View, finish: Callable[[], None]) -> None:
        self.inner = inner
        self._view = view
        self._finish = finish
        self.shadow: ShadowLinear | None = None
        self.stream: Stream | None = None
        self.is_mapped = False
        self.keeps_plain = False
        self._num_lookups = 0

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.inner.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._finish()
        if not self.keeps_plain:
            self.inner.process_weights_after_loading(layer)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        rows = self.inner.embedding(layer, input_)
        if self.is_mapped:
            self._num_lookups += input_.numel()
            if self._num_lookups >= _LOOKUPS:
                unmap_pages(layer.weight)
                self._num_lookups = 0
        return rows

    def tie_weights(self, layer: nn.Module, embed_tokens: VocabParallelEmbedding) -> nn.Module:
        return self.inner.tie_weights(layer, embed_tokens)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._view.drafting and self.shadow is not None:
            return self.shadow(x, bias)
        if self.stream is not None:
            logits = x.new_empty(*x.shape[:-1], layer.num_embeddings_per_partition)
            first = 0
            for piece in self.stream():
                logits[..., first : first + len(piece)] = F.linear(x, piece)
                first += len(piece)
            return logits if bias is None else logits + bias
        if self.keeps_plain:
            return F.linear(x, layer.weight, bias)
        return self.inner.apply(layer, x, bias)
