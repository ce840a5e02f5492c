"""Work in slices: it pauses only where asked, goes on where it was, and ends for good."""

from __future__ import annotations

import pytest

from vllm_subspec.draft.pausing import Pausable


class Work:
    """Counts to ``end``, and may pause after each number, some calls deep."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.seen: list[object] = []
        self.pausable = Pausable(self.run)

    def run(self) -> None:
        try:
            for number in range(self.end):
                self.seen.append(number)
                self._between()
        finally:
            self.seen.append("over")

    def _between(self) -> None:
        if self.pausable.is_pause_due():
            self.pausable.pause()


def test_runs_to_its_end_where_no_pause_is_due() -> None:
    work = Work(3)
    assert work.seen == []
    assert work.pausable.resume()
    assert work.seen == [0, 1, 2, "over"]


def test_pauses_when_asked_and_goes_on_where_it_was() -> None:
    work = Work(4)
    answers = [False, True, True]
    assert not work.pausable.resume(lambda: answers.pop(0))
    assert work.seen == [0, 1]
    assert not work.pausable.resume(lambda: answers.pop(0))
    assert work.seen == [0, 1, 2]
    assert work.pausable.resume()
    assert work.seen == [0, 1, 2, 3, "over"]


def test_two_pieces_of_work_do_not_mix() -> None:
    first, second = Work(3), Work(2)
    for _ in range(2):
        assert not first.pausable.resume(lambda: True)
        assert not second.pausable.resume(lambda: True)
    assert first.pausable.resume(lambda: True) is False
    assert (first.seen, second.seen) == ([0, 1, 2], [0, 1])
    assert first.pausable.resume(lambda: True)
    assert second.pausable.resume(lambda: True)


def test_what_was_dropped_ends_its_finally_blocks() -> None:
    work = Work(3)
    work.pausable.resume(lambda: True)
    work.pausable.drop()
    assert work.seen == [0, "over"]


def test_work_that_was_not_begun_can_be_dropped() -> None:
    work = Work(3)
    work.pausable.drop()
    assert work.seen == []


def test_an_error_reaches_whoever_resumed() -> None:
    def fail() -> None:
        raise ValueError("the draft fell over")

    with pytest.raises(ValueError, match="fell over"):
        Pausable(fail).resume()


def test_it_may_be_resumed_from_within_other_work() -> None:
    """A step that began under one pass ends under another's stack."""
    inner = Work(2)
    assert not inner.pausable.resume(lambda: True)
    outer = Pausable(lambda: inner.seen.append(inner.pausable.resume()))
    assert outer.resume()
    assert inner.seen == [0, 1, "over", True]
