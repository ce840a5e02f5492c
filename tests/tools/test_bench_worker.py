"""The worker's course of one job, on an engine that answers by the clock of a test."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_subspec.integration import offline
from vllm_subspec.tools import bench_worker
from vllm_subspec.tools.bench_worker import Job, main, run


class Clock:
    """Seconds that pass only when the engine works."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Engine:
    """The part of vLLM's ``LLM`` that a worker uses: a chunked prompt, then 3 tokens a step.

    Prompts take turns, a step each; the requests decode together.
    """

    def __init__(self, clock: Clock, **arguments: Any) -> None:
        self.arguments = arguments
        self.rpcs: list[tuple[str, tuple[Any, ...]]] = []
        self.llm_engine = self
        self._clock = clock
        self._waiting: dict[str, list[list[int] | None]] = {}
        self.params: list[Any] = []
        self._counts = {"target_passes": 0, "draft_seconds": 0.0, "draft_steps": 0}

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            apply_chat_template=lambda chat, **options: [ord(c) for c in chat[0]["content"]]
        )

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.ignore_eos
        self.params.append(params)
        ends = [*range(1, params.max_tokens, 3), params.max_tokens]
        turns = [None] * (1 + len(self._waiting))
        self._waiting[name] = [*turns, *(list(range(end)) for end in ends)]

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Any]:
        told = {name: steps.pop(0) for name, steps in self._waiting.items()}
        self._waiting = {name: steps for name, steps in self._waiting.items() if steps}
        self._clock.now += 10.0
        spoken = {name: tokens for name, tokens in told.items() if tokens is not None}
        if spoken and self._waiting:  # the last step drafts nothing
            self._counts["draft_seconds"] += 2.0
            self._counts["draft_steps"] += 4
        self._counts["target_passes"] += sum(len(tokens) > 1 for tokens in spoken.values())
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)])
            for name, tokens in spoken.items()
        ]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.rpcs.append((method, args))
        if method == "subspec_statistics":
            return [dict(self._counts)]
        if method == "subspec_placement":
            return [{"slots": 2}]
        return [[["link", 0.0, 1.0]] if args == (None,) else None]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    made: list[Engine] = []
    clock = Clock()

    def make(**arguments: Any) -> Engine:
        made.append(Engine(clock, **arguments))
        return made[-1]

    monkeypatch.setattr(offline, "LLM", make)
    monkeypatch.setattr(bench_worker.time, "monotonic", clock.monotonic)
    return made


def test_an_answer_is_timed_from_its_first_token(engines: list[Engine]) -> None:
    result = run(Job({"model": "m"}, True, ["ab", "c"], 10, False, None))
    [asked] = result["runs"]
    assert engines[0].arguments == {"model": "m"}
    assert result["placement"] == {"slots": 2}
    assert [answer["prompt"] for answer in asked["answers"]] == [[97, 98], [99]]
    for answer in asked["answers"]:
        assert answer["tokens"] == list(range(10))
        assert answer["seconds"] == 50.0  # two steps for the prompt, three to decode
        assert answer["decode_seconds"] == 30.0 + 2.0  # the first draft is the first pass's
        assert answer["decode_steps"] == len(answer["steps"]) == 3
        assert answer["statistics"] == {"target_passes": 3, "draft_seconds": 6.0, "draft_steps": 12}
    assert "timeline" not in result
    assert asked["joules"] is None
    assert "zeus" in result["no_energy"]


def test_sampled_answers_have_their_index_for_a_seed(engines: list[Engine]) -> None:
    result = run(Job({}, True, ["ab", "c"], 10, False, None, temperatures=[0.0, 0.6]))
    assert [asked["temperature"] for asked in result["runs"]] == [0.0, 0.6]
    timed = engines[0].params[1:]
    assert [(params.temperature, params.seed) for params in timed] == [
        (0.0, None),
        (0.0, None),
        (0.6, 0),
        (0.6, 1),
    ]


def test_a_batch_shares_its_time(engines: list[Engine]) -> None:
    result = run(Job({}, True, ["ab", "c", "d"], 10, False, None, batch=2))
    answers = result["runs"][0]["answers"]
    assert [answer["prompt"] for answer in answers] == [[97, 98], [99], [100], [97, 98]]
    first, second = answers[:2]
    assert first["seconds"] == second["seconds"] == 60.0 / 2
    assert first["early_tokens"] == 3  # the first request's second step was the other's prompt's
    assert (first["decode_steps"], second["decode_steps"]) == (3, 0)
    assert first["decode_seconds"] == second["decode_seconds"] == (30.0 + 4.0) / 2
    assert second["statistics"] == {}


def test_a_mode_without_subspec_has_no_counters(engines: list[Engine]) -> None:
    result = run(Job({}, False, ["ab"], 10, False, None))
    assert engines[0].rpcs == []
    [answer] = result["runs"][0]["answers"]
    assert (answer["statistics"], answer["decode_seconds"]) == ({}, 30.0)


def test_the_timeline_is_of_an_answer_of_its_own(engines: list[Engine]) -> None:
    result = run(Job({}, True, ["ab"], 10, True, None))
    others = [rpc for rpc in engines[0].rpcs if rpc[0] == "subspec_timeline"]
    assert others == [("subspec_timeline", (3600.0,)), ("subspec_timeline", (None,))]
    assert engines[0].rpcs[-1] == others[1]
    timed = result["runs"][0]["answers"][0]["steps"]
    assert result["timeline"]["spans"] == [["link", 0.0, 1.0]]
    assert result["timeline"]["steps"][0][0] > timed[-1][1]


def test_the_process_joins_its_group_before_it_loads(
    engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    procs, job_file, result_file = (tmp_path / name for name in ("procs", "job", "result"))
    make = offline.LLM

    def load(**arguments: Any) -> Any:
        assert procs.read_text() == "0"
        return make(**arguments)

    monkeypatch.setattr(offline, "LLM", load)
    job_file.write_text(json.dumps(asdict(Job({}, True, ["a"], 10, False, str(procs)))))
    main(job_file, result_file)
    assert len(json.loads(result_file.read_text())["runs"][0]["answers"]) == 1
