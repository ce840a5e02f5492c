"""Reach: rates from paths that end at random, wherever their trees were stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.stopping import Reach

FIXED = settings(deadline=None, max_examples=60, derandomize=True)
Stops = Callable[[Reach, int, float], bool]


def never(reach: Reach, level: int, doubt: float) -> bool:
    return False


def when_unlikely(reach: Reach, level: int, doubt: float) -> bool:
    return reach.chance(level, doubt) < 0.3


def observe(
    reach: Reach, random: Random, per_level: float, per_doubt: float, stops: Stops = never
) -> None:
    """One tree: half of its levels raise no doubt; the path ends at the true rates."""
    doubts: list[float] = []
    accepted, goes_on = 0, True
    for level in range(1, 31):
        rise = random.expovariate(4.0) if random.random() < 0.5 else 0.0
        doubts.append((doubts or [0.0])[-1] + rise)
        goes_on &= random.random() < math.exp(-per_level - per_doubt * rise)
        accepted += goes_on
        if stops(reach, level, doubts[-1]):
            break
    reach.observe(doubts, accepted)


@pytest.mark.parametrize("stops", [never, when_unlikely])
@pytest.mark.parametrize(("per_level", "per_doubt"), [(0.02, 0.5), (0.1, 0.2), (0.01, 2.0)])
def test_it_learns_the_rates_wherever_trees_are_stopped(per_level, per_doubt, stops):
    reach, random, places = Reach(), Random(0), [(4, 0.0), (4, 1.0), (16, 0.0), (16, 1.0)]
    seen = []
    for _ in range(3000):
        observe(reach, random, per_level, per_doubt, stops)
        seen.append([reach.chance(*place) for place in places])
    means = [sum(chances) / 2500 for chances in zip(*seen[500:], strict=True)]
    true = [math.exp(-per_level * level - per_doubt * doubt) for level, doubt in places]
    assert means == pytest.approx(true, abs=0.05)


def test_it_learns_again_what_changes():
    reach, random = Reach(), Random(1)
    for per_doubt in (0.2, 2.0, 0.2):
        for _ in range(400):
            observe(reach, random, 0.02, per_doubt)
        expected = math.exp(-0.02 * 10 - per_doubt)
        assert reach.chance(10, 1.0) == pytest.approx(expected, abs=0.15)


def test_before_anything_is_known_doubt_is_taken_at_its_word():
    reach = Reach()
    assert reach.chance(0, 0.0) == 1.0
    assert 0.9 < reach.chance(1, 0.0) < 1.0
    assert reach.chance(4, math.log(2)) / reach.chance(4, 0.0) == pytest.approx(0.5)


def test_a_few_trees_tell_already():
    good, bad = Reach(), Reach()
    for _ in range(8):
        good.observe([0.0] * 20, 20)
        bad.observe([0.0] * 20, 1)
    assert good.chance(20, 0.0) > 0.6
    assert bad.chance(4, 0.0) < 0.4


@FIXED
@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, math.inf), max_size=8), st.integers(0, 9)), max_size=200
    )
)
def test_chances_are_chances_whatever_it_saw(trees):
    reach = Reach()
    for rises, accepted in trees:
        doubts = [sum(rises[: level + 1]) for level in range(len(rises))]
        reach.observe(doubts, accepted)
        chances = [reach.chance(level, doubt) for level, doubt in enumerate(doubts, 1)]
        assert all(0 <= chance <= 1 for chance in chances)
        assert chances == sorted(chances, reverse=True)
