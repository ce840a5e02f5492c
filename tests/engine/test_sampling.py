"""Seeded requests yield plain vLLM's tokens: the draft never shows in what is drawn."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

SEEDS = range(20)
SAMPLING = {
    "temperature": {"temperature": 0.9},
    "top-k-and-top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties-and-min-p": {
        "temperature": 1.0,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
}
SETTINGS = {
    "tree-4x12-disk": {"width": 4, "depth": 12, "bits": 8, "stream": "disk"},
    "chain-16-4-bits": {"width": 1, "depth": 16, "bits": 4, "stream": "off"},
    "tree-3x8-uncoupled": {
        "width": 3,
        "depth": 8,
        "bits": 8,
        "stream": "off",
        "noise_coupling": False,
    },
}
TOKENS = {"max_tokens": 24}


@pytest.fixture(scope="module")
def cases(prompts):
    """Per sampling setting one request a seed, the prompts in turn."""
    return {
        name: [(prompts[seed % 8], TOKENS | params | {"seed": seed}) for seed in SEEDS]
        for name, params in SAMPLING.items()
    }


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, cases):
    with open_engine(lively_model_dir, max_num_seqs=20) as plain:
        return {name: plain.batch(requests) for name, requests in cases.items()}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def engine(request, open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, request.param, max_num_seqs=20) as engine:
        yield engine


@pytest.mark.parametrize("name", SAMPLING)
def test_twenty_seeds(engine, cases, expected, name):
    assert engine.batch(cases[name]) == expected[name]


@pytest.mark.parametrize("name", SAMPLING)
def test_alone(engine, cases, expected, name):
    assert engine.singly(cases[name][3:5]) == expected[name][3:5]


def test_among_greedy_and_unseeded_requests(engine, cases, expected, prompts):
    """Neighbours that draw, or draw nothing, leave a seeded request's generator alone."""
    seeded = [cases[name][seed] for seed in range(5, 8) for name in SAMPLING]
    wanted = [expected[name][seed] for seed in range(5, 8) for name in SAMPLING]
    unseeded = [(prompt, TOKENS | {"temperature": 1.0}) for prompt in prompts[:5]]
    greedy = [(prompt, TOKENS) for prompt in prompts[3:7]]
    others = [*unseeded, *greedy]
    mixed = [request for pair in zip(seeded, others, strict=True) for request in pair]
    answers = engine.staggered(mixed)
    assert answers[::2] == wanted
    assert all(len(answer.tokens) == TOKENS["max_tokens"] for answer in answers)
    assert engine.batch(greedy) == answers[11::2]


def test_unseeded_requests_differ_from_one_another(engine, prompts):
    requests = [(prompts[0], TOKENS | {"temperature": 1.0})] * 6
    assert len({answer.tokens for answer in engine.batch(requests)}) == 6


def test_several_completions_of_one_seed(engine, expected, cases):
    prompt, params = cases["temperature"][0]
    first, second = engine.batch([(prompt, params | {"n": 2})])
    assert first == expected["temperature"][0]
    assert second.tokens != first.tokens
