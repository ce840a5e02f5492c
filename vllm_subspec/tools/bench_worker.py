"""One mode of the benchmark in a process of its own: ``python -m ...bench_worker JOB RESULT``.

JOB is a JSON file (see ``Job``), RESULT the JSON file to write. The engine runs in this very
process, so that its memory is the process's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.statistics import growth

_WARM_UP_TOKENS = 8
_STATISTICS = "subspec_statistics"
_TIMELINE = "subspec_timeline"
_PLACEMENT = "subspec_placement"
_TIMELINE_S = 3600.0
_DRAFTS = ("draft_seconds", "draft_steps")


@dataclass(frozen=True)
class Job:
    """What a worker shall do; plain values, since it travels as JSON.

    Attributes:
        arguments: of vLLM's ``LLM``.
        streams: whether SubSpec is there, and has counters.
        prompts: user messages.
        max_tokens: new tokens for each, end of text ignored.
        timeline: record one more answer's spans, after those that are timed.
        procs: file of the memory group to join before anything is loaded; ``None`` for none.
    """

    arguments: dict[str, Any]
    streams: bool
    prompts: Sequence[str]
    max_tokens: int
    timeline: bool
    procs: str | None


@dataclass(frozen=True)
class TimedAnswer:
    """One greedy answer, timed where the engine runs.

    Attributes:
        prompt: token ids, chat template included.
        tokens: token ids of the answer.
        seconds: from the request to its end.
        decode_seconds: from the first token to the end, and the draft that followed the first
            token, which is the work of the first decode step.
        decode_steps: engine steps after the first token.
        statistics: what SubSpec's counters grew by in that time; empty without SubSpec.
        steps: start and end of each decode step, seconds of ``time.monotonic``.
    """

    prompt: list[int]
    tokens: list[int]
    seconds: float
    decode_seconds: float
    decode_steps: int
    statistics: dict[str, Any]
    steps: list[tuple[float, float]]


class _Engine:
    """vLLM in this process, one request at a time."""

    def __init__(self, job: Job) -> None:
        from vllm_subspec.integration.offline import LLM, SamplingParams

        self._llm = LLM(**job.arguments)
        self._params = SamplingParams
        self._streams = job.streams
        self._num_requests = 0

    def rpc(self, method: str, *args: Any) -> Any:
        """The answer of the only worker."""
        return self._llm.collective_rpc(method, args=args)[0]

    def placement(self) -> dict[str, Any] | None:
        """What the plan decided, as `Placement.to_json` gives it."""
        placement: dict[str, Any] | None = self.rpc(_PLACEMENT) if self._streams else None
        return placement

    def ask(self, prompt: str, max_tokens: int) -> TimedAnswer:
        """One answer; the counters are read before and after decoding, not during."""
        ids = self._llm.get_tokenizer().apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine, before = self._llm.llm_engine, self._counters()
        self._num_requests += 1
        began = time.monotonic()
        engine.add_request(str(self._num_requests), {"prompt_token_ids": list(ids)}, params)
        tokens = self._step_until_output()
        first = time.monotonic()
        middle = self._counters()
        steps = []
        while engine.has_unfinished_requests():
            start = time.monotonic()
            tokens = _tokens(engine.step()) or tokens
            steps.append((start, time.monotonic()))
        ended = time.monotonic()
        drafted = middle.get("draft_seconds", 0.0) - before.get("draft_seconds", 0.0)
        return TimedAnswer(
            prompt=list(ids),
            tokens=tokens,
            seconds=ended - began,
            decode_seconds=ended - first + drafted,
            decode_steps=len(steps),
            statistics=_decode_growth(before, middle, self._counters()),
            steps=steps,
        )

    def _step_until_output(self) -> list[int]:
        while not (tokens := _tokens(self._llm.llm_engine.step())):
            pass
        return tokens

    def _counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.rpc(_STATISTICS) if self._streams else {}
        return counters


def _decode_growth(
    before: dict[str, Any], first: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Growth since the first token, but of drafts since the request: they all serve decoding."""
    drafts = growth(before, after)
    return growth(first, after) | {name: drafts[name] for name in _DRAFTS if name in drafts}


def _tokens(outputs: Sequence[Any]) -> list[int]:
    """All tokens so far of the one request that runs; none before its first."""
    return [token for output in outputs for token in output.outputs[0].token_ids]


def run(job: Job) -> dict[str, Any]:
    """Load, warm up, answer every prompt; JSON-serialisable."""
    engine = _Engine(job)
    engine.ask(job.prompts[0], _WARM_UP_TOKENS)
    answers = [engine.ask(prompt, job.max_tokens) for prompt in job.prompts]
    result = {"answers": [asdict(answer) for answer in answers], "placement": engine.placement()}
    if job.timeline:
        engine.rpc(_TIMELINE, _TIMELINE_S)
        shown = engine.ask(job.prompts[0], job.max_tokens)
        result["timeline"] = {"spans": engine.rpc(_TIMELINE, None), "steps": shown.steps}
    return result


def main(job_file: Path, result_file: Path) -> None:
    """Do the job of ``job_file``; join its memory group first."""
    job = Job(**json.loads(job_file.read_text()))
    if job.procs is not None:
        Path(job.procs).write_text("0")
    result_file.write_text(json.dumps(run(job), allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
