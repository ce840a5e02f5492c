"""A memory budget too small for the model: layers and head stream, the table is mapped, the tokens
stay plain vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_subspec.plan.machine import DEFAULT

pytestmark = pytest.mark.engine

MIB = 1 << 20
# The draft is slow where it reads much: then even a tied head, whose table is kept for no more
# memory than its rows' cache, is better streamed and drafted by its shadow.
MACHINE = replace(DEFAULT, draft_bytes_per_s=3e8)
BUDGET = {"memory_budget": "20MiB"}
ROOM = {"kv_cache_memory_bytes": 8 * MIB, "max_model_len": 320, "max_num_seqs": 2}
SETTINGS = {
    "planned": {},
    "4-bits": {"bits": 4, "width": 3, "depth": 6},
    "streaming-only": {"speculate": False},
}
MODELS = ("lively_model_dir", "tied_model_dir")
CASES = [
    ("lively_model_dir", "planned"),
    ("lively_model_dir", "streaming-only"),
    ("tied_model_dir", "planned"),
    ("tied_model_dir", "4-bits"),
    ("tied_model_dir", "streaming-only"),
]


@pytest.fixture(scope="module")
def requests(prompts):
    seeded = {"temperature": 0.9, "top_k": 50, "seed": 2}
    params = [{"max_tokens": 40}, {"max_tokens": 30} | seeded]
    return [(prompt, params[at % 2]) for at, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(open_engine, requests, request):
    """Plain vLLM's answers by model."""
    answers = {}
    for model in MODELS:
        with open_engine(request.getfixturevalue(model)) as plain:
            answers[model] = plain.batch(requests)
    return answers


@pytest.fixture(scope="module", autouse=True)
def _planned_for_one_machine() -> Iterator[None]:
    """The placement is that of any machine the tests run on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "vllm_subspec.integration.placing.load_or_measure", lambda directory, dtype: MACHINE
        )
        yield


def file_below(address: int) -> str:
    """The file that is mapped at an address of this process; empty where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *path = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return "".join(path)
    raise AssertionError(f"nothing lies at {address:#x}")


@pytest.mark.parametrize(("model", "setting"), CASES)
def test_little_memory(request, open_engine, requests, expected, model, setting):
    directory = request.getfixturevalue(model)
    # Without shadows a tied head, resident, is its own table.
    all_streamed = (model, setting) != ("tied_model_dir", "streaming-only")
    with open_engine(directory, SETTINGS[setting] | BUDGET, **ROOM) as engine:
        placement = engine.placement()
        assert placement["head"] == ("streamed" if all_streamed else "resident")
        assert len(placement["streamed"]) > 0
        assert sum(item["bytes"] for item in placement["memory"]) <= 20 * MIB
        table = engine.runner.model.model.embed_tokens.weight
        assert file_below(table.data_ptr()).endswith(".spill") == all_streamed
        assert engine.batch(requests) == expected[model]
        assert engine.singly(requests[:2]) == expected[model][:2]
        statistics = engine.statistics()
    assert statistics["stream_bytes_read"] > statistics["streamed_bytes_per_pass"] > 0
    drafts = setting != "streaming-only"
    assert (statistics["drafted_nodes"] > 0) == drafts
    assert (placement["head_bits"] is not None) == drafts


@pytest.fixture
def forgotten_numba():
    """vLLM's n-gram method loads numba. The next engine of this process would fall over it: vLLM
    looks through every loaded module, and llvmlite's answers to any name."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("numba", "llvmlite")]:
        del sys.modules[name]


def test_ngram_over_the_stream(open_engine, lively_model_dir, requests, expected, forgotten_numba):
    """One of vLLM's own methods drafts; all that SubSpec does is stream."""
    options = {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        "additional_config": {"subspec": {"speculate": False} | BUDGET},
    }
    greedy = [(prompt, params) for prompt, params in requests if "seed" not in params]
    wanted = [answer for at, answer in enumerate(expected["lively_model_dir"]) if at % 2 == 0]
    with open_engine(lively_model_dir, None, **ROOM, **options) as engine:
        assert engine.placement()["head"] == "streamed"
        assert engine.batch(greedy) == wanted
        drafted = [m for m in engine.llm.get_metrics() if m.name.endswith("num_draft_tokens")]
        assert sum(metric.value for metric in drafted) > 0
        assert engine.statistics()["stream_bytes_read"] > 0
