"""Layers on demand: a slot is never refilled while held, and no failure is a hang."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from vllm_subspec.errors import BudgetError, ConfigError, SpillError
from vllm_subspec.stream import (
    LayerStreamer,
    SpillLayout,
    TensorSpec,
    WeightStore,
)

LAYOUT = SpillLayout.of(
    [
        [TensorSpec("w", (67 + 50 * i, 33), torch.bfloat16), TensorSpec("b", (33,), torch.float32)]
        for i in range(5)
    ]
)


class ManualStore(WeightStore):
    """Reads end when the test says so; a read fills its buffer with its number, from 1."""

    def __init__(self) -> None:
        self.open: list[tuple[int, torch.Tensor, Future[None]]] = []
        self.layers: list[int] = []

    @property
    def num_layers(self) -> int:
        return LAYOUT.num_layers

    def layer_bytes(self, layer: int) -> int:
        return LAYOUT.layers[layer].nbytes

    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        assert len(buffer) == self.layer_bytes(layer)
        assert buffer.data_ptr() not in [b.data_ptr() for _, b, _ in self.open]
        self.layers.append(layer)
        future: Future[None] = Future()
        self.open.append((len(self.layers), buffer, future))
        return future

    def end(self, error: Exception | None = None) -> None:
        """End the oldest read."""
        number, buffer, future = self.open.pop(0)
        buffer.fill_(number)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def end_all(self) -> None:
        while self.open:
            self.end()

    def close(self) -> None:
        while self.open:
            self.end(SpillError("closed"))


class ShuffledStore(ManualStore):
    """Reads end on other threads, out of order, some of them before ``start_read`` returns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._pool = ThreadPoolExecutor(3)

    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        self.layers.append(layer)
        number, delay = len(self.layers), self._random.choice([None, 0.0, 0.001])

        def read() -> None:
            buffer.fill_(255)
            time.sleep(delay or 0)
            buffer.fill_(number % 255)

        if delay is not None:
            return self._pool.submit(read)
        future: Future[None] = Future()
        read()
        future.set_result(None)
        return future

    def close(self) -> None:
        self._pool.shutdown()


def number_in(views: dict[str, torch.Tensor]) -> int:
    """The one read that filled all of a layer's weights."""
    (number,) = torch.cat([view.view(torch.uint8).flatten() for view in views.values()]).unique()
    return int(number)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_slot_is_refilled_after_release_only(num_slots: int) -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, num_slots) as streamer:
        streamer.start()
        for visit in range(12):
            store.end_all()
            views = streamer.acquire(visit % 5)
            number = number_in(views)
            assert store.layers[number - 1] == visit % 5
            assert store.open == []
            assert len(store.layers) == visit + num_slots
            streamer.release(visit % 5)
            assert len(store.layers) == visit + num_slots + 1
            assert number_in(views) == number
            store.end()
            assert views["w"].view(torch.uint8)[0, 0] == visit + num_slots + 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_held_weights_stay_while_other_threads_read(num_slots: int, seed: int) -> None:
    store = ShuffledStore(seed)
    pick = random.Random(seed)
    with LayerStreamer(store, LAYOUT, num_slots, timeout_s=30) as streamer:
        layer = 0
        for _ in range(40):
            views = streamer.acquire(layer)
            number = number_in(views)
            assert number != 255
            time.sleep(pick.choice([0, 0.001]))
            assert number_in(views) == number
            streamer.release(layer)
            layer = pick.choice([(layer + 1) % 5] * 4 + [0])


def test_prefetch_runs_between_passes() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2) as streamer:
        for layer in range(5):
            streamer.start()
            store.end_all()
            streamer.acquire(layer)
            streamer.release(layer)
        store.end_all()
        assert store.layers == [0, 1, 2, 3, 4, 0, 1]
        streamer.acquire(0)
        assert streamer.statistics().reads == 7


