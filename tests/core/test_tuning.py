"""Live depth against brute force: the best depth of the true acceptances and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.tuning import DepthTuner

FIXED = settings(deadline=None, max_examples=60, derandomize=True)


@dataclass(frozen=True)
class Machine:
    """How often a level is accepted below an accepted parent, and what work takes."""

    acceptance: Callable[[int], float]
    step_s: float
    pass_s: float
    hidden_steps: int = 0

    def rate(self, depth: int) -> float:
        """Expected tokens a second, written out: every path's probability, one by one."""
        tokens, reach = 0.0, 1.0
        for level in range(depth):
            tokens += reach * (1 - self.acceptance(level)) * (level + 1)
            reach *= self.acceptance(level)
        tokens += reach * (depth + 1)
        followed = reach * self.acceptance(depth) if self.hidden_steps else 0.0
        drafted = depth - followed * min(depth, self.hidden_steps)
        return tokens / (self.pass_s + drafted * self.step_s)

    def best(self, most: int) -> int:
        return max(range(1, most + 1), key=self.rate)

    def run(self, tuner: DepthTuner, passes: int, random: Random) -> list[int]:
        """Draft and verify so often; the depths that were chosen on the way."""
        depths = []
        for _ in range(passes):
            depth = tuner.depth
            accepted = 0
            while accepted < depth and random.random() < self.acceptance(accepted):
                accepted += 1
            tuner.observe_draft(depth, depth * self.step_s)
            tuner.observe_pass(depth, accepted, self.pass_s, self.hidden_steps)
            depths.append(tuner.depth)
        return depths


MACHINES = {
    "good-draft-slow-pass": Machine(lambda level: 0.97, 0.01, 1.0),
    "good-draft-slow-step": Machine(lambda level: 0.97, 0.2, 1.0),
    "poor-draft": Machine(lambda level: 0.5, 0.05, 1.0),
    "hopeless-draft": Machine(lambda level: 0.05, 0.3, 1.0),
    "a-wall-below-level-6": Machine(lambda level: 0.98 if level < 6 else 0.1, 0.02, 1.0),
    "fading": Machine(lambda level: 0.99 - 0.03 * level, 0.02, 1.0),
    "hidden-steps": Machine(lambda level: 0.95, 0.1, 1.0, hidden_steps=8),
}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("first", [1, 16, 32])
def test_it_comes_near_the_best_depth_from_anywhere(machine, first):
    most = 32
    tuner = DepthTuner(first, most)
    depths = machine.run(tuner, 600, Random(first))[-300:]
    achieved = sum(machine.rate(depth) for depth in depths) / len(depths)
    assert achieved > 0.93 * machine.rate(machine.best(most))


@FIXED
@given(
    levels=st.lists(st.floats(0, 1), min_size=1, max_size=24),
    most=st.integers(1, 24),
    step_s=st.floats(1e-4, 1.0),
    hidden=st.integers(0, 12),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_it_never_leaves_its_range_and_ends_at_the_best_of_its_own_model(
    levels, most, step_s, hidden, seed, data
):
    first = data.draw(st.integers(1, most))
    machine = Machine(lambda level: levels[min(level, len(levels) - 1)], step_s, 1.0, hidden)
    tuner = DepthTuner(first, most)
    depths = machine.run(tuner, 200, Random(seed))
    assert all(1 <= depth <= most for depth in [first, *depths])
    assert [at for at in range(1, 200) if depths[at] != depths[at - 1]] == [
        at for at in range(7, 200, 8) if depths[at] != depths[at - 1]
    ], "it moves at every eighth pass only"
    rates = [tuner.expected_rate(depth) for depth in range(1, most + 1)]
    if depths[-1] == depths[-9]:  # it was content when it looked last
        assert max(rates) <= 1.02 * rates[tuner.depth - 1] * (1 + 1e-9)


def test_its_model_of_known_acceptances_is_the_true_one():
    """Passes that accept 3 of 3 levels, always: only what was told counts."""
    tuner = DepthTuner(3, 8)
    tuner.observe_draft(3, 0.3)
    for _ in range(200):
        tuner.observe_pass(3, 3, 0.5, 0)
    expected = Machine(lambda level: 1.0, 0.1, 0.5)
    for depth in range(1, 9):
        assert tuner.expected_rate(depth) == pytest.approx(expected.rate(depth), rel=2e-3)
    assert tuner.depth == 8


def test_it_deepens_step_by_step():
    """Levels that were never tried are a guess."""
    tuner = DepthTuner(4, 64)
    depths = MACHINES["good-draft-slow-pass"].run(tuner, 64, Random(0))
    climbs = [b - a for a, b in zip([4, *depths], depths, strict=False) if b > a]
    assert climbs[:3] == [2, 3, 4]


def test_without_a_timed_step_it_stays():
    tuner = DepthTuner(5, 20)
    tuner.observe_draft(0, 0.0)
    for _ in range(64):
        tuner.observe_pass(5, 0, 1.0, 0)
    assert tuner.depth == 5


def test_it_deepens_again_when_the_draft_improves():
    """What deep levels were worth in bad times does not hold for ever."""
    tuner = DepthTuner(12, 32)
    bad = Machine(lambda level: 0.1 if level else 0.9, 0.1, 1.0)
    good = Machine(lambda level: 0.97, 0.1, 1.0)
    random = Random(3)
    assert bad.run(tuner, 300, random)[-1] == bad.best(32) == 1
    depths = good.run(tuner, 600, random)[-200:]
    achieved = sum(good.rate(depth) for depth in depths) / len(depths)
    assert achieved > 0.9 * good.rate(good.best(32))
