"""What live tuning knows of seconds by size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.averages import Average, SecondsBySize

FIXED = settings(deadline=None, max_examples=60, derandomize=True)


def test_an_average_forgets():
    average = Average()
    for _ in range(300):
        average.add(1.0)
    assert average.value == pytest.approx(1.0)
    for _ in range(100):
        average.add(3.0)
    assert 2.8 < average.value < 3.0


def measured(**points: float) -> SecondsBySize:
    """Of sizes ``s1``, ``s65`` and so on."""
    seconds = SecondsBySize()
    for name, value in points.items():
        seconds.add(int(name[1:]), value)
    return seconds


def test_between_measurements_it_is_a_line():
    seconds = measured(s1=1.0, s65=1.0, s513=8.0)
    assert seconds.at([1, 33, 65, 289, 513]).tolist() == pytest.approx([1, 1, 1, 4.5, 8])
    assert seconds.largest == 513


def test_below_them_it_is_in_proportion_down_to_the_floor():
    seconds = measured(s520=8.0)
    assert seconds.at([260, 65, 8], floor=1.1).tolist() == pytest.approx([4.0, 1.1, 1.1])
    assert seconds.at([8, 520], floor=9.0).tolist() == [9.0, 9.0]
    assert seconds.at(8) == pytest.approx(8 * 8 / 520)


def test_above_them_it_goes_on_from_the_least_to_the_largest():
    assert measured(s1=1.0, s101=2.0).at(201) == pytest.approx(3.0)
    assert measured(s8=1.0).at(800) == pytest.approx(1.0), "one point has no slope"


def test_larger_work_that_took_less_corrects_an_accident():
    assert measured(s1=1.0, s20=30.0, s65=1.1).at([1, 20, 65]).tolist() == [1.0, 1.1, 1.1]


def test_a_hint_is_good_until_the_work_itself_is_measured():
    seconds = SecondsBySize()
    assert not seconds.is_known
    seconds.hint(20, 5.0)
    assert seconds.is_known
    assert seconds.at(20) == 5.0
    seconds.add(20, 1.0)
    assert seconds.at(20) == 1.0
    seconds.hint(20, 5.0)
    assert seconds.at(20) == 1.0


def test_the_first_of_a_size_counts_little():
    """Kernels are made then: it may take ten times as long."""
    seconds = SecondsBySize()
    seconds.add(65, 10.0)
    assert seconds.at(65) == 10.0, "better than nothing"
    seconds.add(65, 1.0)
    assert seconds.at(65) < 2.0


def test_a_stall_counts_little():
    """A disk or a process that paused for a minute says nothing of the next pass."""
    seconds = SecondsBySize()
    for _ in range(40):
        seconds.add(65, 1.0)
    seconds.add(65, 60.0)
    assert seconds.at(65) < 1.1
    for _ in range(200):
        seconds.add(65, 8.0)
    assert seconds.at(65) > 7.5, "what lasts counts"


def test_what_faded_is_replaced():
    seconds = measured(s1=1.0, s65=50.0)
    seconds.fade()
    assert seconds.at([1, 65]).tolist() == [1.0, 50.0]
    seconds.add(70, 2.0)
    assert seconds.at([1, 70]).tolist() == [1.0, 2.0]


def test_larger_sizes_are_forgotten_when_they_were_avoided_for_long():
    seconds = measured(s1=1.0, s65=50.0)
    for _ in range(127):
        seconds.add(20, 1.0)
        seconds.forget_larger(20)
    assert seconds.at(65) == 50.0
    seconds.add(20, 1.0)
    seconds.forget_larger(20)
    assert seconds.at(65) == pytest.approx(1.0)
    assert seconds.at(1) == 1.0, "smaller ones stay"
    assert seconds.largest == 65


@FIXED
@given(
    points=st.dictionaries(st.integers(1, 4096), st.floats(0, 100), min_size=1),
    floor=st.floats(0, 200),
)
def test_it_never_falls_with_size_and_is_never_negative(points, floor):
    seconds = SecondsBySize()
    for size, value in points.items():
        seconds.add(size, value)
    values = seconds.at(np.arange(1, 9000), floor)
    assert (values >= 0).all()
    assert (np.diff(values) >= -1e-9 * (1 + values[:-1])).all()
