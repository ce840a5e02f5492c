"""Drafting while weights stream (post-speculation), live depth, and stepping aside: the tokens
stay plain vLLM's.

The link is throttled, so that a pass waits for its weights and steps really overlap. The pool is
small, so that preemption strikes while a tree grows.
"""

from __future__ import annotations

import logging
from random import Random
from types import SimpleNamespace

import pytest

from vllm_subspec.draft.tuning import NOTHING, DepthTuner

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
        cut = drafter.pacing.tuner.next_cut(1)
        assert 0 <= cut.depth <= drafter.policy.most_depth
        assert cut == NOTHING or cut.price > 0
        assert engine.statistics()["stopped_drafts"] > 0
        assert engine.statistics()["followed_drafts"] > 0
    else:
        assert drafter.pacing.tuner is None
        assert engine.statistics()["stopped_drafts"] == 0
        assert engine.statistics()["fallback_stepped_aside"] == 0


class Told(DepthTuner):
    """Live acceptance, and seconds as the test has them."""

    step_s, pass_s = 0.0, 1.0

    @property
    def pass_floor_s(self):
        return self.pass_s

    @pass_floor_s.setter
    def pass_floor_s(self, value):
        """The real link's."""

    def observe_draft(self, sequences, steps, seconds):
        super().observe_draft(sequences, steps, steps * self.step_s)

    def observe_prompts(self, rows, seconds):
        super().observe_prompts(rows, self.pass_s)

    def observe_pass(self, rows, seconds, hidden_steps, outcomes):
        super().observe_pass(rows, self.pass_s, hidden_steps, outcomes)


@pytest.fixture
def logged(monkeypatch):
    """What SubSpec says at level INFO."""
    lines = []
    logger = logging.getLogger("vllm.subspec")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    return lines


@pytest.fixture
def told(engine, logged, monkeypatch):
    """The tuner of the engine at hand, fresh; ``None`` where the depth is fixed."""
    drafter = engine.runner.speculation.drafter
    monkeypatch.setattr("vllm_subspec.integration.drafter.DepthTuner", Told)
    monkeypatch.setattr(drafter, "_pacings", {})
    drafter.set_policy(drafter.policy)
    return drafter.pacing.tuner


def test_stepping_aside_and_coming_back(engine, cases, expected, counted, told, logged):
    """Draft steps become too slow, and then fast again."""
    if told is None:
        return
    told.step_s = 100.0
    passes = counted("target_passes")
    assert engine.batch(cases["arrivals"]) == expected["arrivals"]
    assert told.is_aside
    undrafted = counted("fallback_stepped_aside")
    assert 0 < undrafted < counted("target_passes") - passes
    assert engine.singly(cases["sampled"]) == expected["sampled"]
    assert counted("fallback_stepped_aside") > undrafted
    told.step_s, undrafted = 1e-3, counted("fallback_stepped_aside")
    assert engine.staggered(cases["crowd"], every=3) == expected["crowd"]
    assert not told.is_aside
    assert [line.split(":")[0] for line in logged] == [
        "SubSpec steps aside, since drafts are accepted too seldom for what they cost",
        "SubSpec drafts again",
    ]


def test_drafts_and_plain_passes_in_any_turn(engine, cases, expected, told, monkeypatch):
    """Whatever is decided, and while a tree grows in a pass: the tokens stay the same."""
    if told is None:
        return
    random = Random(0)
    monkeypatch.setattr(told, "_aside", SimpleNamespace(is_aside=False))
    told._aside.drafts = lambda drafting, plain: random.random() < 0.6
    for name in ("greedy", "sampled", "penalties"):
        assert engine.singly(cases[name]) == expected[name]
    for every in (1, 3):
        assert engine.staggered(cases["arrivals"], every) == expected["arrivals"]
    assert engine.statistics()["followed_drafts"] > 0
