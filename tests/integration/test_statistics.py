"""Counters against the definition of the acceptance length."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_subspec.draft.tree import Tree
from vllm_subspec.integration.statistics import DraftCounters, SpeculationCounters, WorkClock
from vllm_subspec.stream import StreamStatistics

pytestmark = pytest.mark.engine


def tree(*levels: int) -> Tree:
    """Nodes on these levels, each a child of the last node above."""
    parents = [
        max((j for j in range(i) if levels[j] < levels[i]), default=-1) for i in range(len(levels))
    ]
    return Tree(
        torch.arange(len(levels)),
        torch.tensor(parents, dtype=torch.int64),
        torch.tensor(levels, dtype=torch.int64),
        torch.zeros(len(levels)),
    )


def test_passes_are_counted_by_level() -> None:
    counters = SpeculationCounters()
    counters.count_pass(tree(1, 1, 2, 3), committed=3)
    counters.count_pass(tree(1), committed=1)
    counters.count_pass(Tree.empty(), committed=1)
    counters.count_pass(tree(1, 2, 2), committed=3)
    assert counters.target_passes == 4
    assert counters.undrafted_passes == 1
    assert counters.committed_tokens == 8
    assert counters.drafted_nodes == 8
    assert counters.drafted_by_level == [3, 2, 1]
    assert counters.accepted_by_level == [2, 2, 0]
    # Each committed token is the bonus token of a pass or an accepted node.
    assert counters.committed_tokens == counters.target_passes + sum(counters.accepted_by_level)


def test_the_report_is_flat_json() -> None:
    counters = SpeculationCounters()
    report = counters.report(DraftCounters(draft_steps=3), None, 0)
    assert not [name for name in report if name.startswith("stream_")]
    stream = StreamStatistics(bytes_read=5, reads=2, read_busy_s=0.5, wait_s=0.25)
    report = counters.report(DraftCounters(draft_steps=3), stream, 7)
    assert report["streamed_bytes_per_pass"] == 7
    assert report["draft_steps"] == 3
    assert report["stream_bytes_read"] == 5
    assert report["stream_wait_s"] == 0.25
    assert json.loads(json.dumps(report)) == report


def test_fallbacks_are_counted_by_reason() -> None:
    draft = DraftCounters()
    draft.count_fallback("grammar")
    draft.count_fallback("opted_out")
    draft.count_fallback("grammar")
    report = SpeculationCounters().report(draft, None, 0)
    counted = {n: v for n, v in report.items() if n.startswith("fallback_")}
    assert counted.pop("fallback_grammar") == 2
    assert counted.pop("fallback_opted_out") == 1
    assert set(counted.values()) == {0}
    with pytest.raises(KeyError):
        draft.count_fallback("no such reason")  # type: ignore[arg-type]


def test_work_is_counted_over_the_gaps_between_steps_but_not_while_idle() -> None:
    clock = WorkClock()
    clock.begin_step(10.0, goes_on=False)
    clock.end_step(11.0)
    clock.begin_step(12.0, goes_on=True)
    clock.end_step(14.0)
    clock.begin_step(100.0, goes_on=False)
    clock.end_step(101.0)
    assert (clock.engine_steps, clock.busy_seconds) == (3, 5.0)
    clock.begin_step(200.0, goes_on=False)  # it fails, and the caller tries again
    clock.begin_step(203.0, goes_on=True)
    clock.end_step(204.0)
    assert (clock.engine_steps, clock.busy_seconds) == (4, 9.0)
