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
from vllm_subspec.tools.energy import EnergyMeter

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
        temperatures: at which all prompts are asked, in turn; those sampled have their index for
            a seed.
        batch: how many are asked together; the prompts are repeated to fill the last batch.
    """

    arguments: dict[str, Any]
    streams: bool
    prompts: Sequence[str]
    max_tokens: int
    timeline: bool
    procs: str | None
    temperatures: Sequence[float] = (0.0,)
    batch: int = 1


@dataclass(frozen=True)
class TimedAnswer:
    """One answer, timed where the engine runs. What took the time of several has its share of it.

    Attributes:
        prompt: token ids, chat template included.
        tokens: token ids of the answer.
        seconds: from the request to its end.
        decode_seconds: from the first token to the end, and the draft that followed the first
            token, which is the work of the first decode step.
        decode_steps: engine steps after the first token; a batch's first answer has them all.
        statistics: what SubSpec's counters grew by in that time, likewise; empty without SubSpec.
        steps: start and end of each decode step, seconds of ``time.monotonic``.
        early_tokens: of the batch's tokens, those that came before each request had its first one,
            beside these.
    """

    prompt: list[int]
    tokens: list[int]
    seconds: float
    decode_seconds: float
    decode_steps: int
    statistics: dict[str, Any]
    steps: list[tuple[float, float]]
    early_tokens: int = 0


class _Engine:
    """vLLM in this process, one batch of requests at a time."""

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

    def ask(
        self, prompts: Sequence[str], max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> list[TimedAnswer]:
        """All at once; the counters are read before and after decoding, not during."""
        tokenizer, engine = self._llm.get_tokenizer(), self._llm.llm_engine
        before = self._counters()
        asked = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            for prompt in prompts
        ]
        began = time.monotonic()
        ids = []
        for prompt, seed in zip(asked, seeds, strict=True):
            self._num_requests += 1
            ids.append(str(self._num_requests))
            params = self._params(
                temperature=temperature,
                seed=seed if temperature else None,
                max_tokens=max_tokens,
                ignore_eos=True,
            )
            engine.add_request(ids[-1], {"prompt_token_ids": list(prompt)}, params)
        tokens: dict[str, list[int]] = {}
        while len(tokens) < len(ids):
            tokens |= _tokens(engine.step())
        first = time.monotonic()
        middle = self._counters()
        early = sum(map(len, tokens.values())) - len(ids)  # a batch's prompts may take turns
        steps = []
        while engine.has_unfinished_requests():
            start = time.monotonic()
            tokens |= _tokens(engine.step())
            steps.append((start, time.monotonic()))
        ended = time.monotonic()
        drafted = middle.get("draft_seconds", 0.0) - before.get("draft_seconds", 0.0)
        grown = _decode_growth(before, middle, self._counters())
        return [
            TimedAnswer(
                prompt=list(prompt),
                tokens=tokens[id_],
                seconds=(ended - began) / len(ids),
                decode_seconds=(ended - first + drafted) / len(ids),
                decode_steps=0 if index else len(steps),
                statistics={} if index else grown,
                steps=[] if index else steps,
                early_tokens=0 if index else early,
            )
            for index, (id_, prompt) in enumerate(zip(ids, asked, strict=True))
        ]

    def _counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.rpc(_STATISTICS) if self._streams else {}
        return counters


def _decode_growth(
    before: dict[str, Any], first: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """Growth since the first token, but of drafts since the request: they all serve decoding."""
    drafts = growth(before, after)
    return growth(first, after) | {name: drafts[name] for name in _DRAFTS if name in drafts}


def _tokens(outputs: Sequence[Any]) -> dict[str, list[int]]:
    """By request, all tokens so far; those without a first one are left out."""
    told = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return {id_: tokens for id_, tokens in told.items() if tokens}


def run(job: Job) -> dict[str, Any]:
    """Load, warm up, answer every prompt at every temperature; JSON-serialisable."""
    engine, meter = _Engine(job), EnergyMeter()
    engine.ask(job.prompts[:1], _WARM_UP_TOKENS, 0.0, [0])
    result = {
        "runs": [_answer_all(engine, meter, job, t) for t in job.temperatures],
        "placement": engine.placement(),
        "no_energy": meter.why_not,
    }
    if job.timeline:
        engine.rpc(_TIMELINE, _TIMELINE_S)
        [shown] = engine.ask(job.prompts[:1], job.max_tokens, 0.0, [0])
        result["timeline"] = {"spans": engine.rpc(_TIMELINE, None), "steps": shown.steps}
    return result


def _answer_all(
    engine: _Engine, meter: EnergyMeter, job: Job, temperature: float
) -> dict[str, Any]:
    count = len(job.prompts)
    answers: list[TimedAnswer] = []
    meter.begin()
    while len(answers) < count:
        seeds = [(len(answers) + index) % count for index in range(job.batch)]
        prompts = [job.prompts[seed] for seed in seeds]
        answers += engine.ask(prompts, job.max_tokens, temperature, seeds)
    return {
        "temperature": temperature,
        "answers": [asdict(answer) for answer in answers],
        "joules": meter.end(),
    }


def main(job_file: Path, result_file: Path) -> None:
    """Do the job of ``job_file``; join its memory group first."""
    job = Job(**json.loads(job_file.read_text()))
    if job.procs is not None:
        Path(job.procs).write_text("0")
    result_file.write_text(json.dumps(run(job), allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
