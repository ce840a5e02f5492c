"""A finite pool of requests, each with one right answer, that touches what a server is asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL_LEN = 320  # --max-model-len of the servers that are asked
_LONGEST_ANSWER = 96
_STORY = (
    "Once upon a time there was a small village between two rivers, and in the village lived an "
    "old woman who could read the weather from the flight of the birds. Every morning she walked "
    "to the bridge, looked at the sky for a long while, and told the children what the day would "
    "bring. Nobody remembered that she had ever been wrong, until the year in which"
)
_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8,",
    "List five fruits:",
    "The three laws of robotics are, in the order in which they were first written down,",
    _STORY,
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "maps"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A request with exactly one right answer: greedy, or sampled with a seed, or an error.

    Attributes:
        name: the feature, and its number in the pool.
        body: of ``POST /v1/completions``, without ``model`` and ``stream``.
    """

    name: str
    body: dict[str, Any]


def _seeded(draw: random.Random) -> dict[str, Any]:
    return {"temperature": draw.choice((0.6, 0.9, 1.1)), "top_p": 0.95, "seed": draw.randrange(99)}


def _any_sampling(draw: random.Random) -> dict[str, Any]:
    return draw.choice(({"temperature": 0.0}, _seeded(draw)))


_FEATURES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "greedy": lambda draw: {"temperature": 0.0},
    "seeded": _seeded,
    "top-k": lambda draw: _seeded(draw) | {"top_k": 20},
    "min-p": lambda draw: _seeded(draw) | {"min_p": 0.05},
    "presence": lambda draw: _any_sampling(draw) | {"presence_penalty": 0.8},
    "frequency": lambda draw: _any_sampling(draw) | {"frequency_penalty": 0.6},
    "repetition": lambda draw: _any_sampling(draw) | {"repetition_penalty": 1.2},
    "stop-strings": lambda draw: _any_sampling(draw) | {"stop": [".", "e ", "ing", "\n"]},
    "stop-kept": lambda draw: {
        "temperature": 0.0,
        "stop": [" the", "er"],
        "include_stop_str_in_output": True,
    },
    "stop-ids": lambda draw: (
        _any_sampling(draw) | {"stop_token_ids": draw.sample(range(3, 4096), 400)}
    ),
    "min-tokens": lambda draw: (
        _any_sampling(draw)
        | {"min_tokens": draw.randint(2, 20), "stop_token_ids": draw.sample(range(3, 4096), 900)}
    ),
    "logprobs": lambda draw: _any_sampling(draw) | {"logprobs": draw.choice((0, 1, 5))},
    "echo": lambda draw: _any_sampling(draw) | {"echo": True, "logprobs": 1},
    "several": lambda draw: _seeded(draw) | {"n": draw.choice((2, 3))},
    "several-logprobs": lambda draw: _seeded(draw) | {"n": 2, "logprobs": 2},
    "json": lambda draw: (
        _any_sampling(draw)
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": _SCHEMA},
            }
        }
    ),
    "regex": lambda draw: (
        _any_sampling(draw) | {"structured_outputs": {"regex": r"[a-z]{3,9}( [a-z]{2,6}){2,4}\."}}
    ),
    "choice": lambda draw: (
        _any_sampling(draw)
        | {"structured_outputs": {"choice": ["yes, always", "yes, sometimes", "never"]}}
    ),
    "logit-bias": lambda draw: (
        _any_sampling(draw)
        | {
            "logit_bias": {
                str(token): draw.uniform(-5, 8) for token in draw.sample(range(3, 4096), 6)
            }
        }
    ),
    "bad-words": lambda draw: _any_sampling(draw) | {"bad_words": ["the", "and the", "is a", "of"]},
    "allowed-ids": lambda draw: (
        _any_sampling(draw) | {"allowed_token_ids": sorted(draw.sample(range(3, 4096), 60))}
    ),
}


def pool(encode: Callable[[str], list[int]], size: int, seed: int) -> list[Case]:
    """``size`` requests; the same ones for the same seed and tokenizer.

    Prompts are short, long, of one token, or begin like others and part inside a block of the KV
    cache. Some answers end exactly at ``MODEL_LEN``; every 25th request is refused by vLLM.

    Args:
        encode: text to token ids.
        size: at least 25 to have all of that.
        seed: of the draw.
    """
    draw = random.Random(seed)
    shared = encode(f"{_STORY} {_STORY}")
    cases = []
    for number in range(size):
        feature = list(_FEATURES)[number % len(_FEATURES)]
        body = _FEATURES[feature](draw) | {"ignore_eos": draw.random() < 0.8}
        body["prompt"] = _prompt(draw, encode, shared)
        lengths = draw.randint(1, 4), draw.randint(5, 40), draw.randint(20, 96), _LONGEST_ANSWER
        body["max_tokens"] = max(draw.choice(lengths), body.get("min_tokens", 0))
        if number % 25 == 0:
            why, body = _refused(draw, encode)
            feature = f"refused-{why}"
        elif number % 5 == 0:
            feature += "-to-the-end"
            body |= {"max_tokens": MODEL_LEN - len(body["prompt"]), "ignore_eos": True}
        cases.append(Case(f"{number}-{feature}", json.loads(json.dumps(body))))
    return cases


def _prompt(
    draw: random.Random, encode: Callable[[str], list[int]], shared: list[int]
) -> list[int]:
    kind = draw.random()
    if kind < 0.1:
        return [draw.randrange(3, 4096)]
    if kind < 0.5:  # blocks hold 32 positions
        cut = draw.choice((33, 45, 70, 77, 95, 97, 110))
        return shared[:cut] + draw.sample(range(3, 4096), draw.randint(1, 9))
    if kind < 0.6:
        return (shared + encode(draw.choice(_PROMPTS)))[: MODEL_LEN - 40]
    return encode(draw.choice(_PROMPTS))


def _refused(draw: random.Random, encode: Callable[[str], list[int]]) -> tuple[str, dict[str, Any]]:
    """A request that vLLM answers by an error."""
    good = {"prompt": encode(_PROMPTS[0]), "max_tokens": 4, "temperature": 0.0}
    return draw.choice(
        (
            ("empty-prompt", good | {"prompt": []}),
            ("too-long", good | {"prompt": [5] * (MODEL_LEN + 1)}),
            ("too-many-tokens", good | {"max_tokens": MODEL_LEN}),
            ("bad-penalty", good | {"presence_penalty": 3.0}),
            ("bad-top-p", good | {"top_p": 0.0}),
        )
    )
