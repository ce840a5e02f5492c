"""What each mode asks of vLLM, and what is refused before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import BudgetError, ConfigError, DependencyError
from vllm_subspec.plan.machine import DEFAULT
from vllm_subspec.tools import bench_modes
from vllm_subspec.tools.bench_command import parse_temperatures, read_prompts
from vllm_subspec.tools.bench_modes import (
    GROUPS,
    MODES,
    Workload,
    best_batch,
    check_options,
    engine_arguments,
    parse_modes,
)

HIDDEN, LAYERS, VOCABULARY = 8, 2, 32


def write_model(folder: Path) -> Path:
    """A model of two layers with one linear each; its KV cache takes 64 bytes a token."""
    folder.mkdir()
    config = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_attention_heads": 2,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layers = {f"model.layers.{i}.mlp.weight": torch.zeros(4, HIDDEN) for i in range(LAYERS)}
    table = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN)}
    tensors = {name: tensor.bfloat16() for name, tensor in (layers | table).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Workload:
    model, draft = write_model(tmp_path / "model"), write_model(tmp_path / "draft")
    return Workload(model, 10**6, ("hello",), 16, options={"slots": 2}, draft_model=draft)


KV = 64 * 128 * 9  # 1024 positions in blocks of 128, and vLLM's own block


def test_plain_and_subspec_share_all_but_speculation(work: Workload) -> None:
    plain, subspec = (engine_arguments(MODES[name], work) for name in ("plain", "subspec"))
    common = {"method": "subspec", "memory_budget": 10**6, "slots": 2}
    assert plain.pop("speculative_config") == common | {"speculate": False}
    assert subspec.pop("speculative_config") == common
    assert plain == subspec
    assert plain["kv_cache_memory_bytes"] == KV
    assert (plain["max_num_seqs"], plain["enable_prefix_caching"]) == (1, False)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("chain", {"width": 1}),
        ("subspec-4bit", {"bits": 4}),
        ("no-post", {"post_speculation": False}),
        ("uniform", {"adaptive_depth": False}),
    ],
)
def test_variants_differ_by_one_option(name: str, option: dict[str, Any], work: Workload) -> None:
    found = engine_arguments(MODES[name], work)["speculative_config"]
    base = engine_arguments(MODES["subspec"], work)["speculative_config"]
    assert found == base | option


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_methods_of_vllm_run_over_our_stream(name: str, work: Workload) -> None:
    found = engine_arguments(MODES[name], work)
    assert found["speculative_config"]["method"] == name
    assert found["additional_config"] == {
        "subspec": {"memory_budget": 10**6, "slots": 2, "speculate": False}
    }


def test_a_draft_model_pays_for_itself_out_of_the_budget(work: Workload) -> None:
    found = engine_arguments(MODES["leviathan"], work)
    assert found["speculative_config"]["model"] == str(work.draft_model)
    assert found["kv_cache_memory_bytes"] == 2 * KV
    weights = 2 * (LAYERS * 4 * HIDDEN + VOCABULARY * HIDDEN)
    assert found["additional_config"]["subspec"]["memory_budget"] == 10**6 - weights - KV
    poor = Workload(work.model, KV, ("hello",), 16, draft_model=work.draft_model)
    with pytest.raises(BudgetError, match="leaves the target none"):
        engine_arguments(MODES["leviathan"], poor)


def test_vllm_alone_knows_nothing_of_us(work: Workload) -> None:
    found = engine_arguments(MODES["vllm"], work)
    assert not {"speculative_config", "additional_config"} & found.keys()


def test_the_ladder_adds_one_piece_a_rung(work: Workload) -> None:
    rungs = [engine_arguments(MODES[name], work)["speculative_config"] for name in GROUPS["ladder"]]
    configs = []
    for options in rungs[1:]:
        del options["method"]
        configs.append(SubSpecConfig(**options).to_options())
    changes = [
        {name for name in after if before[name] != after[name]}
        for before, after in pairwise(configs)
    ]
    pieces = [
        "share_layers", "share_kv", "width", "draft_temperature", "noise_coupling",
        "post_speculation", "bits",
    ]  # fmt: skip
    assert changes[:-1] == [{piece} for piece in pieces]
    assert changes[-1] == {"width", "depth"}  # subspec itself: the plan's, tuned live
    assert configs[-1] == SubSpecConfig(memory_budget=10**6, slots=2).to_options()


def test_the_best_batch_is_where_computing_catches_up_with_the_link(work: Workload) -> None:
    # A pass streams what is not resident at 1 GB/s and computes 2 products a weight and row.
    fast, slow = (
        replace(work, budget_bytes=10**9, machine=replace(DEFAULT, target_flops_per_s=flops))
        for flops in (1e12, 1e4)
    )
    assert best_batch(fast) == 64
    assert best_batch(slow) == 1
    poor = replace(fast, budget_bytes=KV * 4)
    assert best_batch(poor) == 4  # the KV cache of 8 does not fit
    with pytest.raises(BudgetError):
        best_batch(replace(fast, budget_bytes=10))
    several = engine_arguments(MODES["flexgen"], fast, 2)
    assert several["max_num_seqs"] == 2
    assert several["kv_cache_memory_bytes"] == 64 * 128 * (2 * 8 + 1)


def test_temperatures() -> None:
    assert parse_temperatures("0,0.6") == (0.0, 0.6)
    for text in ("", "warm", "0,0", "-1", "nan"):
        with pytest.raises(ConfigError, match="--temperatures"):
            parse_temperatures(text)


def test_names_of_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [mode.name for mode in parse_modes("plain, subspec", None)] == ["plain", "subspec"]
    for text, part in (
        ("plain,eagle", "'eagle' is unknown; the modes are plain, subspec"),
        ("plain,plain", "names a mode twice"),
        ("plain,peers", "--draft-model"),
        ("", "'' is unknown"),
    ):
        with pytest.raises(ConfigError, match=part):
            parse_modes(text, None)
    both = parse_modes("ladder,peers", Path("draft"))
    assert len(both) == len({*GROUPS["ladder"], *GROUPS["peers"]})
    monkeypatch.setattr(bench_modes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="install arctic-inference"):
        parse_modes("plain,suffix", None)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"memory_budget": "1GiB"}, "leave memory_budget out"),
        ({"speculate": True}, "leave speculate out"),
        ({"stream": "off"}, "leave stream out"),
        ({"width": 4}, "leave width out of --options: mode 'chain'"),
        ({"widht": 4}, "unknown option 'widht'"),
    ],
)
def test_options_that_would_undo_a_mode(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        check_options(list(MODES.values()), options)
    check_options([MODES["plain"], MODES["subspec"]], {"emulate_link": 1e9})


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines, listed = tmp_path / "p.txt", tmp_path / "p.json"
    lines.write_text("one\n\n two \n")
    assert read_prompts(lines) == ("one", " two ")
    listed.write_text('["a\\nb", "c"]')
    assert read_prompts(listed) == ("a\nb", "c")
    for text, part in (("[1]", "list of strings"), ("{", "cannot be read"), ("[]", "no prompt")):
        listed.write_text(text)
        with pytest.raises(ConfigError, match=part):
            read_prompts(listed)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")
