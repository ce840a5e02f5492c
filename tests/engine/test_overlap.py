"""Drafting while weights stream (post-speculation), and live depth: the tokens stay plain vLLM's.

The link is throttled, so that a pass waits for its weights and steps really overlap. The pool is
small, so that preemption strikes while a tree grows.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

SLOW = {"bits": 8, "stream": "disk", "slots": 2, "emulate_link": 3e8}  # 30 ms a pass
SETTINGS = {
    "tree-3x4": SLOW | {"width": 3, "depth": 4},
    "chain-6": SLOW | {"width": 1, "depth": 6},
    "tuned-6-bits": SLOW | {"width": 2, "bits": 6, "max_nodes": 24},
    "off": SLOW | {"width": 3, "depth": 4, "post_speculation": False},
}
ROOM = {"num_gpu_blocks_override": 12, "max_model_len": 320}
SAMPLED = {"temperature": 0.9, "top_k": 50, "seed": 5}  # what is flatter is hardly followed
PENALTIES = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "seed": 6,
}


@pytest.fixture(scope="module")
def cases(prompts):
    """Requests by name."""
    return {
        "greedy": [(prompts[0], {"max_tokens": 90}), (prompts[3], {"max_tokens": 50})],
        "sampled": [(prompts[2], {"max_tokens": 50} | SAMPLED)],
        "penalties": [
            (prompts[7], {"max_tokens": 50} | PENALTIES),
            (prompts[5], {"max_tokens": 40, "repetition_penalty": 1.3, "min_tokens": 9}),
        ],
        "arrivals": [
            (prompts[1], {"max_tokens": 60}),
            (prompts[4], {"max_tokens": 9} | SAMPLED),
            (prompts[6], {"max_tokens": 70}),
            (prompts[0], {"max_tokens": 60} | PENALTIES),
        ],
        "crowd": [
            (f"{prompts[3]} {prompt}", {"max_tokens": 110 + 20 * at} | params)
            for at, (prompt, params) in enumerate(
                zip(prompts[:3], ({}, SAMPLED, PENALTIES), strict=True)
            )
        ],
    }


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, cases):
    with open_engine(lively_model_dir) as plain:
        return {name: plain.batch(requests) for name, requests in cases.items()}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def engine(request, open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, request.param, **ROOM) as engine:
        yield engine


@pytest.fixture
def counted(engine):
    """``counted()``: what the drafter did since the test began."""
    before = engine.statistics()

    def counted(name: str) -> int:
        return engine.statistics()[name] - before[name]

    return counted


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties"])
def test_alone(engine, cases, expected, counted, name):
    assert engine.singly(cases[name]) == expected[name]
    config = engine.runner.subspec_config
    assert (counted("overlapped_draft_steps") > 0) == config.post_speculation
    if config.depth is not None:  # a tree that is not tuned yet may be too deep to be passed
        assert (counted("followed_drafts") > 0) == config.post_speculation
    assert counted("started_drafts") > 0


def test_requests_that_arrive_while_one_is_alone(engine, cases, expected):
    """A tree that was grown for one alone is of no use among several, and none the other way."""
    for every in (1, 2, 5):
        assert engine.staggered(cases["arrivals"], every) == expected["arrivals"]


def test_preemption(engine, cases, expected):
    before = engine.num_preemptions
    assert engine.staggered(cases["crowd"], every=3) == expected["crowd"]
    assert engine.num_preemptions > before


@pytest.mark.parametrize("num_steps", [2, 4])
def test_abort_in_the_middle(engine, cases, expected, num_steps):
    """The next request, the same prompt even, finds nothing of what was grown for the last."""
    (given_up,) = engine.add([(cases["greedy"][0][0], {"max_tokens": 200} | SAMPLED)])
    for _ in range(num_steps):
        assert engine.step() == []
    engine.llm.llm_engine.abort_request([given_up])
    engine.add(cases["greedy"])
    (given_up,) = engine.add(cases["arrivals"][2:3])
    for _ in range(num_steps):
        engine.step()
    engine.llm.llm_engine.abort_request([given_up])
    assert engine.finish() == expected["greedy"]


def test_only_an_open_depth_is_tuned(engine):
    """After all that was served above."""
    config, drafter = engine.runner.subspec_config, engine.runner.speculation.drafter
    if config.depth is None:
        assert 1 <= drafter.depth <= drafter.policy.most_depth
        assert drafter.depth != drafter.policy.shape.depth
        assert engine.statistics()["followed_drafts"] > 0
    else:
        assert drafter.depth == config.depth
