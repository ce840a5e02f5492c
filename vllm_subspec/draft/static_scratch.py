"""A scratch whose steps are replayed: all that differs between two of a shape is in tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from subspec_kernels.grow_mask import WORD_BITS
from torch import Tensor
from torch.nn.functional import pad

from vllm_subspec.draft.graphs import StepShape
from vllm_subspec.draft.scratch import DraftScratch, Tensors


class StaticScratch(DraftScratch):
    """``DraftScratch`` for graphs: growths of as many requests have their keys and values in the
    same place, and a step spans the slots of its ``StepShape``.

    ``mask`` returns packed words, int64 [requests, m, words of the shape].

    Attributes:
        is_static: whether the growth lies in what was reserved. A larger one has memory of its
            own, which moves: its steps must not be replayed.
        shape: of the level that ``advance`` started.
    """

    shape: StepShape

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self.is_static = False
        self._most_requests = self._most_slots = 0
        self._static = self._loose = self._buffer
        self._windows: tuple[int, ...] = (0,)

    def reserve(
        self,
        layers: Sequence[tuple[int, int]],
        num_requests: int,
        num_slots: int,
        windows: Iterable[int] = (),
    ) -> None:
        """Take the memory of the growths whose steps are captured, once.

        Args:
            layers: as for ``begin``.
            num_requests: of a growth at most.
            num_slots: of each growth.
            windows: of the attention layers, as for ``mask``.
        """
        self._windows = tuple(sorted({0, *(max(0, window) for window in windows)}))
        super().begin(layers, num_requests, num_slots)
        self._static = self._buffer
        self._most_requests, self._most_slots = num_requests, num_slots

    def begin(self, layers: Sequence[tuple[int, int]], num_requests: int, num_slots: int) -> None:
        self.is_static = num_requests <= self._most_requests and num_slots <= self._most_slots
        self._buffer = self._static if self.is_static else self._loose
        super().begin(layers, num_requests, self._most_slots if self.is_static else num_slots)
        if not self.is_static:
            self._loose = self._buffer
        self._spanned_slots, self.num_slots = self.num_slots, num_slots

    def advance(self, level: int, words: Tensor) -> Tensors:
        super().advance(level, words)
        width = words.shape[1]
        most_levels = (self._spanned_slots - 1) // width
        self.shape = StepShape.of(self.num_requests, width, level, most_levels)
        num_words = -(-self.shape.num_slots // WORD_BITS)
        inputs = {
            "levels": self.levels,
            "slots": torch.arange(self._start, self._end, device=words.device),
        }
        for window in self._windows:
            seen = self._words_within(window)
            inputs[_mask_name(window)] = pad(seen, (0, num_words - seen.shape[2]))
        return inputs

    def take(self, inputs: Tensors) -> None:
        self._inputs = inputs
        self.levels = inputs["levels"]

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DraftScratch``; the views span the slots of ``shape``, and what lies in those that
        no node sees is anything."""
        _, heads, dim = key.shape
        spanned = []
        for rows, new in ((self._keys[layer], key), (self._values[layer], value)):
            by_head = new.view(self.num_requests, -1, heads, dim).transpose(1, 2)
            rows.index_copy_(2, self._inputs["slots"], by_head)
            spanned.append(rows[:, :, : self.shape.num_slots])
        return spanned[0], spanned[1]

    def mask(self, window: int) -> Tensor:
        return self._inputs[_mask_name(max(0, window))]


def _mask_name(window: int) -> str:
    return f"sees {window}"
