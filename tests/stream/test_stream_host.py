"""Host RAM to a device: events alone keep compute and refills apart, and both overlap."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from vllm_subspec.errors import ConfigError, SpillError
from vllm_subspec.stream import HostStore, LayerStreamer, SpillLayout, TensorSpec

NUM_LAYERS = 5
LAYOUT = SpillLayout.of(
    [
        [TensorSpec("w", (61, 32), torch.float32), TensorSpec("b", (61,), torch.bfloat16)]
        for _ in range(NUM_LAYERS)
    ]
)
UNIT = LAYOUT.slot_bytes


def weights(layer: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(spec.dtype)
        for spec, _ in LAYOUT.layers[layer].tensors
    }


WEIGHTS = [weights(layer) for layer in range(NUM_LAYERS)]


def make(
    device: Any, chunk_bytes: int = 3000, emulate_bytes_per_s: float | None = None
) -> HostStore:
    store = HostStore(LAYOUT, device, chunk_bytes, emulate_bytes_per_s)
    for layer in reversed(range(NUM_LAYERS)):
        store.put(layer, WEIGHTS[layer])
    return store


def run_pass(streamer: LayerStreamer, device: Any, seconds: float) -> None:
    for layer, expected in enumerate(WEIGHTS):
        views = streamer.acquire(layer)
        for name, tensor in expected.items():
            assert torch.equal(views[name], tensor)
        device.compute(views["w"].data_ptr(), seconds)
        streamer.release(layer)
    device.finish()


@pytest.mark.parametrize("chunk_bytes", [64, 3000, UNIT, 2 * UNIT, 1 << 20])
def test_each_pass_gets_what_was_put(fake_device: Any, chunk_bytes: int) -> None:
    device = fake_device(UNIT, 1.0)
    store = make(device, chunk_bytes)
    assert device.num_host_bytes == LAYOUT.total_bytes, "no more RAM than the layers"
    with LayerStreamer(store, LAYOUT, 2) as streamer:
        for _ in range(3):
            run_pass(streamer, device, 0.5)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("compute_s", [0.0, 0.3, 1.0, 4.0])
def test_no_slot_is_copied_to_under_compute(
    fake_device: Any, num_slots: int, compute_s: float
) -> None:
    device = fake_device(UNIT, 1.0)
    with LayerStreamer(make(device), LAYOUT, num_slots) as streamer:
        streamer.start()
        for _ in range(4):
            run_pass(streamer, device, compute_s)
    device.check_no_overlap()
    assert len(device.computes) == 4 * NUM_LAYERS


@pytest.mark.parametrize(
    ("num_slots", "compute_s", "share"),
    [
        (1, 0.5, 1 / 1.5),  # a copy waits for compute, and compute for the copy
        (2, 0.5, 1.0),  # the link never waits
        (2, 1.0, 1.0),
        (2, 2.0, 0.5),  # compute never waits
        (3, 0.5, 1.0),
        (3, 4.0, 0.25),
    ],
)
def test_copies_and_compute_overlap(
    fake_device: Any, num_slots: int, compute_s: float, share: float
) -> None:
    device = fake_device(UNIT, 1.0)
    with LayerStreamer(make(device), LAYOUT, num_slots) as streamer:
        run_pass(streamer, device, compute_s)
        begin = device.now
        for _ in range(4):
            run_pass(streamer, device, compute_s)
        end = device.now
        run_pass(streamer, device, compute_s)  # so that every copy issued before `end` was seen
    assert device.busy_share(begin, end) == pytest.approx(share, abs=0.02)
    slower = compute_s + 1.0 if num_slots == 1 else max(compute_s, 1.0)
    assert end - begin == pytest.approx(4 * NUM_LAYERS * slower, abs=1.0)


def test_slots_fill_between_passes(fake_device: Any) -> None:
    device = fake_device(UNIT, 1.0)
    with LayerStreamer(make(device), LAYOUT, 3) as streamer:
        run_pass(streamer, device, 0.1)
        device.now += 10.0  # drafting
        begin = device.now
        run_pass(streamer, device, 0.1)
    assert [span.end <= begin for span in device.copies[NUM_LAYERS : NUM_LAYERS + 4]] == [
        True,
        True,
        True,
        False,
    ]
    assert device.now - begin == pytest.approx(2.0 + 0.1 + 0.1, abs=0.11)


class Stuck:
    """Copies are issued, and end when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.issued = threading.Event()
        self.error: Exception | None = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    allocate_host = allocate

    def compute_event(self) -> Stuck:
        return self

    def copy_after(self, event: Stuck, pieces: object) -> Stuck:
        if self.error is not None:
            raise self.error
        self.issued.set()
        return self

    def synchronize(self) -> None:
        assert self.ended.wait(30)


def test_a_read_ends_when_the_device_says_so() -> None:
    device = Stuck()
    with LayerStreamer(make(device), LAYOUT, 2, timeout_s=0.05) as streamer:
        with pytest.raises(SpillError, match=r"layer 0 was not read within 0\.05 s"):
            streamer.acquire(0)
        assert device.issued.is_set()
        device.ended.set()
        streamer._timeout_s = 30
        streamer.acquire(0)


def test_an_error_of_the_device_reaches_acquire_and_passes() -> None:
    device = Stuck()
    device.ended.set()
    device.error = RuntimeError("an illegal memory access was encountered")
    with LayerStreamer(make(device), LAYOUT, 1) as streamer:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            streamer.acquire(0)
        device.error = None
        streamer.acquire(0)


def test_close_ends_what_did_not_begin() -> None:
    device = Stuck()
    store = make(device)
    futures: list[Future[None]] = [store.start_read(0, store.allocate(UNIT)) for _ in range(3)]
    assert device.issued.wait(30)
    device.ended.set()
    store.close()
    store.close()
    assert all(future.done() for future in futures)


def test_the_emulated_link_throttles_it(fake_device: Any) -> None:
    device = fake_device(UNIT, 1.0)
    store = make(device, emulate_bytes_per_s=1.0)
    streamer = LayerStreamer(store, LAYOUT, 1, timeout_s=0.02)
    with pytest.raises(SpillError, match="not read within"):
        streamer.acquire(0)
    streamer.close()  # does not wait for the hour that one layer takes


def test_refusals(fake_device: Any) -> None:
    device = fake_device(UNIT, 1.0)
    with pytest.raises(ConfigError, match="chunk_bytes=0"):
        HostStore(LAYOUT, device, 0)
    with pytest.raises(ConfigError, match="emulate_bytes_per_s"):
        HostStore(LAYOUT, device, emulate_bytes_per_s=0.0)
    mapped = SpillLayout.of(
        [[TensorSpec("w", (1,), torch.int8)]], [TensorSpec("e", (1,), torch.int8)]
    )
    with pytest.raises(ConfigError, match="mapped tensors need a disk"):
        HostStore(mapped, device)
    store = HostStore(LAYOUT, device)
    with pytest.raises(SpillError, match="layer 0: weights"):
        store.put(0, {})
    with pytest.raises(SpillError, match="layer 5 is not among the 5 streamed"):
        store.put(5, WEIGHTS[0])
    with (
        LayerStreamer(store, LAYOUT, 1) as streamer,
        pytest.raises(SpillError, match="layer 0 cannot be read: it was never put"),
    ):
        streamer.acquire(0)