def test_an_abandoned_pass_starts_over() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 1) as streamer:
        streamer.start()
        store.end()
        streamer.acquire(0)  # never released: the pass raised
        with ThreadPoolExecutor(1) as other:
            again = other.submit(streamer.acquire, 0)
            assert number_in(again.result(timeout=30)) == 1, "layer 0 is still there"
        streamer.release(0)
        assert store.layers == [0, 1]
        with ThreadPoolExecutor(1) as other:
            start = other.submit(streamer.acquire, 3)
            wait_until(lambda: streamer._schedule.next_layer == 3)
            assert store.layers == [0, 1], "the read of layer 1 still writes to the slot"
            store.end()
            wait_until(lambda: len(store.open) == 1)
            store.end()
            assert number_in(start.result(timeout=30)) == 3
        assert store.layers == [0, 1, 3]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failed_read_raises_and_the_next_acquire_reads_again() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2) as streamer:
        streamer.start()
        store.end(SpillError("bad block in layer 0"))
        with pytest.raises(SpillError, match="bad block in layer 0"):
            streamer.acquire(0)
        store.end()
        assert store.layers == [0, 1, 0], "due again"
        store.end()
        assert number_in(streamer.acquire(0)) == 3
        assert number_in(streamer.acquire(1)) == 2
        assert streamer.statistics().reads == 2


def test_a_read_that_does_not_end_times_out() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2, timeout_s=0.02) as streamer:
        with pytest.raises(SpillError, match=r"layer 0 was not read within 0\.02 s"):
            streamer.acquire(0)
        assert streamer.statistics().wait_s >= 0.019
        store.end()
        assert number_in(streamer.acquire(0)) == 1


def test_release_of_what_is_not_held() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2) as streamer:
        streamer.start()
        store.end_all()
        streamer.acquire(0)
        with pytest.raises(RuntimeError, match=r"release\(1\)"):
            streamer.release(1)
        streamer.release(0)
        with pytest.raises(RuntimeError, match=r"release\(0\)"):
            streamer.release(0)


def test_acquire_beyond_the_slots_or_layers() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 1) as streamer:
        streamer.start()
        store.end()
        streamer.acquire(0)
        with pytest.raises(RuntimeError, match="release layer 0 first"):
            streamer.acquire(1)
        with pytest.raises(RuntimeError, match=r"outside 0\.\.4"):
            streamer.acquire(5)


def test_statistics_count_finished_reads_and_waits() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 3) as streamer:
        assert streamer.statistics().read_busy_s == 0
        streamer.start()
        assert streamer.statistics().reads == 0
        assert streamer.statistics().read_busy_s > 0
        store.end()
        store.end()
        assert streamer.statistics().bytes_read == sum(x.nbytes for x in LAYOUT.layers[:2])
        store.end()
        idle = streamer.statistics()
        assert streamer.statistics() == idle, "nothing is in flight, so no time is counted"


def test_close_wakes_a_waiting_acquire() -> None:
    streamer = LayerStreamer(ManualStore(), LAYOUT, 2)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(streamer.acquire, 0)
        wait_until(lambda: streamer.statistics().read_busy_s > 0)
        streamer.close()
        with pytest.raises(SpillError, match="closed"):
            waiting.result(timeout=30)


def test_streamer_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="num_slots=0"):
        LayerStreamer(ManualStore(), LAYOUT, 0)
    with pytest.raises(ConfigError, match="timeout_s=0"):
        LayerStreamer(ManualStore(), LAYOUT, 1, timeout_s=0)
    other = SpillLayout.of([[TensorSpec("w", (4,), torch.float32)]])
    with pytest.raises(ConfigError, match="the store's layers"):
        LayerStreamer(ManualStore(), other, 1)


def test_slots_that_cannot_be_allocated() -> None:
    huge = SpillLayout.of([[TensorSpec("w", (1 << 55,), torch.uint8)]])

    class HugeStore(ManualStore):
        num_layers = 1

        def layer_bytes(self, layer: int) -> int:
            return huge.slot_bytes

    with pytest.raises(BudgetError, match="fewer slots"):
        LayerStreamer(HugeStore(), huge, 1)
