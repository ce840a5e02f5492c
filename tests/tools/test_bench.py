"""The benchmark's course, with workers that answer at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import repeat
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
        self.seconds: dict[str, Iterator[float]] = defaultdict(lambda: repeat(1.0))
        self.seconds |= {"plain": iter([6.0, 8.0, 7.0]), "subspec": iter([1.0, 2.0, 4.0])}
        self.killed: set[str] = set()
        self.no_energy = "no counter here"

    def run(self, job: Job, limit_bytes: int, log: Path) -> tuple[dict[str, Any], MemoryUse]:
        self.jobs.append(job)
        mode = log.stem.removeprefix("bench-")
        if mode in self.killed:
            raise WorkerKilled("killed at the memory limit")
        result: dict[str, Any] = {
            "runs": [self.asked(job, mode, temperature) for temperature in job.temperatures],
            "placement": None,
            "no_energy": self.no_energy,
        }
        if mode.startswith("subspec"):
            result["placement"] = PLACEMENT.to_json()
        if job.timeline:
            result["timeline"] = {"spans": [["link", 0.0, 1.0]], "steps": [[0.0, 2.0]]}
        return result, MemoryUse(limit_bytes, True, "", True, 10, 7, 3, 9)

    def asked(self, job: Job, mode: str, temperature: float) -> dict[str, Any]:
        seconds = next(self.seconds[mode])
        spoken = {
            "prompt": [5],
            "tokens": self.tokens.get(mode, [1, 2, 3]),
            "seconds": seconds,
            "decode_seconds": seconds / 2,
            "decode_steps": 2,
            "early_tokens": 0,
            "statistics": COUNTERS if mode.startswith("subspec") else {},
        }
        answers = [spoken] * max(job.batch, len(job.prompts))
        return {"temperature": temperature, "answers": answers, "joules": None}


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    fake = Workers()
    monkeypatch.setattr(bench, "run_worker", fake.run)
    monkeypatch.setattr(bench, "engine_arguments", lambda mode, work, batch: {"mode": mode.name})
    monkeypatch.setattr(bench, "best_batch", lambda work: 2)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path


def make(
    model: Path,
    names: str,
    repeats: int = 1,
    timeline: bool = False,
    temperatures: tuple[float, ...] = (0.0,),
    again: bool = False,
    **options: Any,
) -> Bench:
    work = Workload(model, 2**30, ("hi",), 16, options=options, temperatures=temperatures)
    return Bench(work, [MODES[name] for name in names.split(",")], repeats, timeline, again)


def finish(bench: Bench) -> dict[str, Any]:
    """The report of all rounds."""
    *_, report = bench.rounds(lambda text: None)
    return report


def judge_as(monkeypatch: pytest.MonkeyPatch, gap: float) -> list[Any]:
    """Every differing answer is found ``gap`` below the best token, where 1 is tolerated."""
    calls: list[Any] = []

    def audit(
        folder: Path, prompts: Any, expected: Any, found: Any, noise: Any
    ) -> list[Divergence]:
        calls.append(found)
        pairs = zip(expected, found, strict=True)
        return [Divergence(i, 2, 3, 9, gap, 1.0) for i, (a, b) in enumerate(pairs) if a != b]

    monkeypatch.setattr(bench_gate, "audit", audit)
    return calls


def test_rounds_interleave_modes_and_figures_are_over_rounds(workers: Workers, model: Path) -> None:
    report = finish(make(model, "plain,subspec", repeats=3))
    assert [job.arguments["mode"] for job in workers.jobs] == ["plain", "subspec"] * 3
    speeds = report["modes"]["plain"]["tokens_per_s"]
    assert (speeds["median"], speeds["min"], speeds["max"]) == (3 / 7, 3 / 8, 3 / 6)
    assert speeds["mean"] == pytest.approx((3 / 6 + 3 / 8 + 3 / 7) / 3)
    by_round = [6.0 / 1.0, 8.0 / 2.0, 7.0 / 4.0]
    assert report["speedup"] == pytest.approx(sum(by_round) / 3)
    assert report["modes"]["subspec"]["speedup"]["max"] == pytest.approx(6.0)
    assert report["decode_speedup"] == report["speedup"]
    assert report["budget_bytes"] == 2**30
    assert report["gate"]["passed"]
    assert report["gate"]["modes"]["subspec"]["answers"] == 3
    assert sum(share["mean"] for share in report["modes"]["subspec"]["losses"].values()) > 0
    assert report["modes"]["subspec"]["measured_over_predicted"] == pytest.approx(7 / 3 / 4.5)
    json.dumps(report, allow_nan=False)
    text = render(report)
    assert "**subspec over plain: 3.92x**" in text
    assert "4.50 tokens/s decoding by a link of 2.00 GB/s; measured over predicted 0.52" in text
    assert "| 0.43 ± 0.16 | 1.00 ± 0.00 |" in text  # 3 / 6, 3 / 8, 3 / 7
    assert "3 rounds, means ± half of their 95 % intervals" in text
    assert "FEWER ROUNDS THAN THE 5 OF A PUBLISHED FIGURE" in text
    assert "Energy: no counter readable: no counter here" in text
    assert "J/token" not in text
    placed = "1 resident, 2 streamed with 4 bits, 1 streamed with 6 bits, head streamed with 8 bits"
    assert f"{placed}, 2 slots, tree 4x8 of 20 nodes" in text


def test_no_speed_on_a_red_gate(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_as(monkeypatch, gap=2.0)
    workers.tokens["subspec"] = [1, 2, 9]
    report = finish(make(model, "plain,subspec", repeats=3))
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
    report = finish(make(model, "plain,subspec", repeats=2))
    assert report["gate"]["modes"]["subspec"]["near_ties"] == 1
    assert report["speedup"] > 1
    assert len(calls) == 2  # once for each mode, not for each round


def test_float32_knows_no_ties(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_as(monkeypatch, gap=0.5)
    (model / "config.json").write_text('{"dtype": "float32"}')
    workers.tokens["subspec"] = [1, 2, 9]
    assert not finish(make(model, "plain,subspec"))["gate"]["passed"]


def test_an_emulated_link_labels_every_result(workers: Workers, model: Path) -> None:
    report = finish(make(model, "plain,subspec", emulate_link=1e9))
    told = [report, *report["modes"].values()]
    assert [found["emulated_link_bytes_per_s"] for found in told] == [1e9] * 3
    assert "EMULATED LINK of 1.00 GB/s" in render(report)


def test_only_plain_vllm_may_be_killed(workers: Workers, model: Path) -> None:
    workers.killed = {"vllm"}
    report = finish(make(model, "plain,subspec,vllm"))
    assert report["gate"]["modes"].keys() == {"plain", "subspec"}
    assert report["modes"]["vllm"]["killed"] == "killed at the memory limit"
    assert "| vllm | killed at the memory limit |" in render(report)
    workers.killed = {"subspec"}
    with pytest.raises(WorkerKilled):
        finish(make(model, "plain,subspec"))


def test_the_timeline_is_recorded_once(workers: Workers, model: Path) -> None:
    report = finish(make(model, "plain,subspec", repeats=2, timeline=True))
    assert [job.timeline for job in workers.jobs] == [False, True, False, False]
    assert report["timeline"]["steps"] == [[0.0, 2.0]]


def test_each_round_has_a_report_of_all_so_far(workers: Workers, model: Path) -> None:
    reports = list(make(model, "plain,subspec", repeats=2).rounds(lambda text: None))
    assert [report["workload"]["repeats"] for report in reports] == [1, 2]
    assert reports[0]["speedup"] == pytest.approx(6.0)


def test_each_temperature_is_compared_with_its_own_plain(
    workers: Workers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[Any] = []

    def audit(folder: Path, prompts: Any, expected: Any, found: Any, noise: Any) -> list[Any]:
        judged.append((found, noise is not None))
        return []

    monkeypatch.setattr(bench_gate, "audit", audit)
    workers.seconds["plain"] = iter([6.0, 12.0])
    workers.seconds["leviathan"] = iter([3.0, 3.0])
    names = "plain,leviathan,+coupling,+overlap"
    report = finish(make(model, names, temperatures=(0.0, 0.6)))
    assert [list(job.temperatures) for job in workers.jobs] == [[0.0, 0.6]] * 2 + [
        [0.6],  # greedy requests have no noise to draft with
        [0.0, 0.6],
    ]
    modes = report["modes"]
    assert modes["leviathan"]["speedup"]["mean"] == 2.0
    assert modes["leviathan, T = 0.6"]["speedup"]["mean"] == 4.0
    assert "+coupling" not in modes
    assert "+coupling, T = 0.6" in modes
    # A draft model's tokens are drawn by vLLM's own rejection: another sample of the same law.
    assert "leviathan, T = 0.6" not in report["gate"]["modes"]
    assert {noise for _, noise in judged} == {False, True}


def test_a_batch_is_judged_whole(workers: Workers, model: Path) -> None:
    report = finish(make(model, "plain,flexgen"))
    assert [job.batch for job in workers.jobs] == [1, 2]
    assert report["gate"]["modes"]["flexgen"]["answers"] == 2
    assert report["modes"]["flexgen"]["tokens_per_s"]["mean"] == 3.0
    assert "| flexgen, batch 2 |" in render(report)


def test_the_noise_floor_is_subspec_against_itself(workers: Workers, model: Path) -> None:
    workers.seconds["subspec again"] = iter([1.0, 2.5])
    report = finish(make(model, "plain,subspec", repeats=2, again=True))
    names = [job.arguments["mode"] for job in workers.jobs]
    assert names == ["plain", "subspec", "subspec again"] * 2
    floor = report["noise_floor"]["subspec"]["speedup"]
    assert (floor["min"], floor["max"]) == (pytest.approx(0.8), 1.0)
    assert "subspec again over itself 0.900 ± 1.271, farthest round 20.0% off" in render(report)
    assert "noise_floor" not in finish(make(model, "plain"))


def test_what_a_benchmark_needs(model: Path) -> None:
    with pytest.raises(ConfigError, match="'plain' must be among them"):
        make(model, "subspec")
    with pytest.raises(ConfigError, match="add it to --modes"):
        make(model, "plain", timeline=True)
