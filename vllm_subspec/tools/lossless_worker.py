"""One engine of the losslessness protocol, in a process of its own.

``python -m vllm_subspec.tools.lossless_worker JOB RESULT``: JOB is a JSON file (see ``Job``),
RESULT the JSON file to write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_subspec.statistics import growth
from vllm_subspec.tools.lossless_control import wrong_sampler

_STATISTICS = "subspec_statistics"
Law = tuple[list[int], list[float]]
"""The most probable next tokens at one position, best first, and their log-probabilities."""


@dataclass(frozen=True)
class Ask:
    """Requests that are asked in one go.

    Attributes:
        prompts: token ids of each.
        params: arguments of vLLM's ``SamplingParams`` that all of them share.
        seeds: one for each request; empty for requests without a seed.
        alone: one after another, so that each is the only one in flight; else all at once.
        laws: the laws of so many tokens at the end of each prompt are wanted; needs
            ``prompt_logprobs`` in the parameters.
        rescore: the laws of the answers' tokens are wanted twice: as they were when the token was
            drawn, and computed once more for the whole text at once; needs ``logprobs``.
        policy: SubSpec's tree options from here on, over those it was started with.
        wrong: name of a wrong sampler (see ``lossless_control``) to draw with; empty for none.
    """

    prompts: Sequence[Sequence[int]]
    params: Mapping[str, Any]
    seeds: Sequence[int] = ()
    alone: bool = False
    laws: int = 0
    rescore: bool = False
    policy: Mapping[str, Any] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Job:
    """What a worker shall do; plain values, since it travels as JSON.

    Attributes:
        arguments: of vLLM's ``LLM``.
        asks: by name, in the order in which they are asked.
        streams: whether SubSpec is there, and has counters.
    """

    arguments: Mapping[str, Any]
    asks: Mapping[str, Ask]
    streams: bool = False


@dataclass(frozen=True)
class Told:
    """What came of one ``Ask``, a list entry per request.

    Attributes:
        tokens: ids of the answers.
        texts: the answers; empty where they were not asked for.
        laws: by request and position, oldest first; empty where they were not asked for.
        rescored: likewise, for the whole text at once.
        statistics: what SubSpec's counters grew by; empty without SubSpec.
    """

    tokens: list[list[int]]
    texts: list[str]
    laws: list[list[Law]]
    rescored: list[list[Law]]
    statistics: dict[str, Any]


class Teller:
    """Puts asks to an engine in this process.

    Args:
        llm: vLLM's ``LLM``.
        streams: whether SubSpec is there, and has counters.
    """

    def __init__(self, llm: Any, streams: bool) -> None:
        from vllm_subspec.integration.offline import SamplingParams

        self._llm = llm
        self._params = SamplingParams
        self._streams = streams

    def tell(self, ask: Ask) -> Told:
        """Ask, with the right sampler or a wrong one."""
        if ask.policy:
            self._llm.collective_rpc("set_draft_policy", args=(dict(ask.policy),))
        before = self._counters()
        if ask.wrong:
            with wrong_sampler(ask.wrong):
                outputs = self._generate(ask)
        else:
            outputs = self._generate(ask)
        statistics = growth(before, self._counters())
        answers = [output.outputs[0] for output in outputs]
        laws: list[list[Law]] = []
        rescored: list[list[Law]] = []
        if ask.laws:
            laws = [_laws(output.prompt_logprobs)[-ask.laws :] for output in outputs]
        if ask.rescore:
            laws = [_laws(answer.logprobs) for answer in answers]
            rescored = self._rescore(ask, [list(answer.token_ids) for answer in answers])
        return Told(
            [list(answer.token_ids) for answer in answers],
            [answer.text for answer in answers],
            laws,
            rescored,
            statistics,
        )

    def _rescore(self, ask: Ask, tokens: Sequence[list[int]]) -> list[list[Law]]:
        texts = [[*prompt, *answer] for prompt, answer in zip(ask.prompts, tokens, strict=True)]
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": ask.params["logprobs"]}
        outputs = self._generate(Ask(texts, params | {"detokenize": False}))
        return [
            _laws(output.prompt_logprobs)[-len(answer) :]
            for output, answer in zip(outputs, tokens, strict=True)
        ]

    def _generate(self, ask: Ask) -> list[Any]:
        seeds: Sequence[int | None] = ask.seeds or [None] * len(ask.prompts)
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in ask.prompts]
        params = [self._params(**ask.params, seed=seed, flat_logprobs=True) for seed in seeds]
        if not ask.alone:
            return list(self._llm.generate(prompts, params, use_tqdm=False))
        return [
            self._llm.generate(prompt, param, use_tqdm=False)[0]
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _counters(self) -> dict[str, Any]:
        if not self._streams:
            return {}
        counters: dict[str, Any] = self._llm.collective_rpc(_STATISTICS)[0]
        return counters


def _laws(logprobs: Any) -> list[Law]:
    """Of vLLM's ``FlatLogprobs``: at each position the token itself, then the best ones."""
    return [
        (logprobs.token_ids[start + 1 : end], logprobs.logprobs[start + 1 : end])
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]


def run(job: Job) -> dict[str, Any]:
    """Load, and ask everything; JSON-serialisable, a ``Told`` by name."""
    from vllm_subspec.integration.offline import LLM

    teller = Teller(LLM(**job.arguments), job.streams)
    return {name: asdict(teller.tell(ask)) for name, ask in job.asks.items()}


def main(job_file: Path, result_file: Path) -> None:
    """Do the job of ``job_file``."""
    given = json.loads(job_file.read_text())
    asks = {name: Ask(**ask) for name, ask in given.pop("asks").items()}
    result_file.write_text(json.dumps(run(Job(asks=asks, **given)), allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
