"""What follows from counters, on numbers small enough to check by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vllm_subspec.statistics import SIZES, Statistics, growth, total

COUNTED = Statistics(
    target_passes=4,
    undrafted_passes=1,
    committed_tokens=10,
    drafted_nodes=30,
    accepted_by_level=(3, 2, 1),
    drafted_by_level=(3, 3, 2),
    fallbacks={"grammar": 2, "opted_out": 0},
    engine_steps=6,
    busy_seconds=10.0,
    decode_steps=4,
    target_seconds=6.0,
    draft_steps=8,
    draft_seconds=2.0,
    overlapped_draft_steps=24,
    stream_bytes_read=800,
    stream_reads=16,
    stream_read_busy_s=8.0,
    stream_retries=1,
    streamed_bytes_per_pass=100,
    streamed_layers=3,
    resident_layers=1,
    layers_by_bits={"4": 1, "6": 2},
    shadow_bytes=40,
)


def test_derived_figures() -> None:
    assert COUNTED.tau == 2.5
    assert COUNTED.nodes_per_pass == 7.5
    assert COUNTED.levels_per_pass == 2.0
    assert COUNTED.acceptance_by_level == (1.0, 2 / 3, 0.5)
    assert COUNTED.draft_step_s == 0.25
    assert COUNTED.target_pass_s == 1.5
    assert COUNTED.draft_steps_in_passes == 0.75
    assert COUNTED.link_bandwidth == 100.0
    assert COUNTED.link_utilization == 0.8
    assert COUNTED.bound_share == pytest.approx(6 * 100 / 100 / 10)


def test_passes_by_tokens() -> None:
    """Each committed token is a pass's bonus token or an accepted node."""
    assert COUNTED.passes_by_tokens == (1, 1, 1, 1)
    assert sum(COUNTED.passes_by_tokens) == COUNTED.target_passes
    weighed = sum(n * passes for n, passes in enumerate(COUNTED.passes_by_tokens, start=1))
    assert weighed == COUNTED.committed_tokens


def test_nothing_counted_yet() -> None:
    nothing = Statistics()
    assert nothing.tau == nothing.link_utilization == nothing.bound_share == 0.0
    assert nothing.acceptance_by_level == ()
    assert nothing.passes_by_tokens == (0,)


def test_shares_stay_below_one_where_the_link_reads_on_while_idle() -> None:
    busy = replace(COUNTED, stream_read_busy_s=11.0, stream_bytes_read=100)
    assert busy.link_utilization == busy.bound_share == 1.0


def test_reports_travel_as_json() -> None:
    report = COUNTED.to_report()
    assert report["fallback_grammar"] == 2
    assert Statistics.from_report(json.loads(json.dumps(report))) == COUNTED
    assert Statistics.from_report({}) == Statistics()


def test_a_difference_has_the_later_sizes() -> None:
    later = replace(
        COUNTED,
        target_passes=7,
        accepted_by_level=(4, 2, 1, 1),
        drafted_by_level=(6, 4, 3, 1),
        fallbacks={"grammar": 2, "opted_out": 5},
        busy_seconds=12.5,
        worker_memory_bytes=9,
    )
    grown = later - COUNTED
    assert grown.target_passes == 3
    assert grown.accepted_by_level == (1, 0, 0, 1)
    assert grown.fallbacks == {"grammar": 0, "opted_out": 5}
    assert grown.busy_seconds == 2.5
    assert grown.shadow_bytes == 40
    assert grown.worker_memory_bytes == 9
    assert COUNTED - Statistics() == COUNTED


def test_growth_is_by_item_and_leaves_sizes() -> None:
    before = {"passes": 2, "seconds": 0.5, "levels": [2, 1], "streamed_bytes_per_pass": 9}
    after = {"passes": 5, "seconds": 2.0, "levels": [3, 1, 4], "streamed_bytes_per_pass": 9}
    grown = {"passes": 3, "seconds": 1.5, "levels": [1, 0, 4], "streamed_bytes_per_pass": 9}
    assert growth(before, after) == grown
    again = total([before, grown])
    assert again == after


def test_sizes_are_attributes() -> None:
    assert Statistics().to_report().keys() >= SIZES


def test_ranks_that_share_each_layer() -> None:
    slower = replace(COUNTED, target_seconds=7.0, stream_retries=2, worker_memory_bytes=5)
    merged = Statistics.of_ranks([COUNTED.to_report(), slower.to_report()])
    assert merged.target_passes == 4
    assert merged.committed_tokens == 10
    assert merged.accepted_by_level == COUNTED.accepted_by_level
    assert merged.fallbacks == COUNTED.fallbacks
    assert merged.layers_by_bits == COUNTED.layers_by_bits
    assert merged.target_seconds == 7.0
    assert merged.stream_read_busy_s == 8.0
    assert (merged.stream_bytes_read, merged.stream_retries) == (1600, 3)
    assert (merged.streamed_bytes_per_pass, merged.worker_memory_bytes) == (200, 5)
    assert merged.tau == COUNTED.tau
    assert merged.bound_share == COUNTED.bound_share
