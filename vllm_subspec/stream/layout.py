"""Where each weight lies: in the spill, and in a slot. A unit is what one read brings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_subspec.errors import ConfigError, SpillError

ALIGNMENT = 4096
"""Bytes. O_DIRECT wants offset, length and address in multiples of the disk's block."""
TENSOR_ALIGNMENT = 64
"""Bytes. One cache line, the widest vector register, and a multiple of every dtype's size."""
ROW_MULTIPLE = 64
"""Rows. A multiple of any matrix kernel's block: only a weight's last piece may have a rest."""


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
    """One unit: ``nbytes`` bytes (padded to ALIGNMENT) at ``offset`` of the spill.

    Mostly a decoder layer; a big head, or a piece of one, is a unit like any other. ``tensors``
    pairs each weight with its byte offset within the unit.
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

    def check_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Raise unless ``tensors`` has exactly the names, shapes and dtypes of this unit.

        Raises:
            SpillError: it has not; the message begins with ``label``.
        """
        wanted = {spec.name: (spec.shape, spec.dtype) for spec, _ in self.tensors}
        given = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        if given != wanted:
            wrong = sorted(n for n in wanted | given if wanted.get(n) != given.get(n))
            raise SpillError(
                f"{label}: weights {wrong} are {[given.get(n) for n in wrong]}, but the "
                f"layout has {[wanted.get(n) for n in wrong]}"
            )

    def stage(
        self, buffer: torch.Tensor, tensors: Mapping[str, torch.Tensor], label: str
    ) -> torch.Tensor:
        """Lay ``tensors`` out in ``buffer`` (uint8 [>= nbytes]) as they shall rest, padding zeroed.

        Returns:
            The first ``nbytes`` of ``buffer``.

        Raises:
            SpillError: the tensors are not this unit's.
        """
        self.check_tensors(tensors, label)
        staged = buffer[: self.nbytes].zero_()
        for name, view in self.views(staged).items():
            view.copy_(tensors[name])
        return staged


@dataclass(frozen=True)
class SpillLayout:
    """All streamed layers, one after another, and behind them what is only mapped.

    ``mapped`` holds one tensor a unit (an embedding table): it lies in the same file, is never
    read into a slot, and is read through the page cache instead (``Spill.map``).
    """

    layers: tuple[LayerLayout, ...]
    mapped: tuple[LayerLayout, ...] = ()

    @classmethod
    def of(
        cls, layers: Sequence[Sequence[TensorSpec]], mapped: Sequence[TensorSpec] = ()
    ) -> SpillLayout:
        """Place the layers' weights in the order given, then each mapped tensor.

        Raises:
            ConfigError: there is no layer, a unit holds no bytes, or a name is given twice.
        """
        if not layers:
            raise ConfigError("a stream needs at least one layer; keep all layers resident instead")
        names = [spec.name for spec in mapped]
        if len(names) != len(set(names)):
            raise ConfigError(f"a mapped tensor is named twice: {sorted(names)}")
        labels = [f"layer {index}" for index in range(len(layers))]
        labels += [f"mapped tensor {name!r}" for name in names]
        placed: list[LayerLayout] = []
        offset = 0
        for label, specs in zip(labels, [*layers, *([spec] for spec in mapped)], strict=True):
            placed.append(_place(label, specs, offset))
            offset += placed[-1].nbytes
        return cls(tuple(placed[: len(layers)]), tuple(placed[len(layers) :]))

    @property
    def units(self) -> tuple[LayerLayout, ...]:
        """Everything in the file, in its order: layers, then mapped tensors."""
        return self.layers + self.mapped

    def mapped_index(self, name: str) -> int:
        """Index among ``units`` of the mapped tensor ``name``.

        Raises:
            SpillError: there is none of that name.
        """
        names = [unit.tensors[0][0].name for unit in self.mapped]
        if name not in names:
            raise SpillError(f"no mapped tensor is named {name!r}; there are {names}")
        return self.num_layers + names.index(name)

    @property
    def num_layers(self) -> int:
        """How many layers are streamed."""
        return len(self.layers)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole spill."""
        return self.units[-1].offset + self.units[-1].nbytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one pass over all layers moves; mapped tensors are not among them."""
        return self.layers[-1].offset + self.layers[-1].nbytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: the largest layer fits."""
        return max(layer.nbytes for layer in self.layers)

    def describe(self) -> list[list[list[object]]]:
        """The layout as JSON values: per unit, per weight, [name, shape, dtype, offset]."""
        return [
            [
                [spec.name, list(spec.shape), str(spec.dtype).removeprefix("torch."), start]
                for spec, start in layer.tensors
            ]
            for layer in self.units
        ]


@dataclass(frozen=True)
class RowPiece:
    """Rows ``start`` to ``stop`` (exclusive) of a weight [rows, ...]; ``spec`` names the piece."""

    spec: TensorSpec
    start: int
    stop: int


def split_rows(spec: TensorSpec, max_bytes: int) -> tuple[RowPiece, ...]:
    """Cut a big weight [out, in] into row pieces, each a unit of at most ``max_bytes``.

    For a head two or three times as large as a layer: as one unit it would set the size of every
    slot. With pieces of the largest layer's size (``SpillLayout.slot_bytes`` of the layers alone)
    slots stay as they are, and each piece's product runs under the read of the next; the outputs
    are concatenated along the last axis. Pieces are as even as ROW_MULTIPLE allows.

    Raises:
        ConfigError: the weight has no rows, or one row is larger than ``max_bytes``.
    """
    rows = spec.shape[0] if spec.shape else 0
    if rows == 0 or spec.nbytes == 0:
        raise ConfigError(f"{spec.name} of shape {spec.shape} has no rows to split")
    most = max_bytes // ALIGNMENT * ALIGNMENT * rows // spec.nbytes
    if most < 1:
        raise ConfigError(
            f"max_bytes={max_bytes}: one row of {spec.name} has {spec.nbytes // rows} bytes, and a "
            f"unit is padded to {ALIGNMENT}; allow more"
        )
    even = math.ceil(rows / math.ceil(rows / most))
    aligned = round_up(even, ROW_MULTIPLE)
    step = aligned if aligned <= most else even
    bounds = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    return tuple(
        RowPiece(TensorSpec(f"{spec.name}[{a}:{b}]", (b - a, *spec.shape[1:]), spec.dtype), a, b)
        for a, b in bounds
    )


def _place(label: str, specs: Sequence[TensorSpec], offset: int) -> LayerLayout:
    placed: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        start = round_up(end, TENSOR_ALIGNMENT)
        placed.append((spec, start))
        end = start + spec.nbytes
    names = [spec.name for spec in specs]
    if len(names) != len(set(names)):
        raise ConfigError(f"{label} names a weight twice: {sorted(names)}")
    if end == 0:
        raise ConfigError(f"{label} has no bytes to stream; leave it out of the stream")
    return LayerLayout(offset, round_up(end, ALIGNMENT), tuple(placed))
