"""The cycle model, step by step with round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ConfigError
from vllm_subspec.plan.cycle import (
    WAIT_SHARE,
    Trees,
    Work,
    compute_s,
    decode_cycle,
    hidden_nodes,
    plain_pass_s,
)
from vllm_subspec.plan.machine import DEFAULT, MachineFigures

MACHINE = MachineFigures(
    link_bytes_per_s=1e9,
    draft_bytes_per_s=1e10,
    target_flops_per_s=1e11,
    step_overhead_s_per_layer=1e-3,
    pass_overhead_s_per_layer=1e-3,
    draft_flops_per_s=1e12,
)
WORK = Work(
    num_layers=10,
    streamed_bytes=1_000_000_000,
    slot_bytes=200_000_000,
    num_weights=500_000_000,
    weight_bytes=1_000_000_000,
    tail_share=0.1,
)


def trees(width: int, depth: int, nodes: int) -> Trees:
    return Trees(*(np.array(float(n)) for n in (width, depth, nodes)))


def cycle(work: Work, machine: MachineFigures, tree: Trees, loss: float, post: bool) -> list[float]:
    found = decode_cycle(work, machine, tree, np.array(5e8), np.array(loss), post)
    return [float(v) for v in (found.tau, found.step_s, found.pass_s, found.cycle_s)]


def test_compute_is_bound_by_reading_then_by_products() -> None:
    assert compute_s(WORK, MACHINE, np.array([1.0, 10.0, 20.0])) == pytest.approx(
        [0.11, 0.11, 0.21]
    )


def test_a_cycle_without_post_speculation() -> None:
    tau, step_s, pass_s, cycle_s = cycle(WORK, MACHINE, trees(1, 4, 4), 0.1, False)
    assert tau == pytest.approx(sum(math.exp(-0.1 * level) for level in range(5)))
    assert step_s == pytest.approx(0.05 + 0.01)  # reading, overhead
    assert pass_s == pytest.approx(0.8 + 0.011)  # 0.2 GB came while drafting; the tail of 0.11
    assert cycle_s == pytest.approx(4 * 0.06 + 0.811)


def test_a_cycle_with_post_speculation() -> None:
    hit = math.exp(-0.1 * 4 - 0.1)
    *_, pass_s, cycle_s = cycle(WORK, MACHINE, trees(1, 4, 4), 0.1, True)
    # After a hit nothing is left to draft, so the link had but the tail of 0.011 to run ahead.
    assert pass_s == pytest.approx((1 - hit) * 0.811 + hit * (1 - 0.011 + 0.011))
    assert cycle_s == pytest.approx((1 - hit) * (0.24 + 0.811) + hit * 1.0)


def test_a_hit_leaves_the_steps_that_the_waits_did_not_hold() -> None:
    fast = replace(MACHINE, link_bytes_per_s=4e9)  # a pass of 0.2 + 0.011 waits 0.101
    ample = replace(WORK, slot_bytes=250_000_000, streamed_bytes=1_050_000_000)
    *_, pass_s, cycle_s = cycle(ample, fast, trees(1, 4, 4), 1e-9, True)
    assert pass_s == pytest.approx(0.211)
    assert cycle_s == pytest.approx(4 * 0.06 - WAIT_SHARE * 0.101 + 0.211)


def test_a_wide_level_is_bound_by_its_products() -> None:
    slow = replace(MACHINE, draft_flops_per_s=1e11)
    assert cycle(WORK, slow, trees(4, 2, 8), 0.1, False)[1] == pytest.approx(0.05 + 0.01)
    assert cycle(WORK, slow, trees(8, 2, 16), 0.1, False)[1] == pytest.approx(0.08 + 0.01)


def test_without_a_draft_the_link_never_rests() -> None:
    assert plain_pass_s(WORK, MACHINE) == pytest.approx(1.0)
    busy = replace(MACHINE, link_bytes_per_s=1e11)
    assert plain_pass_s(WORK, busy) == pytest.approx(0.11)


def test_hidden_nodes_are_the_most_that_the_link_outlasts() -> None:
    nodes = hidden_nodes(WORK, MACHINE)
    assert nodes == 78
    assert compute_s(WORK, MACHINE, np.array(nodes + 1)) <= 0.8
    assert compute_s(WORK, MACHINE, np.array(nodes + 2)) > 0.8
    assert hidden_nodes(WORK, replace(MACHINE, link_bytes_per_s=1e12)) < 0


TREES = st.builds(
    lambda width, depth: trees(width, depth, width * depth), st.integers(1, 8), st.integers(1, 48)
)


@settings(deadline=None, max_examples=60)
@given(tree=TREES, loss=st.floats(1e-3, 1), link=st.floats(1e8, 1e11), post=st.booleans())
def test_no_cycle_beats_the_link(tree: Trees, loss: float, link: float, post: bool) -> None:
    machine = replace(MACHINE, link_bytes_per_s=link)
    cycle_s = cycle(WORK, machine, tree, loss, post)[3]
    assert cycle_s >= WORK.streamed_bytes / link * (1 - 1e-9)


@settings(deadline=None, max_examples=60)
@given(tree=TREES, loss=st.floats(1e-3, 1), link=st.floats(1e8, 1e10))
def test_with_ample_slots_post_speculation_never_hurts(
    tree: Trees, loss: float, link: float
) -> None:
    machine = replace(MACHINE, link_bytes_per_s=link)
    ample = replace(WORK, slot_bytes=WORK.streamed_bytes)
    serial, overlapped = (cycle(ample, machine, tree, loss, post)[3] for post in (False, True))
    assert overlapped <= serial * (1 + 1e-9)


def test_machine_figures_round_trip_through_json() -> None:
    assert MachineFigures.from_json(DEFAULT.to_json()) == DEFAULT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"link_bytes_per_s": 0}, "link_bytes_per_s is 0"),
        ({"link_bytes_per_s": float("nan")}, "link_bytes_per_s is nan"),
        ({"draft_bytes_per_s": "fast"}, "draft_bytes_per_s is 'fast'"),
        ({"pass_overhead_s_per_layer": -1e-3}, "pass_overhead_s_per_layer is -0.001"),
        ({"warp": 9}, "unknown key 'warp'"),
    ],
)
def test_figures_that_no_machine_has(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MachineFigures.from_json(DEFAULT.to_json() | change)


def test_figures_that_lack_one() -> None:
    with pytest.raises(ConfigError, match="lacks 'draft_flops_per_s'"):
        MachineFigures.from_json(
            {n: v for n, v in DEFAULT.to_json().items() if n != "draft_flops_per_s"}
        )
