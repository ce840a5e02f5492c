"""Counters against the definition of the acceptance length."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_subspec.draft.tree import Tree
from vllm_subspec.integration.statistics import DraftCounters, SpeculationCounters
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
