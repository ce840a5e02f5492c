"""The benchmark's course, with workers that answer at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import MemoryItem, Placement, Prediction
from vllm_subspec.tools import bench, bench_gate
from vllm_subspec.tools.audit import Divergence
from vllm_subspec.tools.bench import Bench
from vllm_subspec.tools.bench_modes import MODES, Workload
from vllm_subspec.tools.bench_process import MemoryUse, WorkerKilled
from vllm_subspec.tools.bench_report import render
from vllm_subspec.tools.bench_worker import Job

PLACEMENT = Placement(
    num_layers=4,
    streamed=(0, 1, 2),
    num_slots=2,
    bits=(4, 4, 6, None),
    head="streamed",
    head_bits=8,
    tree=TreeShape(4, 8, 20),
    prediction=Prediction(5.0, 0.01, 1.0, 1.25, 4.5, 0.8, 2 * 10**9),
    memory=(MemoryItem("slots", 20), MemoryItem("KV cache", 7)),
)
COUNTERS = {
    "target_passes": 2,
    "drafted_nodes": 20,
    "accepted_by_level": [2],
    "drafted_by_level": [2],
    "decode_steps": 2,
    "target_seconds": 1.0,
    "draft_steps": 4,
    "draft_seconds": 0.2,
    "overlapped_draft_steps": 0,
    "streamed_bytes_per_pass": 100,
    "stream_bytes_read": 200,
    "stream_reads": 2,
    "stream_read_busy_s": 1.0,
    "stream_wait_s": 0.1,
}


class Workers:
    """Stands for the processes: answers by mode, and remembers the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.tokens = {"plain": [1, 2, 3], "subspec": [1, 2, 3]}
        self.seconds = {"plain": iter([6.0, 8.0, 7.0]), "subspec": iter([1.0, 2.0, 4.0])}
        self.killed: set[str] = set()

    def run(self, job: Job, limit_bytes: int, log: Path) -> tuple[dict[str, Any], MemoryUse]:
        self.jobs.append(job)
        mode = log.stem.removeprefix("bench-")
        if mode in self.killed:
            raise WorkerKilled("killed at the memory limit")
        seconds = next(self.seconds[mode])
        spoken = {
            "prompt": [5],
            "tokens": self.tokens[mode],
            "seconds": seconds,
            "decode_seconds": seconds / 2,
            "decode_steps": 2,
            "statistics": COUNTERS if mode == "subspec" else {},
        }
        result: dict[str, Any] = {"answers": [spoken], "placement": None}
        if mode == "subspec":
            result["placement"] = PLACEMENT.to_json()
        if job.timeline:
            result["timeline"] = {"spans": [["link", 0.0, 1.0]], "steps": [[0.0, 2.0]]}
        return result, MemoryUse(limit_bytes, True, "", True, 10, 7, 3, 9)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    fake = Workers()
    monkeypatch.setattr(bench, "run_worker", fake.run)
    monkeypatch.setattr(bench, "engine_arguments", lambda mode, work: {"mode": mode.name})
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path


def make(
    model: Path, names: str, repeats: int = 1, timeline: bool = False, **options: Any
) -> Bench:
    work = Workload(model, 2**30, ("hi",), 16, options=options)
    return Bench(work, [MODES[name] for name in names.split(",")], repeats, timeline)


def judge_as(monkeypatch: pytest.MonkeyPatch, gap: float) -> list[Any]:
    """Every differing answer is found ``gap`` below the best token, where 1 is tolerated."""
    calls: list[Any] = []

    def audit(folder: Path, prompts: Any, expected: Any, found: Any) -> list[Divergence]:
        calls.append(found)
        pairs = zip(expected, found, strict=True)
        return [Divergence(i, 2, 3, 9, gap, 1.0) for i, (a, b) in enumerate(pairs) if a != b]

    monkeypatch.setattr(bench_gate, "audit", audit)
    return calls


