"""Random requests, contradictory ones included, the same ones for a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

MOST_REQUESTS = 4  # of a case
MODEL_LEN = 160
ENGINE: dict[str, Any] = {
    "max_model_len": MODEL_LEN,
    "max_num_seqs": MOST_REQUESTS,
    "reasoning_config": {"reasoning_start_str": "Q:", "reasoning_end_str": "\nA: so"},
}
SUBSPEC: dict[str, Any] = {"width": 4, "depth": 8, "bits": 8, "stream": "off"}
MOST_NODES = SUBSPEC["width"] * SUBSPEC["depth"]


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
        return self.params.get("temperature") == 0.0 or self.params.get("seed") not in (None, -1)

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


_RARELY = 12  # one in so many


def _mostly(usual: st.SearchStrategy[Any], odd: Sequence[Any]) -> st.SearchStrategy[Any]:
    """Values that are fine, and now and then one that may not be."""
    return st.integers(1, _RARELY).flatmap(lambda n: st.sampled_from(odd) if n == 7 else usual)


def _floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False).map(lambda value: round(value, 3))


_INF, _NAN = math.inf, math.nan
_TOKEN = st.integers(0, 4095)
_ANY_TOKEN = _mostly(_TOKEN, [-1, 4096, 10**6])
_WORDS = ("e", " the", "in", "river", "\n", "and a", ",", "zq")
_TEXTS = (
    "Once upon a time",
    "Q: Once upon a time",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8,",
    "def fibonacci(n):\n    ",
    "Every morning she walked to the bridge, looked at the sky for a long while, and told",
    " ",
    "é漢字 \x00",
)

_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "n": _mostly(st.integers(1, 3), [0, -1]),
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
    "thinking_token_budget": _mostly(st.integers(0, 12), [None, -1, -7]),
    "stream_interval": _mostly(st.integers(1, 4), [0]),
    "extra_args": st.one_of(
        st.fixed_dictionaries(
            {}, optional={"subspec": st.booleans(), "subspec_depth": st.integers(1, MOST_NODES)}
        ),
        st.sampled_from(
            [
                {"subspec": 0},
                {"someone": "else's"},
                {"huge": 2**80},
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
            "max_pattern_size": _mostly(st.sampled_from([3, 4]), [0, -1]),
            "min_pattern_size": st.sampled_from([1, 3]),
            "min_count": _mostly(st.sampled_from([2, 3]), [1]),
        }
    ),
    "structured": _mostly(
        st.sampled_from(
            [
                {"choice": ["rivers", "mountains and lakes"]},
                {"regex": "[a-z ,]{5,30}"},
                {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
            ]
        ),
        [{"regex": "(("}, {"regex": "a", "choice": ["b"]}, {"choice": []}],
    ),
}


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    prompt = draw(
        _mostly(
            st.one_of(st.sampled_from(_TEXTS), st.lists(_TOKEN, min_size=1, max_size=40)),
            [[], [5], [1, 4096], [-3], [7] * (MODEL_LEN - 1), [7] * MODEL_LEN],
        )
    )
    params: dict[str, Any] = {
        "temperature": draw(
            _mostly(st.sampled_from([0.0, 0.0, 0.7, 0.9, 1.3, 2.0, 0.05]), [1e-7, -1.0, 3.0, _NAN])
        ),
        "max_tokens": draw(_mostly(st.integers(0, 31).map(lambda n: 32 - n), [0, -4, 500])),
    }
    if params["temperature"] != 0.0:
        params["seed"] = draw(st.integers(0, 2**31))
    size = draw(st.integers(0, 5))
    known = st.sampled_from(sorted(_PARAMS))
    names = draw(st.lists(known, min_size=size, max_size=size, unique=True))
    params |= {name: draw(_PARAMS[name]) for name in names}
    return Request(
        prompt,
        params,
        arrives=draw(st.sampled_from([0, 0, 1, 3])),
        given_up=draw(st.sampled_from([None, None, None, None, 0, 2, 4])),
    )


def cases(count: int, seed: int) -> list[list[Request]]:
    """``count`` cases of one to four requests, always the same for a seed (and a hypothesis)."""
    shuffle = random.Random(seed)
    sizes = [shuffle.randint(1, MOST_REQUESTS) for _ in range(count)]
    drawn = iter(_distinct(sum(sizes), seed, shuffle))
    return [list(islice(drawn, size)) for size in sizes]


def _distinct(count: int, seed: int, shuffle: random.Random) -> list[Request]:
    """So many requests; hypothesis likes to repeat what it has drawn."""
    found: dict[str, Request] = {}

    @hypothesis.seed(seed)
    @settings(
        max_examples=3 * count + 100,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_requests())
    def collect(request: Request) -> None:
        found[repr(request)] = request

    collect()
    assert len(found) >= count, f"hypothesis drew {len(found)} requests only"
    requests = list(found.values())
    shuffle.shuffle(requests)  # the simple ones came first
    return requests[:count]
