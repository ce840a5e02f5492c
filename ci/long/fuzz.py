"""Random requests, contradictory ones included: SubSpec answers, or refuses, as plain vLLM does.

Hypothesis draws the cases, the same ones for a seed: one to four requests that arrive, and are
given up, while others run. Plain vLLM gets all of them first, then SubSpec. Equal are: tokens,
texts, reasons to stop, and log-probabilities; or type and message of the error. What was given up
must agree as far as both came; an unseeded sampled answer only in its form. Exit status 1:
something differed; it is printed with the number under which ``--only`` runs it alone.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MODEL_LEN = 160
ENGINE: dict[str, Any] = {"max_model_len": MODEL_LEN, "max_num_seqs": 4}
SUBSPEC: dict[str, Any] = {"width": 4, "depth": 8, "bits": 8, "stream": "off"}
MOST_NODES = SUBSPEC["width"] * SUBSPEC["depth"]
_TOLERANCE = 2e-3  # of a log-probability: another batch shape changes the last bits
_RANK_TOLERANCE = 0.02


@dataclass(frozen=True)
class Request:
    """One request of a case.

    Attributes:
        prompt: text or token ids.
        params: arguments of ``SamplingParams``; ``structured`` and ``repetition`` stand for the
            arguments of objects among them.
        arrives: engine steps after the case began.
        given_up: engine steps after its arrival; ``None``: never.
    """

    prompt: str | list[int]
    params: dict[str, Any]
    arrives: int = 0
    given_up: int | None = None

    @property
    def is_reproducible(self) -> bool:
        """Whether two engines must draw the same tokens."""
        return self.params.get("temperature") == 0.0 or self.params.get("seed", -1) != -1

    @property
    def subspec_refuses(self) -> bool:
        """Whether SubSpec's own options are wrong, which plain vLLM does not look at."""
        given = self.params.get("extra_args") or {}
        depth = given.get("subspec_depth", 1)
        return (
            given.get("subspec", 0) not in (0, 1)
            or type(depth) is not int
            or not 1 <= depth <= MOST_NODES
            or "subspec_dept" in given
        )


@dataclass
class Outcome:
    """What became of a request: an error's type and text, or its completions by index."""

    error: str | None = None
    finished: bool = False
    completions: dict[int, Any] = field(default_factory=dict)
    prompt_logprobs: Any = None


# -- cases -----------------------------------------------------------------------------------------

_TOKEN = st.integers(0, 4095)
_ANY_TOKEN = st.one_of(_TOKEN, _TOKEN, st.sampled_from([-1, 4096, 10**6]))
_WORDS = ("e", " the", "in", "river", "\n", "and a", ",", "zq")
_TEXTS = (
    "Once upon a time",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8,",
    "def fibonacci(n):\n    ",
    "Every morning she walked to the bridge, looked at the sky for a long while, and told",
    " ",
    "é漢字 \x00",
)


