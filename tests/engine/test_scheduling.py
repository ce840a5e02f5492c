"""Chunked prompts and preemption: the tokens stay those of a roomy plain engine, seeded ones too.

Plain vLLM 0.32 itself dies on a CPU when the prompt of a seeded request is chunked.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

DRAFTS = {
    "tree": {"width": 4, "depth": 12, "bits": 8, "stream": "off"},
    "chain": {"width": 1, "depth": 16, "bits": 8, "stream": "disk"},
    "streaming-only": {"speculate": False, "stream": "disk"},
}
SMALL_STEPS = {"max_num_batched_tokens": 64}
SMALL_POOL = {"num_gpu_blocks_override": 11, "max_model_len": 320}
ROOMS = {
    "small-steps": SMALL_STEPS,
    "small-pool": SMALL_POOL,
    "small-steps-and-pool": SMALL_STEPS | SMALL_POOL,
}
CASES = [(draft, room) for draft in DRAFTS for room in ROOMS]


@pytest.fixture(scope="module")
def requests(prompts):
    """Short and long prompts, greedy and seeded in turn."""
    long = [f"{prompts[3]} {prompt}" for prompt in prompts]
    mixed = [prompts[0], long[0], long[1] + long[2], prompts[5], long[4] + long[5], prompts[6]]
    params = [
        {"max_tokens": 70},
        {"max_tokens": 50, "temperature": 0.9, "seed": 5},
        {"max_tokens": 40, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 6},
        {"max_tokens": 70, "temperature": 0.7, "min_p": 0.05, "seed": 7},
        {"max_tokens": 40},
        {"max_tokens": 60, "temperature": 0.9, "presence_penalty": 0.5, "seed": 8},
    ]
    return list(zip(mixed, params, strict=True))


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, requests):
    with open_engine(lively_model_dir) as plain:
        return plain.batch(requests)


@pytest.mark.parametrize(("draft", "room"), CASES)
def test_equal_in_little_room(open_engine, lively_model_dir, requests, expected, draft, room):
    with open_engine(lively_model_dir, DRAFTS[draft], **ROOMS[room]) as engine:
        assert engine.staggered(requests, every=2) == expected
        assert (engine.num_preemptions > 0) == ("pool" in room)
