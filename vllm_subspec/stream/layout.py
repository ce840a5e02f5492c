"""Where each weight of a streamed layer lies: in the spill, and in a slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_subspec.errors import ConfigError

ALIGNMENT = 4096
"""Bytes. O_DIRECT wants offset, length and address in multiples of the disk's block."""
TENSOR_ALIGNMENT = 64
"""Bytes. One cache line, the widest vector register, and a multiple of every dtype's size."""


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """A weight's name, shape and dtype; it is stored contiguous."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerLayout:
    """One layer: ``nbytes`` bytes (padded to ALIGNMENT) at ``offset`` of the spill.

    ``tensors`` pairs each weight with its byte offset within the layer.
    """

    offset: int
    nbytes: int
    tensors: tuple[tuple[TensorSpec, int], ...]

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The layer's weights as views into ``buffer``, a uint8 [>= nbytes] tensor."""
        return {
            spec.name: buffer[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
            for spec, start in self.tensors
        }


@dataclass(frozen=True)
class SpillLayout:
    """All streamed layers, one after another."""

    layers: tuple[LayerLayout, ...]

    @classmethod
    def of(cls, layers: Sequence[Sequence[TensorSpec]]) -> SpillLayout:
        """Place the layers' weights in the order given.

        Raises:
            ConfigError: there is no layer, a layer holds no bytes, or names a weight twice.
        """
        if not layers:
            raise ConfigError("a stream needs at least one layer; keep all layers resident instead")
        placed, offset = [], 0
        for index, specs in enumerate(layers):
            layer = _place(index, specs, offset)
            placed.append(layer)
            offset += layer.nbytes
        return cls(tuple(placed))

    @property
    def num_layers(self) -> int:
        """How many layers are streamed."""
        return len(self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole spill."""
        return self.layers[-1].offset + self.layers[-1].nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the largest layer fits."""
        return max(layer.nbytes for layer in self.layers)

    def describe(self) -> list[list[list[object]]]:
        """The layout as JSON values: per layer, per weight, [name, shape, dtype, offset]."""
        return [
            [
                [spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), start]
                for spec, start in layer.tensors
            ]
            for layer in self.layers
        ]


def _place(index: int, specs: Sequence[TensorSpec], offset: int) -> LayerLayout:
    placed: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        start = round_up(end, TENSOR_ALIGNMENT)
        placed.append((spec, start))
        end = start + spec.nbytes
    names = [spec.name for spec in specs]
    if len(names) != len(set(names)):
        raise ConfigError(f"layer {index} names a weight twice: {sorted(names)}")
    if end == 0:
        raise ConfigError(f"layer {index} has no bytes to stream; leave it out of the stream")
    return LayerLayout(offset, round_up(end, ALIGNMENT), tuple(placed))
