"""A model that fits is served faster without SubSpec: the log says so at the start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.engine

MIB = 1 << 20


def config_of(tied: bool, kv_bytes: int | None = 4 * MIB, ranks: int = 1) -> SimpleNamespace:
    """64 x 256 tables of float32, and layers beside them: 64 KiB each."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_bytes),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        model_config=SimpleNamespace(
            model="nowhere",
            dtype=torch.float32,
            max_model_len=128,
            hf_text_config=SimpleNamespace(tie_word_embeddings=tied),
            get_vocab_size=lambda: 64,
            get_hidden_size=lambda: 256,
            get_num_kv_heads=lambda parallel: 4,
            get_head_size=lambda: 64,
            get_num_layers=lambda parallel: 16,
        ),
    )


LAYERS = [nn.Linear(128, 128, bias=False) for _ in range(16)]
WEIGHTS = {"tied": 17 << 16, "untied": 18 << 16}


@pytest.fixture
def place(monkeypatch):
    """``place(options, is_tied, memory, kv_bytes)`` -> (placement, warnings)."""
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration import placing
    from vllm_subspec.plan.machine import DEFAULT

    def place(options, is_tied, memory, kv_bytes=4 * MIB):
        lines = []
        warn = lambda text, *args, scope: lines.append(text % args)  # noqa: E731
        monkeypatch.setattr(placing.logger, "warning_once", warn)
        monkeypatch.setattr(placing, "load_or_measure", lambda directory, dtype: DEFAULT)
        linears = [{"linear": layer} for layer in LAYERS]
        config = SubSpecConfig(**options)
        vllm_config = config_of(is_tied, kv_bytes)
        return placing.place_model(config, vllm_config, LAYERS, linears, memory), lines

    return place


@pytest.mark.parametrize("tied", ["tied", "untied"])
@pytest.mark.parametrize("speculate", [True, False])
def test_by_a_budget(place, tied, speculate):
    needed = WEIGHTS[tied] + 4 * MIB
    options = {"speculate": speculate}
    enough = options | {"memory_budget": 2 * needed}
    placement, (warning,) = place(enough, tied == "tied", 1 << 40)
    assert "nothing to gain" in warning
    assert f"memory_budget={2 * needed}" in warning
    assert len(placement.streamed) == 1, "SubSpec streams one layer at least"
    _, warnings = place(options | {"memory_budget": needed - 1}, tied == "tied", 1 << 40)
    assert warnings == []


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_by_the_memory_where_there_is_no_budget(place, tied):
    """What "auto" would take of it: the rest is for everything else."""
    needed = WEIGHTS[tied] + 4 * MIB
    _, (warning,) = place({}, tied == "tied", int(needed / 0.7) + 8)
    assert "memory_budget='auto'" in warning
    assert place({}, tied == "tied", int(needed / 0.7) - 8)[1] == []


def test_one_sequence_where_the_kv_cache_has_no_size_yet(place):
    """128 tokens of 2 * 4 * 64 values in 16 layers."""
    needed = WEIGHTS["tied"] + 4 * MIB
    assert len(place({}, True, int(needed / 0.7) + 8, None)[1]) == 1
    assert place({}, True, int(needed / 0.7) - 8, None)[1] == []


def test_not_where_nothing_is_streamed(place):
    assert place({"stream": "off"}, True, 1 << 40)[1] == []