def _mostly(usual: st.SearchStrategy[Any], odd: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Values that are fine, and now and then one that may not be."""
    return st.one_of(usual, usual, usual, usual, st.sampled_from(odd))


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False).map(lambda value: round(value, 3))


_INF, _NAN = math.inf, math.nan
_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([1, 2, 3, 0, -1]),
    "seed": _mostly(st.integers(0, 2**31), [None, -1, -5, 2**63]),
    "top_p": _mostly(_floats(0.05, 1.0), [0.0, 1.5, -0.1, 1e-9]),
    "top_k": _mostly(st.integers(0, 60), [-1, -2, 10**6]),
    "min_p": _mostly(_floats(0.0, 0.5), [1.0, 1.5, -0.1]),
    "presence_penalty": _mostly(_floats(-2, 2), [-2.5, 3.0]),
    "frequency_penalty": _mostly(_floats(-2, 2), [-2.5, 3.0]),
    "repetition_penalty": _mostly(_floats(0.5, 2), [0.0, -1.0, 1e-3, 50.0, _INF, _NAN]),
    "min_tokens": _mostly(st.integers(0, 20), [-1, 30, 10**6]),
    "ignore_eos": st.booleans(),
    "stop": _mostly(
        st.one_of(st.sampled_from(_WORDS), st.lists(st.sampled_from(_WORDS), max_size=3)),
        ["", ["e", ""]],
    ),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.one_of(
        st.lists(_ANY_TOKEN, max_size=3), st.integers(0, 4000).map(lambda a: [*range(a, a + 90)])
    ),
    "bad_words": _mostly(st.lists(st.sampled_from(_WORDS), max_size=4), [[""], [" "]]),
    "allowed_token_ids": _mostly(
        st.one_of(
            st.lists(_ANY_TOKEN, min_size=1, max_size=3),
            st.integers(0, 3000).map(lambda a: [*range(a, a + 900)]),
        ),
        [[]],
    ),
    "logit_bias": st.dictionaries(
        _ANY_TOKEN, _mostly(_floats(-100, 100), [-_INF, 1e4]), max_size=3
    ),
    "logprobs": _mostly(st.sampled_from([0, 1, 5, 20]), [21, -1, -2, 5000]),
    "prompt_logprobs": _mostly(st.sampled_from([0, 1, 3]), [21, -1, -2]),
    "logprob_token_ids": st.lists(_ANY_TOKEN, max_size=3),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
    "skip_reading_prefix_cache": st.booleans(),
    "thinking_token_budget": st.sampled_from([None, 3, -7]),
    "stream_interval": st.sampled_from([1, 3, 0]),
    "extra_args": st.one_of(
        st.fixed_dictionaries(
            {}, optional={"subspec": st.booleans(), "subspec_depth": st.integers(1, MOST_NODES)}
        ),
        st.sampled_from(
            [
                {"someone": "else's"},
                {"huge": 2**80},
                {"subspec": 0},
                {"subspec": "off"},
                {"subspec": 2},
                {"subspec": {"depth": 3}},
                {"subspec_depth": 0},
                {"subspec_depth": MOST_NODES + 1},
                {"subspec_depth": "3"},
                {"subspec_depth": True},
                {"subspec_dept": 3},
            ]
        ),
    ),
    "repetition": st.fixed_dictionaries(
        {
            "max_pattern_size": st.sampled_from([2, 4, 0, -1]),
            "min_pattern_size": st.sampled_from([1, 3]),
            "min_count": st.sampled_from([2, 3, 1]),
        }
    ),
    "structured": st.sampled_from(
        [
            {"choice": ["rivers", "mountains and lakes"]},
            {"regex": "[a-z ,]{5,30}"},
            {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
            {"regex": "(("},
            {"regex": "a", "choice": ["b"]},
            {"choice": []},
        ]
    ),
}


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    prompt = draw(
        st.one_of(
            st.sampled_from(_TEXTS),
            st.sampled_from(_TEXTS),
            st.lists(_TOKEN, min_size=1, max_size=40),
            st.sampled_from([[], [5], [1, 4096], [-3], [7] * (MODEL_LEN - 1), [7] * MODEL_LEN]),
        )
    )
    params: dict[str, Any] = {
        "temperature": draw(
            st.sampled_from([0.0, 0.0, 0.0, 0.7, 0.9, 1.3, 2.0, 1e-7, 0.05, -1.0, 3.0, _NAN])
        ),
        "max_tokens": draw(_mostly(st.integers(1, 32), [0, -4, 500])),
    }
    if params["temperature"] != 0.0:
        params["seed"] = draw(st.integers(0, 2**31))
    names = draw(st.lists(st.sampled_from(sorted(_PARAMS)), max_size=4, unique=True))
    params |= {name: draw(_PARAMS[name]) for name in names}
    return Request(
        prompt,
        params,
        arrives=draw(st.sampled_from([0, 0, 1, 3])),
        given_up=draw(st.sampled_from([None, None, None, None, 0, 2, 4])),
    )


def cases(count: int, seed: int) -> list[list[Request]]:
    """``count`` cases, always the same for a seed (and a version of hypothesis)."""
    found: list[list[Request]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(_requests(), min_size=1, max_size=4))
    def collect(case: list[Request]) -> None:
        found.append(case)

    collect()
    random.Random(seed).shuffle(found)  # hypothesis begins with the simple ones
    return found[:count]


# -- running them ----------------------------------------------------------------------------------


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
        for output in engine.step():
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
        return f"{type(error).__name__}: {error}"
    return None


# -- comparing -------------------------------------------------------------------------------------


def difference(request: Request, plain: Outcome, found: Outcome) -> str | None:
    """What SubSpec did otherwise; ``None`` if nothing."""
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
        problem = _difference_of(a, b) if whole else _difference_in_heads(a, b)
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


def _difference_of(plain: Any, found: Any) -> str | None:
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        expected, value = getattr(plain, name), getattr(found, name)
        if name == "token_ids":
            expected, value = list(expected), list(value)
        if expected != value:
            return f"{name} {expected!r} became {value!r}"
    return _logprobs_differ(plain.logprobs, found.logprobs)


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
        a, b = plain.get(token), found.get(token)
        if a is None or b is None:
            alone = a if a is not None else b
            if abs(alone.logprob - last) > _TOLERANCE:
                return False
        else:
            same_rank = abs(a.rank - b.rank) <= max(1, _RANK_TOLERANCE * a.rank)
            if not (same_rank and _is_same_value(a.logprob, b.logprob)):
                return False
    return True


def _is_same_value(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= _TOLERANCE or (math.isnan(a) and math.isnan(b))


# -- by hand ---------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engine"))
    from conftest import Engine, write_lively_model  # the tests' own

    from vllm_subspec.tools.example_model import ExampleModel, write_example_model

    drawn = list(enumerate(cases(given.cases, given.seed)))
    chosen = [(i, case) for i, case in drawn if given.only in (None, i)]
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small"  # for its tokenizer
        write_example_model(small, ExampleModel(dtype="float32", num_layers=1))
        model = write_lively_model(Path(folder) / "lively", small)
        outcomes = []
        for subspec in (None, SUBSPEC):
            engine = Engine(model, subspec, ENGINE)
            try:
                outcomes.append([run(engine.llm, case, str(i)) for i, case in chosen])
            finally:
                engine.close()
    differences = refused = 0
    for (i, case), plain, found in zip(chosen, *outcomes, strict=True):
        for request, a, b in zip(case, plain, found, strict=True):
            refused += a.error is not None
            problem = difference(request, a, b)
            if problem is not None:
                differences += 1
                print(f"--seed {given.seed} --cases {given.cases} --only {i}: {problem}\n  {case}")
    total = sum(len(case) for _, case in chosen)
    print(
        f"{len(chosen)} cases, {total} requests, {refused} of them refused by plain vLLM: "
        f"{differences} differences"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
