"""The draft forward of a growth: the target's module tree in draft view, context in vLLM's blocks.

A step is given all that it reads beside weights, blocks and scratch as tensors by name, so that a
device which has graphs can replay it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_subspec.draft.graphs import StepGraphs
from vllm_subspec.draft.growth import Growth, Rerooting
from vllm_subspec.draft.scratch import Tensors
from vllm_subspec.draft.static_scratch import StaticScratch
from vllm_subspec.integration.attention import DraftContext, draft_attention
from vllm_subspec.integration.device import Device
from vllm_subspec.integration.draft_view import attend_when_drafting
from vllm_subspec.integration.linear import View
from vllm_subspec.integration.own_context import OwnContext


class InContext(Protocol):
    """What is asked of a request: see ``drafter.DraftRequest``."""

    @property
    def req_id(self) -> str: ...
    @property
    def num_context(self) -> int: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def block_tables(self) -> Sequence[torch.Tensor]: ...


class DraftForward:
    """``draft.growth.DraftForward`` over one growth at a time.

    Args:
        vllm_config: of the engine.
        view: switches the modules between target and draft.
        device: where they are.
        share_kv: whether drafts see the target's keys and values of the context.
    """

    def __init__(
        self, vllm_config: VllmConfig, view: View, device: Device, share_kv: bool = True
    ) -> None:
        self._vllm_config = vllm_config
        self._view = view
        self._device = device
        self._place = device.torch_device
        self._scratch = device.scratch(vllm_config.model_config.dtype)
        self._context = DraftContext([], torch.empty(0, dtype=torch.int32))
        self._graphs = StepGraphs(self._step, device.graphs()) if device.captures_drafts else None
        self._captures = False
        self._share_kv = share_kv
        self._own: OwnContext | None = None

    def bind(self, model: nn.Module, layers: Mapping[str, Attention]) -> None:
        """Take the loaded model and its attention layers by name; they draft in draft view."""
        self._model = model
        self._layers = layers
        self._heads = [(layer.num_kv_heads, layer.head_size) for layer in layers.values()]
        self._device.fuse_drafts(model, self._view)

    def attend_in_groups(self, groups: Mapping[str, int]) -> None:
        """Take the KV cache group of each layer, once the cache is there."""
        self._groups = [groups[name] for name in self._layers]
        if not self._share_kv:
            dtype = self._vllm_config.model_config.dtype
            self._own = OwnContext(list(self._layers.values()), dtype)
        for index, (name, layer) in enumerate(self._layers.items()):
            attend = partial(self._attend, layer, groups[name], index)
            attend_when_drafting(layer, self._view, attend)

    @property
    def num_slots(self) -> int:
        """Nodes that the growth has room for, its root included."""
        return self._scratch.num_slots

    def begin(self, requests: Sequence[InContext], num_slots: int) -> None:
        """Start a growth below the last committed tokens of ``requests``."""
        self._scratch.begin(self._heads, len(requests), num_slots)
        self.take_context(requests)

    def go_on(self, requests: Sequence[InContext], rerooting: Rerooting, width: int) -> None:
        """Go on with the growth below an accepted path."""
        self._scratch.move_down(rerooting, width)
        self.take_context(requests)

    def take_context(self, requests: Sequence[InContext]) -> None:
        """Attend to what ``requests`` have committed up to now."""
        if self._own is not None:
            for request in requests:
                self._compute_context(self._own, request)
        tables = zip(*(request.block_tables for request in requests), strict=True)
        lengths = torch.tensor([request.num_context for request in requests], device=self._place)
        self._root_positions = lengths[:, None]
        self._context_inputs = {"lengths": lengths.int()} | {
            _table_name(group): torch.stack(rows) for group, rows in enumerate(tables)
        }
        self._num_groups = len(self._context_inputs) - 1

    def remembered(self) -> set[str]:
        """Ids of the requests whose context is kept apart."""
        return self._own.requests if self._own is not None else set()

    def forget(self, req_id: str) -> None:
        """A request is over."""
        if self._own is not None:
            self._own.forget(req_id)

    def _compute_context(self, own: OwnContext, request: InContext) -> None:
        """The draft's own keys and values of what a request committed since, by one forward."""
        positions = own.missing(request.req_id, request.num_context)
        if not positions:
            return
        inputs = {
            "tokens": torch.tensor(request.tokens[positions.start : positions.stop]).long(),
            "positions": torch.arange(positions.start, positions.stop),
            "lengths": torch.tensor([positions.start], dtype=torch.int32),
            **own.begin(positions),
        }
        inputs |= {_table_name(i): rows[None] for i, rows in enumerate(request.block_tables)}
        self._num_groups = len(request.block_tables)
        scratch, self._scratch = self._scratch, own.scratch
        try:
            self._hidden(inputs)
        finally:
            self._scratch = scratch
        own.keep(request.req_id, positions, [request.block_tables[i] for i in self._groups])

    def __call__(self, tokens: torch.Tensor, level: int, words: torch.Tensor) -> torch.Tensor:
        # vLLM's C++ kernels read positions as a dense array: an expanded view would not do.
        positions = (self._root_positions + level).expand_as(tokens).flatten().contiguous()
        inputs = {
            "tokens": tokens.flatten().contiguous(),
            "positions": positions,
            **self._scratch.advance(level, words),
            **self._context_inputs,
        }
        logits = self._run(inputs)["logits"]
        return logits.view(*tokens.shape, -1)

    def _run(self, inputs: Tensors) -> Tensors:
        if self._graphs is None:
            return self._step(inputs)
        assert isinstance(self._scratch, StaticScratch)
        shape = self._scratch.shape if self._scratch.is_static else None
        if self._captures and shape is not None and shape not in self._graphs:
            self._graphs.capture(shape, inputs)
        return self._graphs.run(shape, inputs)

    def _step(self, inputs: Tensors) -> Tensors:
        """One level through the model: launches only, no look at data from the host."""
        hidden = self._hidden(inputs)
        with self._view.draft():
            return {"logits": self._model.compute_logits(hidden).float()}

    def _hidden(self, inputs: Tensors) -> torch.Tensor:
        """The shadow's hidden states [n, hidden]."""
        self._scratch.take(inputs)
        self._context.lengths = inputs["lengths"]
        self._context.block_tables = [inputs[_table_name(g)] for g in range(self._num_groups)]
        tokens = inputs["tokens"]
        context = set_forward_context({}, self._vllm_config, num_tokens=len(tokens))
        with self._view.draft(), context:
            hidden: torch.Tensor = self._model(input_ids=tokens, positions=inputs["positions"])
        return hidden

    def _attend(
        self,
        layer: Attention,
        group: int,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        kv_cache = layer.kv_cache if self._own is None else self._own.caches[index]
        return draft_attention(
            layer, kv_cache, query, key, value, self._context, group, self._scratch, index
        )

    # -- graphs ----------------------------------------------------------------------------------

    def reserve(self, num_requests: int, num_slots: int) -> None:
        """Take the scratch of growths that will be captured, before vLLM sizes its KV cache."""
        if isinstance(self._scratch, StaticScratch):
            windows = [layer.impl.window for layer in self._layers.values()]
            self._scratch.reserve(self._heads, num_requests, num_slots, windows)

    @torch.inference_mode()
    def capture(
        self, num_requests: int, width: int, num_slots: int, tables: Sequence[torch.Tensor]
    ) -> int:
        """Capture what growths of 1 to ``num_requests`` requests do, by growing some on nothing.

        Call it between passes: a step that is captured must not pause for the target.

        Args:
            num_requests: as for ``reserve``.
            width: of a level.
            num_slots: as for ``reserve``.
            tables: a block table [blocks] a KV cache group, of any blocks.

        Returns:
            How many graphs there are.
        """
        if self._graphs is None:
            return 0
        self._captures = True
        for count in range(1, num_requests + 1):
            self.begin([_Nothing(tables)] * count, num_slots)
            roots = torch.zeros(count, dtype=torch.int64, device=self._place)
            growth = Growth(self, roots, width)
            for _ in range((num_slots - 1) // width):
                growth.step()
        self._captures = False
        return len(self._graphs)


@dataclass(frozen=True)
class _Nothing:
    """A request without context."""

    block_tables: Sequence[torch.Tensor]
    num_context: int = 0
    req_id: str = ""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))


def _table_name(group: int) -> str:
    return f"blocks of group {group}"
