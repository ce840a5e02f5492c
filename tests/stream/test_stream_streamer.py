"""Layers on demand: a slot is never refilled while held, and no failure is a hang."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import BudgetError, ConfigError, SpillError
from vllm_subspec.stream import (
    LayerStreamer,
    SpillLayout,
    TensorSpec,
    WeightStore,
)
from vllm_subspec.stream.schedule import Read, StreamSchedule

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


def test_work_is_done_instead_of_waiting() -> None:
    """Until the weights are there, and without the lock: reads end and others look meanwhile."""
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2) as streamer, ThreadPoolExecutor(1) as other:
        done: list[int] = []

        def work(is_there: Callable[[], bool]) -> bool:
            assert other.submit(streamer.statistics).result(timeout=30).reads == 0
            done.append(len(done))
            if len(done) == 3:
                other.submit(store.end).result(timeout=30)
            return True

        assert number_in(streamer.acquire(0, work)) == 1
        assert done == [0, 1, 2]
        store.end()
        assert number_in(streamer.acquire(1, work)) == 2
        assert done == [0, 1, 2], "these weights were there"


def test_acquire_waits_where_there_is_no_more_work() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2, timeout_s=0.02) as streamer:
        answers = [True, False]
        with pytest.raises(SpillError, match=r"not read within 0\.02 s"):
            streamer.acquire(0, lambda is_there: answers.pop(0))
        assert answers == [], "asked until it says False"
        store.end()
        assert number_in(streamer.acquire(0)) == 1


def test_work_can_ask_whether_the_weights_are_there() -> None:
    store = ManualStore()
    told: list[bool] = []
    with LayerStreamer(store, LAYOUT, 2) as streamer:

        def work(is_there: Callable[[], bool]) -> bool:
            told.append(is_there())
            if len(told) == 2:
                store.end()
                told.append(is_there())
            return True

        assert number_in(streamer.acquire(0, work)) == 1
    assert told == [False, False, True]


def test_work_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts neither for the time-out nor in the statistics."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("vllm_subspec.stream.streamer.time", clock)
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 1, timeout_s=60) as streamer, ThreadPoolExecutor(1) as other:

        def end_when_awaited() -> None:
            wait_until(lambda: bool(streamer._changed._waiters))  # type: ignore[attr-defined]
            now[0] += 2
            store.end()

        def work(is_there: Callable[[], bool]) -> bool:
            if now[0] < 500:
                now[0] += 100
                return True
            other.submit(end_when_awaited)
            return False

        assert number_in(streamer.acquire(0, work)) == 1
        assert streamer.statistics().wait_s == 2


def test_work_ends_when_the_read_fails_or_the_streamer_is_closed() -> None:
    store = ManualStore()
    streamer = LayerStreamer(store, LAYOUT, 2)

    def fail(is_there: Callable[[], bool]) -> bool:
        store.end(SpillError("bad block"))
        return True

    with pytest.raises(SpillError, match="bad block"):
        streamer.acquire(0, fail)

    def close(is_there: Callable[[], bool]) -> bool:
        streamer.close()
        return True

    with pytest.raises(SpillError, match="closed"):
        streamer.acquire(0, close)


def test_work_that_raises_leaves_the_layer_to_be_acquired() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 2) as streamer:

        def work(is_there: Callable[[], bool]) -> bool:
            raise ValueError("the draft fell over")

        with pytest.raises(ValueError, match="fell over"):
            streamer.acquire(0, work)
        store.end()
        assert number_in(streamer.acquire(0)) == 1
        assert store.layers == [0, 1]


def test_no_work_is_begun_where_waiting_would_never_end() -> None:
    store = ManualStore()
    with LayerStreamer(store, LAYOUT, 1) as streamer:
        streamer.start()
        store.end()
        streamer.acquire(0)
        with pytest.raises(RuntimeError, match="release layer 0 first"):
            streamer.acquire(1, lambda is_there: pytest.fail("nothing may be waited for"))


@settings(deadline=None, max_examples=100)
@given(
    num_layers=st.integers(1, 4),
    num_slots=st.integers(1, 4),
    work=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=40),
)
def test_settled_is_what_acquire_decides_at_once(
    num_layers: int, num_slots: int, work: list[tuple[int, int]]
) -> None:
    schedule = StreamSchedule(num_layers, num_slots)
    reads: list[Read] = []
    held: list[int] = []
    for action, pick in work:
        while (read := schedule.next_read()) is not None:  # as the streamer does
            reads.append(read)
        layer = schedule.next_layer
        trial = copy.deepcopy(schedule)
        try:
            is_settled = trial.acquire(layer) is not None
        except (OSError, RuntimeError):
            is_settled = True
        assert schedule.is_settled(layer) == is_settled
        if action < 2 and reads:
            schedule.finish_read(reads.pop(pick % len(reads)))
        elif action == 2 and reads:
            schedule.fail_read(reads.pop(pick % len(reads)), OSError())
        elif action == 3 and is_settled:
            with suppress(OSError, RuntimeError):
                schedule.acquire(layer)
                held.append(layer)
        elif action == 4 and held:
            schedule.release(held.pop(pick % len(held)))
        elif action == 5:
            schedule.seek(pick % num_layers)
            held = []
        schedule.check_integrity()
