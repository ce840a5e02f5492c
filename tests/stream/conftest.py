"""A small spill, a device on a clock of the test; no test leaves a file or a thread open."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from vllm_subspec.stream import LayerStreamer, Spill, SpillLayout, SpillWriter, TensorSpec
from vllm_subspec.stream.blockfile import aligned_buffer

Weights = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert set(threading.enumerate()) <= threads


class SpillCase:
    """The spill ``m`` in a directory that does not exist yet; three layers, 49152 bytes."""

    specs = (
        [TensorSpec("w", (37, 61), torch.bfloat16), TensorSpec("b", (61,), torch.float32)],
        [TensorSpec("w", (3, 5, 7), torch.float32), TensorSpec("scale", (), torch.float32)],
        [TensorSpec("w", (129, 65), torch.float32), TensorSpec("empty", (0, 4), torch.bfloat16)],
    )
    layout = SpillLayout.of(specs)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spill = directory / "m.spill"
        self.manifest = directory / "m.json"

    def weights(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return [
            {s.name: torch.randn(s.shape, generator=generator).to(s.dtype) for s in layer}
            for layer in self.specs
        ]

    def writer(self, identity: str = "a", patience_s: float = 0.0) -> SpillWriter:
        return SpillWriter(self.directory, "m", self.layout, identity, patience_s=patience_s)

    def open(self, identity: str = "a", *, verify: bool = True) -> Spill:
        return Spill.open(self.directory, "m", self.layout, identity, verify=verify)

    def write(
        self,
        weights: Weights,
        identity: str = "a",
        order: tuple[int, ...] = (2, 0, 1),
        patience_s: float = 0.0,
    ) -> list[bool]:
        """Put all layers; per layer, in ``order``, whether it was written and not kept."""
        with self.writer(identity, patience_s) as writer:
            written = [writer.put(layer, weights[layer]) for layer in order]
            writer.finish().close()
        return written

    def assert_holds(self, spill: Spill, weights: Weights) -> None:
        buffer = aligned_buffer(self.layout.slot_bytes)
        for layer, tensors in zip(self.layout.layers, weights, strict=True):
            spill.read_into(buffer[: layer.nbytes], layer.offset)
            views = layer.views(buffer)
            assert views.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert views[name].dtype == tensor.dtype
                assert torch.equal(views[name], tensor), name

    def run_passes(self, streamer: LayerStreamer, passes: int, num_layers: int = 3) -> None:
        """Stream the first layers again and again; they must be those of ``weights(0)``."""
        expected = self.weights(0)[:num_layers]
        for _ in range(passes):
            for layer, tensors in enumerate(expected):
                views = streamer.acquire(layer)
                for name, tensor in tensors.items():
                    assert torch.equal(views[name], tensor), f"layer {layer}, {name}"
                for view in views.values():
                    view.zero_()  # what is not read again would be found wrong
                streamer.release(layer)

    def overwrite(self, offset: int, data: bytes) -> None:
        """Change the spill's bytes as another program would."""
        self.next_tick()
        with self.spill.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    @staticmethod
    def next_tick() -> None:
        """Let the file system's clock move on, or two changes would look like one."""
        time.sleep(0.02)


@pytest.fixture
def case(tmp_path: Path) -> SpillCase:
    return SpillCase(tmp_path / "spills")


@dataclass(frozen=True)
class Span:
    """Work on the buffer at address ``slot`` from ``start`` to ``end`` of the device's clock."""

    slot: int
    start: float
    end: float


class FakeEvent:
    """A point of a stream. Copies' events note that the host waited for them."""

    def __init__(self, time: float) -> None:
        self.time = time
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True


class FakeDevice:
    """Two streams, each in order; ``now`` is the host's time, which only waiting moves.

    A copy takes ``copy_s`` per ``unit_bytes``. It begins when the copy stream is free, and no
    sooner than the event it is ordered behind: if the store orders it behind too little, its span
    overlaps a span of compute on the same slot, which ``check_no_overlap`` finds.
    """

    def __init__(self, unit_bytes: int, copy_s: float) -> None:
        self.now = 0.0
        self.computes: list[Span] = []
        self.copies: list[Span] = []
        self.num_host_bytes = 0
        self._bytes_per_s = unit_bytes / copy_s
        self._compute_tail = self._copy_tail = 0.0
        self._copied: dict[int, FakeEvent] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        return aligned_buffer(nbytes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.num_host_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def compute_event(self) -> FakeEvent:
        return FakeEvent(max(self.now, self._compute_tail))

    def copy_after(
        self, event: FakeEvent, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> FakeEvent:
        start = max(self._copy_tail, event.time)
        for target, source in pieces:
            target.copy_(source)
        nbytes = sum(len(target) for target, _ in pieces)
        self._copy_tail = start + nbytes / self._bytes_per_s
        slot = pieces[0][0].data_ptr()
        self.copies.append(Span(slot, start, self._copy_tail))
        self._copied[slot] = FakeEvent(self._copy_tail)
        return self._copied[slot]

    def compute(self, slot: int, seconds: float) -> None:
        """Issue work on a slot that the host was just given, and do not wait for it."""
        copied = self._copied[slot]
        if copied.waited_for:
            self.now = max(self.now, copied.time)
        start = max(self.now, self._compute_tail)
        self._compute_tail = start + seconds
        self.computes.append(Span(slot, start, self._compute_tail))

    def finish(self) -> None:
        """The host waits for compute, as for sampled tokens."""
        self.now = max(self.now, self._compute_tail)

    def check_no_overlap(self) -> None:
        """No slot is copied to while compute reads it, in either order."""
        for compute in self.computes:
            for copy in self.copies:
                apart = copy.end <= compute.start or compute.end <= copy.start
                assert copy.slot != compute.slot or apart, (copy, compute)

    def busy_share(self, start: float, end: float) -> float:
        """The share of that time in which the link was copying."""
        spans = [(max(copy.start, start), min(copy.end, end)) for copy in self.copies]
        return sum(max(0.0, last - first) for first, last in spans) / (end - start)


@pytest.fixture
def fake_device() -> Callable[[int, float], FakeDevice]:
    return FakeDevice