def test_rounds_interleave_modes_and_medians_are_over_rounds(workers: Workers, model: Path) -> None:
    report = make(model, "plain,subspec", repeats=3).run(lambda text: None)
    assert [job.arguments["mode"] for job in workers.jobs] == ["plain", "subspec"] * 3
    speeds = report["modes"]["plain"]["tokens_per_s"]
    assert speeds == {"median": 3 / 7, "min": 3 / 8, "max": 3 / 6}
    assert report["speedup"] == pytest.approx((3 / 2) / (3 / 7))
    assert report["decode_speedup"] == pytest.approx(3.5)
    assert report["budget_bytes"] == 2**30
    assert report["gate"]["passed"]
    assert report["gate"]["modes"]["subspec"]["answers"] == 3
    assert sum(share["median"] for share in report["modes"]["subspec"]["losses"].values()) > 0
    assert report["modes"]["subspec"]["measured_over_predicted"] == pytest.approx(2 / 4.5)
    json.dumps(report, allow_nan=False)
    text = render(report)
    assert "**subspec over plain: 3.50x**" in text
    assert "4.50 tokens/s decoding by a link of 2.00 GB/s; measured over predicted 0.44" in text
    placed = "1 resident, 2 streamed with 4 bits, 1 streamed with 6 bits, head streamed with 8 bits"
    assert f"{placed}, 2 slots, tree 4x8 of 20 nodes" in text


def test_no_speed_on_a_red_gate(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_as(monkeypatch, gap=2.0)
    workers.tokens["subspec"] = [1, 2, 9]
    report = make(model, "plain,subspec", repeats=3).run(lambda text: None)
    assert len(workers.jobs) == 2  # no further round is run
    assert not report["gate"]["passed"]
    assert report["gate"]["modes"]["subspec"]["wrong_tokens"] == 1
    assert not {"modes", "speedup"} & report.keys()
    assert "tokens/s" not in render(report)
    assert "The gate is red" in render(report)


def test_near_ties_are_counted_and_the_same_answers_audited_once(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = judge_as(monkeypatch, gap=0.5)
    workers.tokens["subspec"] = [1, 2, 9]
    report = make(model, "plain,subspec", repeats=2).run(lambda text: None)
    assert report["gate"]["modes"]["subspec"]["near_ties"] == 1
    assert report["speedup"] > 1
    assert len(calls) == 2  # once for each mode, not for each round


def test_float32_knows_no_ties(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_as(monkeypatch, gap=0.5)
    (model / "config.json").write_text('{"dtype": "float32"}')
    workers.tokens["subspec"] = [1, 2, 9]
    assert not make(model, "plain,subspec").run(lambda text: None)["gate"]["passed"]


def test_an_emulated_link_labels_every_result(workers: Workers, model: Path) -> None:
    report = make(model, "plain,subspec", emulate_link=1e9).run(lambda text: None)
    told = [report, *report["modes"].values()]
    assert [found["emulated_link_bytes_per_s"] for found in told] == [1e9] * 3
    assert "EMULATED LINK of 1.00 GB/s" in render(report)


def test_only_plain_vllm_may_be_killed(workers: Workers, model: Path) -> None:
    workers.killed = {"vllm"}
    report = make(model, "plain,subspec,vllm").run(lambda text: None)
    assert report["gate"]["modes"].keys() == {"plain", "subspec"}
    assert report["modes"]["vllm"]["killed"] == "killed at the memory limit"
    assert "| vllm | killed at the memory limit |" in render(report)
    workers.killed = {"subspec"}
    with pytest.raises(WorkerKilled):
        make(model, "plain,subspec").run(lambda text: None)


def test_the_timeline_is_recorded_once(workers: Workers, model: Path) -> None:
    report = make(model, "plain,subspec", repeats=2, timeline=True).run(lambda text: None)
    assert [job.timeline for job in workers.jobs] == [False, True, False, False]
    assert report["timeline"]["steps"] == [[0.0, 2.0]]


def test_what_a_benchmark_needs(model: Path) -> None:
    with pytest.raises(ConfigError, match="'plain' must be among them"):
        make(model, "subspec")
    with pytest.raises(ConfigError, match="add it to --modes"):
        make(model, "plain", timeline=True)
