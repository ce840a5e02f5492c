"""Random requests through an in-process engine, and what two engines made of them compared."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proofs.fuzz_cases import Request

_TOLERANCE = 2e-3  # of a log-probability: another batch shape changes the last bits
_RANK_TOLERANCE = 0.02


@dataclass
class Outcome:
    """What became of a request: an error's type and text, or its completions by index."""

    error: str | None = None
    finished: bool = False
    completions: dict[int, Any] = field(default_factory=dict)
    prompt_logprobs: Any = None


def run(llm: Any, case: Sequence[Request], name: str) -> list[Outcome]:
    """What an in-process engine makes of a case; ``name`` keeps its request ids apart."""
    engine = llm.llm_engine
    outcomes = [Outcome() for _ in case]
    ids: dict[str, int] = {}
    step = 0
    while step <= max(r.arrives for r in case) or engine.has_unfinished_requests():
        for index, request in enumerate(case):
            req_id = f"{name}-{index}"
            if request.arrives == step:
                outcomes[index].error = _add(engine, req_id, request)
                ids[req_id] = index
            if request.given_up is not None and step == request.arrives + request.given_up:
                engine.abort_request([req_id])
        try:
            outputs = engine.step()
        except Exception as error:
            error.add_note(f"in case {name}: {case}")
            raise
        for output in outputs:
            outcome = outcomes[ids[output.request_id]]
            outcome.completions |= {c.index: c for c in output.outputs}
            outcome.prompt_logprobs = output.prompt_logprobs
            outcome.finished |= output.finished
        step += 1
    return outcomes


def _add(engine: Any, req_id: str, request: Request) -> str | None:
    """Hand a request over; the error's type and text if it is refused."""
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    objects = {
        "structured": ("structured_outputs", StructuredOutputsParams),
        "repetition": ("repetition_detection", RepetitionDetectionParams),
    }
    try:
        params = {}
        for key, value in request.params.items():
            kwarg, make = objects.get(key, (key, None))
            params[kwarg] = value if make is None else make(**value)
        prompt = request.prompt
        given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        engine.add_request(req_id, given, SamplingParams(**params))
    except Exception as error:  # whatever it is, both engines must say it
        message = re.sub(r"\d\d:\d\d:\d\d", "", str(error))  # the grammar's compiler says it
        return f"{type(error).__name__}: {message}"
    return None


def differences(
    case: Sequence[Request], plain: Sequence[Outcome], found: Sequence[Outcome]
) -> list[str]:
    """What SubSpec did otherwise, in one line each."""
    problems = []
    for request, a, b in zip(case, plain, found, strict=True):
        # vLLM 0.32 forgets the logprobs that other requests of a batch want beside one with
        # logprob_token_ids (v1/sample/sampler.py, "prefer logprob_token_ids").
        is_robbed = any(r is not request and "logprob_token_ids" in r.params for r in case)
        problem = _difference(request, a, b, with_logprobs=not is_robbed)
        if problem is not None:
            problems.append(f"{problem}, of {request}")
    return problems


def _difference(
    request: Request, plain: Outcome, found: Outcome, with_logprobs: bool
) -> str | None:
    if request.subspec_refuses and "option 'subspec" in (found.error or ""):
        return None
    if request.subspec_refuses and plain.error is None:
        return f"was not refused: {found.error}"
    if plain.error or found.error:
        return None if plain.error == found.error else f"{plain.error!r} became {found.error!r}"
    if request.given_up is None and not (plain.finished and found.finished):
        return f"finished: {plain.finished} became {found.finished}"
    if not request.is_reproducible:
        return _difference_in_form(request, plain, found)
    whole = plain.finished and found.finished
    if whole and plain.completions.keys() != found.completions.keys():
        return f"completions {sorted(plain.completions)} became {sorted(found.completions)}"
    for index in plain.completions.keys() & found.completions.keys():
        a, b = plain.completions[index], found.completions[index]
        problem = _difference_of(a, b, with_logprobs) if whole else _difference_in_heads(a, b)
        if problem is not None:
            return f"completion {index}: {problem}"
    if whole:
        return _logprobs_differ(plain.prompt_logprobs, found.prompt_logprobs)
    return None


def _difference_in_form(request: Request, plain: Outcome, found: Outcome) -> str | None:
    if request.given_up is None and plain.completions.keys() != found.completions.keys():
        return f"completions {sorted(plain.completions)} became {sorted(found.completions)}"
    most = request.params["max_tokens"]
    lengths = [len(completion.token_ids) for completion in found.completions.values()]
    return f"{lengths} tokens, of at most {most}" if any(n > most for n in lengths) else None


def _difference_of(plain: Any, found: Any, with_logprobs: bool) -> str | None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        expected, value = getattr(plain, name), getattr(found, name)
        if name == "token_ids":
            expected, value = list(expected), list(value)
        if expected != value:
            return f"{name} {expected!r} became {value!r}"
    return _logprobs_differ(plain.logprobs, found.logprobs) if with_logprobs else None


def _difference_in_heads(plain: Any, found: Any) -> str | None:
    """Of two answers that were given up, one earlier than the other."""
    a, b = list(plain.token_ids), list(found.token_ids)
    common = min(len(a), len(b))
    return f"tokens {a} became {b}" if a[:common] != b[:common] else None


def _logprobs_differ(plain: Any, found: Any) -> str | None:
    if plain is None or found is None or len(plain) != len(found):
        same = plain is None and found is None
        return None if same else f"{_size(plain)} logprobs became {_size(found)}"
    for position, (a, b) in enumerate(zip(plain, found, strict=True)):
        if (a is None) != (b is None):
            return f"logprobs at {position}: {a} became {b}"
        if a is not None and not _is_close(a, b):
            return f"logprobs at {position}: {a} became {b}"
    return None


def _size(logprobs: Any) -> str:
    return "no" if logprobs is None else str(len(logprobs))


def _is_close(plain: dict[int, Any], found: dict[int, Any]) -> bool:
    """The same tokens, but for a tie about the last place, with the same ranks and values."""
    if len(plain) != len(found):
        return False
    last = min(value.logprob for value in plain.values())
    for token in plain.keys() | found.keys():
        values = [answer[token] for answer in (plain, found) if token in answer]
        if len(values) == 1:
            if abs(values[0].logprob - last) > _TOLERANCE:
                return False
        else:
            a, b = values
            same_rank = abs(a.rank - b.rank) <= max(1, _RANK_TOLERANCE * a.rank)
            if not (same_rank and _is_same_value(a.logprob, b.logprob)):
                return False
    return True


def _is_same_value(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _TOLERANCE or (math.isnan(a) and math.isnan(b))
