"""Stepping aside: hysteresis, probes that become rarer, patience."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from vllm_subspec.draft.stepping import StepAside


def cycles(switch: StepAside, count: int, drafting: float, plain: float) -> list[bool]:
    return [switch.drafts(drafting, plain) for _ in range(count)]


def aside() -> StepAside:
    """A switch that has just stepped aside."""
    switch = StepAside()
    cycles(switch, 9, 1.0, 2.0)
    assert switch.is_aside
    return switch


def test_it_drafts_for_a_while_before_it_judges():
    switch = StepAside()
    assert cycles(switch, 8, 1.0, 2.0) == [True] * 8
    assert cycles(switch, 1, 1.0, 2.0) == [False]


def test_near_the_crossover_it_stays_what_it_is():
    """Rates that swing by less than the margin change nothing, on either side."""
    random = Random(0)
    drafting, resting = StepAside(), aside()
    for _ in range(500):
        plain = random.uniform(0.96, 1.04)
        assert drafting.drafts(1.0, plain)
        resting.drafts(1.0, plain)
        assert resting.is_aside


def test_changes_have_a_distance():
    """Even where the rates jump each cycle, as when requests come and go."""
    switch, changes, was = StepAside(), [], False
    for cycle in range(200):
        switch.drafts(*((1.0, 2.0) if cycle % 2 else (2.0, 1.0)))
        if switch.is_aside != was:
            changes.append(cycle)
            was = switch.is_aside
    assert changes
    assert min(b - a for a, b in pairwise(changes)) > 8


def test_probes_become_rarer():
    switch = aside()
    drafted = [at for at, drafts in enumerate(cycles(switch, 5000, 1.0, 2.0), start=1) if drafts]
    gaps = [b - a for a, b in zip([0, *drafted], drafted, strict=False)]
    assert gaps == [15, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    assert switch.is_aside, "a probe that finds nothing changes nothing"


def test_it_comes_back_when_drafting_pays_again():
    switch = aside()
    assert not any(cycles(switch, 8, 1.0, 1.0))
    assert cycles(switch, 20, 1.2, 1.0) == [True] * 20
    assert not switch.is_aside


def test_a_short_comeback_does_not_bring_the_probes_back():
    switch = aside()
    cycles(switch, 120, 1.0, 2.0)  # probes at 16, 48, 112
    cycles(switch, 9, 2.0, 1.0)
    assert not switch.is_aside
    cycles(switch, 9, 1.0, 2.0)
    assert switch.is_aside
    assert cycles(switch, 100, 1.0, 2.0) == [False] * 100
    cycles(switch, 200, 2.0, 1.0)  # a long one does
    cycles(switch, 1, 1.0, 2.0)
    assert cycles(switch, 15, 1.0, 2.0) == [False] * 14 + [True]


def test_something_new_is_probed_at_once():
    switch = aside()
    cycles(switch, 60, 1.0, 2.0)
    assert cycles(switch, 1, 1.0, 2.0) == [False]
    switch.look_again()
    assert cycles(switch, 1, 1.0, 2.0) == [True]
