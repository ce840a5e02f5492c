"""Two ranks share each layer: each streams its own half within its own budget, and the tokens stay
plain vLLM's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.engine

BUDGET = 11 << 20  # of a rank, whose half of the model takes 14 MiB
RANKS = {"tensor_parallel_size": 2, "max_model_len": 320, "kv_cache_memory_bytes": 2 << 20}


@pytest.fixture(scope="module")
def requests(prompts):
    seeded = {"temperature": 0.9, "top_k": 50, "seed": 2}
    return [
        *[(prompt, {"max_tokens": 24}) for prompt in prompts[1:4]],
        (prompts[4], {"max_tokens": 24} | seeded),
    ]


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, requests):
    """Plain vLLM's answers, of one rank."""
    with open_engine(lively_model_dir) as plain:
        return plain.batch(requests)


@pytest.fixture(scope="module")
def engine(open_engine, lively_model_dir, expected) -> Iterator:
    with pytest.MonkeyPatch.context() as patch:
        # The ranks take this process's cores as they are, be it one.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        options = {"memory_budget": BUDGET, "width": 3, "depth": 6}
        with open_engine(lively_model_dir, options, **RANKS) as engine:
            yield engine


def test_all_at_once(engine, requests, expected):
    assert engine.batch(requests) == expected


def test_one_by_one(engine, requests, expected):
    assert engine.singly(requests[-2:]) == expected[-2:]


def test_both_ranks_stream_within_their_budgets(engine):
    placements = engine.llm.collective_rpc("subspec_placement")
    assert len(placements) == 2
    assert placements[0] == placements[1]
    for placement in placements:
        assert placement["streamed"]
        assert 0 < sum(item["bytes"] for item in placement["memory"]) <= BUDGET


def test_both_ranks_counted_the_same_passes(engine, requests):
    """Ranks that disagreed about one tree would hang, or count otherwise."""
    counts = engine.llm.collective_rpc("subspec_statistics")
    same = ("target_passes", "committed_tokens", "drafted_nodes", "draft_steps")
    assert len(counts) == 2
    assert [counts[0][name] for name in same] == [counts[1][name] for name in same]
    assert counts[0]["committed_tokens"] > counts[0]["target_passes"] > 0
    assert all(count["stream_bytes_read"] > 0 for count in counts)
