"""Greedy tokens equal plain vLLM's, whatever the draft's shape and wherever the weights rest."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

# 8 bits agree with the target so often that paths are deep, 4 bits so rarely that most end soon.
SETTINGS = {
    "tree-4x12-disk": {"width": 4, "depth": 12, "bits": 8, "stream": "disk"},
    "tree-4x12-4-bits": {"width": 4, "depth": 12, "bits": 4, "stream": "off"},
    "tree-4x12-6-bits": {"width": 4, "depth": 12, "bits": 6, "stream": "disk"},
    "chain-16": {"width": 1, "depth": 16, "bits": 8, "stream": "off"},
    "chain-16-4-bits-disk": {"width": 1, "depth": 16, "bits": 4, "stream": "disk"},
    "tree-2x6-1-resident": {
        "width": 2,
        "depth": 6,
        "bits": 8,
        "resident_layers": 1,
        "slots": 2,
        "stream": "disk",
    },
    "tree-3x5-1-slot": {"width": 3, "depth": 5, "bits": 8, "slots": 1, "stream": "disk"},
    "best-20-of-6x8": {"width": 6, "depth": 8, "max_nodes": 20, "bits": 8, "stream": "off"},
    "160-nodes": {"width": 8, "depth": 20, "bits": 8, "stream": "off"},
    "streaming-only": {"speculate": False, "stream": "disk"},
}
WHOLE = {"max_tokens": 64}
SOME = {"max_tokens": 24}


def follow_ups(story: str, told: tuple[int, ...], tokenizer) -> list[tuple[list[int], dict]]:
    """Prompts that share blocks with ``story`` and what it was continued with."""
    ids = tokenizer.encode(story)
    return [
        (ids, SOME),
        ([*ids, *told, *tokenizer.encode(" And then")], SOME),
        ([*ids, *told[:20]], SOME),
        ([*ids[:50], *tokenizer.encode(" Why?")], SOME),  # the common part ends inside a block
    ]


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, prompts):
    """Plain vLLM's answers: to all prompts, and to follow-ups of the story."""
    with open_engine(lively_model_dir) as plain:
        answers = plain.batch([(prompt, WHOLE) for prompt in prompts])
        follow = follow_ups(prompts[3], answers[3].tokens, plain.llm.get_tokenizer())
        return answers, follow, plain.batch(follow)


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def engine(request, open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, request.param) as engine:
        yield engine


def test_eight_requests_that_arrive_one_by_one(engine, prompts, expected):
    assert engine.staggered([(prompt, WHOLE) for prompt in prompts]) == expected[0]


def test_requests_alone(request, engine, prompts, expected):
    number = 8 if request.node.callspec.id in ("tree-4x12-disk", "chain-16") else 2
    requests = [(prompt, WHOLE) for prompt in prompts[-number:]]
    assert engine.singly(requests) == expected[0][-number:]


def test_prefix_cache_hits(engine, prompts, expected):
    told, follow, answers = expected
    engine.llm.reset_prefix_cache()
    assert engine.batch([(prompts[3], WHOLE)]) == [told[3]]
    found = engine.batch(follow)
    assert found == answers
    hits = [answer.num_cached_tokens for answer in found]
    whole_blocks = [len(ids) // 32 * 32 for ids, _ in follow]
    assert [hits[0], hits[2], hits[3]] == [whole_blocks[0], whole_blocks[2], 32]
    assert hits[1] > whole_blocks[2] > whole_blocks[0]  # blocks that accepted nodes were moved to


def test_statistics_tell_what_ran(engine, prompts):
    config = engine.runner.subspec_config
    before = engine.statistics()
    engine.batch([(prompts[0], SOME)])
    delta = {
        name: value - before[name]
        for name, value in engine.statistics().items()
        if isinstance(value, int | float)
    }
    if config.speculate:
        assert delta["committed_tokens"] == SOME["max_tokens"] - 1  # the first is the prompt's
        assert delta["committed_tokens"] > delta["target_passes"]
        assert 0 < delta["drafted_nodes"] <= config.node_count * delta["target_passes"]
    else:
        assert delta["drafted_nodes"] == delta["draft_steps"] == 0
    assert (delta.get("stream_bytes_read", 0) > 0) == (config.stream == "disk")
