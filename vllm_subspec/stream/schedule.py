"""Which layer is read into which slot, and when: pure logic, no threads, no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_subspec.errors import ConfigError


@dataclass(frozen=True)
class Read:
    """One read that may start: visit ``sequence`` needs ``layer``, and ``slot`` is free for it."""

    sequence: int
    layer: int
    slot: int


class _State(enum.Enum):
    EMPTY = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    HELD = enum.auto()
    FAILED = enum.auto()


@dataclass
class _Slot:
    state: _State = _State.EMPTY
    layer: int = -1
    read: Read | None = None
    error: BaseException | None = None

    def belongs_to(self, layer: int) -> bool:
        """Whether this slot has, is getting, or failed to get ``layer``: no read is due then."""
        return self.state is not _State.EMPTY and self.layer == layer


class StreamSchedule:
    """A ring of slots that follows the target around its layers (arXiv 2509.18344, prefetch).

    The target visits layers 0..num_layers-1 again and again. Visit ``n`` is of layer
    ``n % num_layers`` and lives in slot ``n % num_slots``. Reads may be due for the next
    ``num_slots`` visits, also across the end of a pass, so prefetching while the draft runs
    needs no case of its own. A slot that already has the layer its visit wants is not read
    again; with as many slots as layers that makes every layer resident after one pass.

    Args:
        num_layers: streamed layers of the model, at least 1.
        num_slots: buffers of the ring, at least 1; more than ``num_layers`` counts as that many.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, num_layers: int, num_slots: int) -> None:
        if num_layers < 1:
            raise ConfigError(f"num_layers={num_layers}: a stream needs at least one layer")
        if num_slots < 1:
            raise ConfigError(
                f"num_slots={num_slots}: a stream needs at least one slot, two to overlap"
            )
        self.num_layers = num_layers
        self.num_slots = min(num_slots, num_layers)
        self._slots = [_Slot() for _ in range(self.num_slots)]
        self._visit = 0  # the visit that acquire() serves next
        self._lookahead = 0  # the first visit whose read was not looked at yet

    @property
    def next_layer(self) -> int:
        """The layer that ``acquire`` serves next."""
        return self._visit % self.num_layers

    def next_read(self) -> Read | None:
        """Start and return the next read, or None while the slot it needs is not free."""
        while self._lookahead < self._visit + self.num_slots:
            sequence = self._lookahead
            read = Read(sequence, sequence % self.num_layers, sequence % self.num_slots)
            slot = self._slots[read.slot]
            if not slot.belongs_to(read.layer):
                if slot.state in (_State.READING, _State.HELD):
                    return None
                self._slots[read.slot] = _Slot(_State.READING, read.layer, read)
            self._lookahead += 1
            if self._slots[read.slot] is not slot:
                return read
        return None

    def finish_read(self, read: Read) -> None:
        """The bytes of ``read`` are in its slot.

        Raises:
            RuntimeError: ``read`` is not in flight.
        """
        self._in_flight(read).state = _State.READY

    def fail_read(self, read: Read, error: BaseException) -> None:
        """``read`` ended with ``error``: its visit's ``acquire`` raises it, then it is due again.

        Raises:
            RuntimeError: ``read`` is not in flight.
        """
        slot = self._in_flight(read)
        slot.state, slot.error = _State.FAILED, error

    def acquire(self, layer: int) -> int | None:
        """Hold ``layer`` and return its slot, or None while its read has not finished.

        Raises:
            RuntimeError: ``layer`` is not the next one (see ``seek``), or its slot is still held
                by an earlier visit, so that waiting would never end.
            BaseException: what the layer's read failed with, once; the read is then due again.
        """
        self._check_layer(layer)
        if layer != self.next_layer:
            raise RuntimeError(f"acquire({layer}) out of order: layer {self.next_layer} is next")
        index = self._visit % self.num_slots
        slot = self._slots[index]
        if slot.state is _State.HELD:
            raise RuntimeError(
                f"acquire({layer}) needs slot {index}: release layer {slot.layer} first"
            )
        if slot.belongs_to(layer) and slot.error is not None:
            self._slots[index] = _Slot()
            self._lookahead = self._visit
            raise slot.error
        if not (slot.belongs_to(layer) and slot.state is _State.READY):
            return None
        slot.state = _State.HELD
        self._visit += 1
        return index

    def is_settled(self, layer: int) -> bool:
        """Whether ``acquire(layer)`` would return a slot, or raise, at once."""
        slot = self._slots[self._visit % self.num_slots]
        return slot.state is _State.HELD or (
            slot.belongs_to(layer) and slot.state is not _State.READING
        )

    def release(self, layer: int) -> None:
        """Compute no longer uses ``layer``: its slot may be refilled.

        Raises:
            RuntimeError: ``layer`` is not held.
        """
        for slot in self._slots:
            if slot.state is _State.HELD and slot.layer == layer:
                slot.state = _State.READY
                return
        raise RuntimeError(f"release({layer}): that layer is not held")

    def seek(self, layer: int) -> None:
        """A pass was abandoned or starts elsewhere: continue at ``layer``.

        What was held is given up, what failed is forgotten. Slots that reads in flight still
        write to stay taken until ``finish_read`` or ``fail_read``; bytes that happen to be where
        the new visits want them are kept.

        Raises:
            RuntimeError: there is no such layer.
        """
        self._check_layer(layer)
        self._visit += (layer - self._visit) % self.num_layers
        self._lookahead = self._visit
        for index, slot in enumerate(self._slots):
            if slot.state is _State.HELD:
                slot.state = _State.READY
            elif slot.state is _State.FAILED:
                self._slots[index] = _Slot()

    def check_integrity(self) -> None:
        """Check every invariant of the ring; tests call it after each step.

        Raises:
            AssertionError: one does not hold.
        """
        assert self._visit <= self._lookahead <= self._visit + self.num_slots
        for visit in range(self._visit, self._lookahead):
            assert self._slots[visit % self.num_slots].belongs_to(visit % self.num_layers)
        for index, slot in enumerate(self._slots):
            assert (slot.state is _State.EMPTY) == (slot.read is None)
            assert (slot.state is _State.FAILED) == (slot.error is not None)
            if slot.read is not None:
                assert slot.read.slot == index
                assert slot.read.layer == slot.layer == slot.read.sequence % self.num_layers
        held = [slot.layer for slot in self._slots if slot.state is _State.HELD]
        assert len(held) == len(set(held))

    def _in_flight(self, read: Read) -> _Slot:
        slot = self._slots[read.slot]
        if slot.state is not _State.READING or slot.read != read:
            raise RuntimeError(f"{read} is not in flight")
        return slot

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise RuntimeError(f"layer {layer} is outside 0..{self.num_layers - 1}")
