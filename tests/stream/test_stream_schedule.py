"""The ring of slots: every order of reads, visits, failures and abandoned passes is safe."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_subspec.errors import ConfigError
from vllm_subspec.stream.schedule import Read, StreamSchedule


def drain(schedule: StreamSchedule) -> list[Read]:
    reads = []
    while (read := schedule.next_read()) is not None:
        reads.append(read)
    return reads


def finish_all(schedule: StreamSchedule) -> list[Read]:
    reads = drain(schedule)
    for read in reads:
        schedule.finish_read(read)
    return reads


class ReadError(Exception):
    pass


class ScheduleMachine(RuleBasedStateMachine):
    """A model of what lies in each slot, who holds it, and which reads write to it."""

    @initialize(num_layers=st.integers(1, 6), num_slots=st.integers(1, 8))
    def build(self, num_layers: int, num_slots: int) -> None:
        self.schedule = StreamSchedule(num_layers, num_slots)
        self.content: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.flying: list[Read] = []
        self.expected = 0

    @rule()
    def start_reads(self) -> None:
        for read in drain(self.schedule):
            assert read.slot not in self.held.values(), "refilled between acquire and release"
            assert read.slot not in [other.slot for other in self.flying], "two reads to one slot"
            assert self.content.pop(read.slot, None) != read.layer, "read what is there"
            self.flying.append(read)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def end_read(self, data: st.DataObject, fails: bool) -> None:
        read = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if fails:
            self.schedule.fail_read(read, ReadError())
        else:
            self.content[read.slot] = read.layer
            self.schedule.finish_read(read)

    @rule()
    def acquire(self) -> None:
        self.start_reads()
        layer = self.schedule.next_layer
        assert layer == self.expected
        try:
            slot = self.schedule.acquire(layer)
        except ReadError:
            return
        except RuntimeError as error:
            blocked = str(error)
        else:
            blocked = ""
        if blocked:
            assert any(f"release layer {held} first" in blocked for held in self.held)
            return
        if slot is None:
            assert self.flying, "no read is in flight, yet the next layer is not there: no progress"
            return
        assert self.content[slot] == layer
        assert slot not in self.held.values()
        self.held[layer] = slot
        self.expected = (layer + 1) % self.schedule.num_layers

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[layer]
        self.schedule.release(layer)

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        self.expected = data.draw(st.integers(0, self.schedule.num_layers - 1))
        self.schedule.seek(self.expected)
        self.held.clear()

    @invariant()
    def integrity(self) -> None:
        self.schedule.check_integrity()


ScheduleMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestScheduleMachine = ScheduleMachine.TestCase


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 5, 9])
def test_passes_read_each_visit_once_or_keep_all_layers(num_slots: int) -> None:
    schedule = StreamSchedule(5, num_slots)
    reads = finish_all(schedule)
    assert [read.sequence for read in reads] == list(range(min(num_slots, 5)))
    for visit in range(15):
        slot = schedule.acquire(visit % 5)
        assert slot == visit % min(num_slots, 5)
        schedule.release(visit % 5)
        reads += finish_all(schedule)
    if num_slots >= 5:
        assert [read.layer for read in reads] == [0, 1, 2, 3, 4]
    else:
        assert [read.sequence for read in reads] == list(range(15 + num_slots))
        assert all(r.layer == r.sequence % 5 and r.slot == r.sequence % num_slots for r in reads)


def test_prefetch_goes_on_across_the_end_of_a_pass() -> None:
    schedule = StreamSchedule(3, 2)
    layers = [read.layer for read in finish_all(schedule)]
    for layer in range(3):
        schedule.acquire(layer)
        schedule.release(layer)
        layers += [read.layer for read in finish_all(schedule)]
    assert layers == [0, 1, 2, 0, 1]


def test_seek_waits_for_a_read_in_flight_before_it_reuses_the_slot() -> None:
    schedule = StreamSchedule(4, 1)
    (old,) = drain(schedule)
    schedule.seek(2)
    assert drain(schedule) == []
    assert schedule.acquire(2) is None
    schedule.finish_read(old)
    assert schedule.acquire(2) is None, "the slot holds layer 0"
    (new,) = drain(schedule)
    assert (new.layer, new.slot) == (2, 0)
    schedule.finish_read(new)
    assert schedule.acquire(2) == 0


def test_seek_keeps_what_lies_in_the_right_slot() -> None:
    schedule = StreamSchedule(4, 4)
    finish_all(schedule)
    schedule.acquire(0)
    schedule.seek(2)
    assert drain(schedule) == []
    assert [schedule.acquire(layer) for layer in (2, 3, 0, 1)] == [2, 3, 0, 1]


def test_a_failed_read_is_reported_once_and_then_due_again() -> None:
    schedule = StreamSchedule(4, 2)
    first, second = drain(schedule)
    schedule.fail_read(first, ReadError("bad block"))
    schedule.finish_read(second)
    assert drain(schedule) == [], "no retry behind the caller's back"
    with pytest.raises(ReadError, match="bad block"):
        schedule.acquire(0)
    assert drain(schedule) == [first]
    schedule.finish_read(first)
    assert schedule.acquire(0) == 0
    assert schedule.acquire(1) == 1


def test_seek_forgets_a_failed_read() -> None:
    schedule = StreamSchedule(2, 2)
    first, _ = drain(schedule)
    schedule.fail_read(first, ReadError())
    schedule.seek(0)
    assert drain(schedule) == [first]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.release(0), "not held"),
        (lambda s: s.acquire(1), "out of order"),
        (lambda s: s.acquire(3), r"outside 0\.\.2"),
        (lambda s: s.seek(-1), r"outside 0\.\.2"),
        (lambda s: s.finish_read(Read(0, 0, 0)), "not in flight"),
        (lambda s: s.fail_read(Read(1, 1, 1), ReadError()), "not in flight"),
    ],
    ids=["release", "order", "range", "seek", "finish", "fail"],
)
def test_illegal_calls(call, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(StreamSchedule(3, 2))


def test_a_read_ends_once() -> None:
    schedule = StreamSchedule(3, 2)
    read, _ = finish_all(schedule)
    with pytest.raises(RuntimeError, match="not in flight"):
        schedule.finish_read(read)


def test_acquire_that_could_never_succeed_says_so() -> None:
    schedule = StreamSchedule(3, 1)
    finish_all(schedule)
    schedule.acquire(0)
    with pytest.raises(RuntimeError, match="release layer 0 first"):
        schedule.acquire(1)


@pytest.mark.parametrize(("num_layers", "num_slots"), [(0, 1), (3, 0), (3, -2)])
def test_sizes_below_one_are_refused(num_layers: int, num_slots: int) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        StreamSchedule(num_layers, num_slots)
