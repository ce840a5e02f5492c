"""The draft's own keys and values (design D2): beside the context, never in vLLM's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DraftScratch:
    """Keys and values of one growth: context first (right-aligned), then the nodes by slot.

    The context is copied in once per growth; each level appends its nodes. Requests with a
    shorter context have padding on the left, which no mask lets through. The buffer is kept
    between growths and grows when it must.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def begin(
        self, layers: Sequence[tuple[int, int]], contexts: Sequence[int], num_slots: int
    ) -> None:
        """Make room for a growth.

        Args:
            layers: (kv heads, head dim) of each attention layer.
            contexts: positions before the root, per request.
            num_slots: nodes that will be appended at most, the root included.
        """
        self.contexts = torch.tensor(contexts, device=self._buffer.device)
        self.num_requests = len(contexts)
        self._num_context = max(contexts)
        length = self._num_context + num_slots
        sizes = [2 * self.num_requests * heads * length * dim for heads, dim in layers]
        if self._buffer.numel() < sum(sizes):
            self._buffer = self._buffer.new_empty(sum(sizes))
        pieces = torch.split(self._buffer[: sum(sizes)], sizes)
        shaped = [
            piece.view(2, self.num_requests, heads, length, dim)
            for piece, (heads, dim) in zip(pieces, layers, strict=True)
        ]
        self._keys = [piece[0] for piece in shaped]
        self._values = [piece[1] for piece in shaped]
        for piece in shaped:  # padding meets a zero weight, and zero times NaN is NaN
            for request, context in enumerate(contexts):
                piece[:, request, :, : self._num_context - context].zero_()
        self._levels = self.contexts.new_empty(0)
        self._masks: dict[int, Tensor] = {}
        self._end = self._num_context

    def context(self, layer: int, request: int) -> tuple[Tensor, Tensor]:
        """Where the request's context goes: keys and values [kv_heads, context, dim], views."""
        start = self._num_context - int(self.contexts[request])
        span = slice(start, self._num_context)
        return self._keys[layer][request, :, span], self._values[layer][request, :, span]

    def advance(self, level: int, nodes: Tensor) -> None:
        """Start a level: ``nodes`` is bool [requests, m, slots so far, the level's m included]."""
        self._nodes = nodes
        self._level = level
        m = nodes.shape[1]
        self._levels = torch.cat([self._levels, self._levels.new_full((m,), level)])
        self._masks = {}
        self._start, self._end = self._end, self._num_context + nodes.shape[2]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the level's keys and values; return all of the layer's so far.

        Args:
            layer: attention layer.
            key: [requests * m, kv_heads, dim].
            value: like ``key``.

        Returns:
            Two views [requests, kv_heads, context + slots so far, dim].
        """
        keys, values = self._keys[layer], self._values[layer]
        _, heads, dim = key.shape
        span = slice(self._start, self._end)
        keys[:, :, span] = key.view(self.num_requests, -1, heads, dim).transpose(1, 2)
        values[:, :, span] = value.view(self.num_requests, -1, heads, dim).transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def mask(self, window: int) -> Tensor:
        """bool [requests, m, context + slots so far]; computed once per level and window.

        Args:
            window: positions a query may look back over, itself included; below 1: no limit.
        """
        if window not in self._masks:
            columns = torch.arange(self._num_context, device=self.contexts.device)
            before_root = columns - self._num_context  # position relative to the root
            in_context = before_root >= -self.contexts[:, None]
            nodes = self._nodes
            if window > 0:
                in_context = in_context & (before_root > self._level - window)
                nodes = nodes & (self._levels > self._level - window)
            context = in_context[:, None].expand(-1, nodes.shape[1], -1)
            self._masks[window] = torch.cat([context, nodes], -1)
        return self._masks[window]
