"""The draft's own keys and values (design D2): one row a node, never in vLLM's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from subspec_kernels.grow_mask import pack_mask, unpack_mask
from torch import Tensor

from vllm_subspec.draft.growth import Rerooting

Tensors = Mapping[str, Tensor]


class DraftScratch:
    """Keys and values of one growth's nodes by slot, the root's in slot 0.

    The context is read where it lies, in vLLM's blocks. The buffer is kept between growths and
    grows when it must.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def begin(self, layers: Sequence[tuple[int, int]], num_requests: int, num_slots: int) -> None:
        """Make room for a growth.

        Args:
            layers: (kv heads, head dim) of each attention layer.
            num_requests: of the growth.
            num_slots: nodes that will be appended at most, the root included.
        """
        self.num_requests = num_requests
        self.num_slots = num_slots
        sizes = [2 * num_requests * heads * num_slots * dim for heads, dim in layers]
        if self._buffer.numel() < sum(sizes):
            self._buffer = self._buffer.new_empty(sum(sizes))
        pieces = torch.split(self._buffer[: sum(sizes)], sizes)
        shaped = [
            piece.view(2, num_requests, heads, num_slots, dim)
            for piece, (heads, dim) in zip(pieces, layers, strict=True)
        ]
        self._keys = [piece[0] for piece in shaped]
        self._values = [piece[1] for piece in shaped]
        self._levels = torch.empty(0, dtype=torch.int32, device=self._buffer.device)
        self._masks: dict[int, Tensor] = {}
        self._end = 0

    def advance(self, level: int, words: Tensor) -> Tensors:
        """Start a level.

        Args:
            level: how far below the root it is.
            words: int64 [requests, m, words], as ``DraftForward`` gets them: what the level's
                nodes see of the slots so far, their own included.

        Returns:
            What differs between two steps of a shape, for ``take``: nothing here, where each step
            is what Python makes of it.
        """
        m = words.shape[1]
        self.levels = self._levels.new_full((self.num_requests, m), level)
        self._words = words
        self._level = level
        self._levels = torch.cat([self._levels, self.levels[0]])
        self._masks = {}
        self._start, self._end = self._end, self._end + m
        return {}

    def take(self, inputs: Tensors) -> None:
        """Before ``append`` and ``mask``: what ``advance`` returned, or a copy of it."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the level's keys and values; return all of the layer's so far.

        Args:
            layer: attention layer.
            key: [requests * m, kv_heads, dim].
            value: like ``key``.

        Returns:
            Two views [requests, kv_heads, slots so far, dim].
        """
        keys, values = self._keys[layer], self._values[layer]
        _, heads, dim = key.shape
        span = slice(self._start, self._end)
        keys[:, :, span] = key.view(self.num_requests, -1, heads, dim).transpose(1, 2)
        values[:, :, span] = value.view(self.num_requests, -1, heads, dim).transpose(1, 2)
        return self.rows(layer)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of an attention layer so far, [requests, kv_heads, slots so far, dim]."""
        keys, values = self._keys[layer], self._values[layer]
        return keys[:, :, : self._end], values[:, :, : self._end]

    def mask(self, window: int) -> Tensor:
        """What each node sees, as the device's tree attention takes it: bool [requests, m, slots so
        far]; computed once per level and window.

        Args:
            window: positions a query may look back over, itself included; below 1: no limit.
        """
        if window not in self._masks:
            self._masks[window] = unpack_mask(self._words_within(window), self._end)
        return self._masks[window]

    def _words_within(self, window: int) -> Tensor:
        if window < 1:
            return self._words
        return self._words & pack_mask(self._levels > self._level - window)

    def move_down(self, rerooting: Rerooting, width: int) -> None:
        """The growth went on below a node: its slots come to the front, the others are dropped.

        The new root's and those below it keep what the draft computed for them.
        """
        slot, levels = rerooting.slot, rerooting.levels
        if slot is None:
            self._end, self._levels = 0, self._levels[:0]
            return
        first = 1 + levels * width
        kept = slice(1, 1 + self._end - first)
        for rows in (*self._keys, *self._values):
            rows[:, :, 0] = rows[:, :, slot].clone()
            rows[:, :, kept] = rows[:, :, first : self._end].clone()
        self._levels = torch.cat([self._levels[slot : slot + 1], self._levels[first:]]) - levels
        self._end = kept.stop
