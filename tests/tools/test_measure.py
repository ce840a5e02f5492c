"""Figures from counters and answers: each on numbers small enough to check by hand."""

from __future__ import annotations

import json
import re

import pytest

from vllm_subspec.tools.measure import Answer, Run, speculation_figures, stream_figures
from vllm_subspec.tools.provenance import provenance

RUN = Run(
    answers=(
        Answer(prompt=(1,), tokens=tuple(range(10)), text="", seconds=3.0),
        Answer(prompt=(1,), tokens=tuple(range(6)), text="", seconds=1.0),
    ),
    statistics={
        "target_passes": 4,
        "committed_tokens": 99,  # more than reached the output: must not be used
        "drafted_nodes": 50,
        "accepted_by_level": [3, 1, 0],
        "drafted_by_level": [4, 2, 0],
        "decode_steps": 4,
        "target_seconds": 2.0,
        "draft_steps": 10,
        "draft_seconds": 0.5,
        "streamed_bytes_per_pass": 7,
        "stream_bytes_read": 42,
        "stream_reads": 6,
        "stream_read_busy_s": 1.0,
        "stream_wait_s": 0.1,
    },
)


def test_speculation_figures() -> None:
    assert speculation_figures(RUN) == {
        "acceptance_length": (16 - 2) / 4,  # each prompt's own pass gave its first token
        "target_passes": 4,
        "nodes_per_pass": 12.5,
        "acceptance_by_level": [0.75, 0.5],
        "draft_step_ms": pytest.approx(50.0),
        "target_pass_ms": pytest.approx(500.0),
    }


def test_no_draft_step_takes_no_time() -> None:
    run = Run(RUN.answers, RUN.statistics | {"draft_steps": 0})
    assert speculation_figures(run)["draft_step_ms"] == 0.0


def test_stream_figures() -> None:
    assert stream_figures(RUN) == {
        "streamed_bytes_per_pass": 7,
        "link_bandwidth": 42.0,
        "link_utilization": 0.25,
    }
    assert (RUN.new_tokens, RUN.seconds, RUN.tokens_per_s) == (16, 4.0, 4.0)


def test_provenance_travels_as_json() -> None:
    told = json.loads(json.dumps(provenance("a --b")))
    assert told["command_line"] == "a --b"
    assert told["versions"].keys() >= {"python", "vllm-subspec", "torch"}
    assert told["hardware"]["cores"] >= 1
    assert told["hardware"]["memory_bytes"] > 1 << 28
    assert told["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", told["commit"])
