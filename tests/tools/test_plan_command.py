"""The plan command on a model of zeros: sizes are all it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_subspec.errors import BudgetError, ConfigError, UnsupportedError
from vllm_subspec.plan import MachineFigures, Placement, Sensitivity
from vllm_subspec.tools import plan_command
from vllm_subspec.tools.cli import app
from vllm_subspec.tools.plan_command import Question, render

HIDDEN, LAYERS, VOCABULARY = 64, 6, 256
MACHINE = MachineFigures(1e8, 1e10, 1e11, 1e-5, 1e-5, 1e11)


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "shadow_format", lambda bits: None)
    monkeypatch.setattr(plan_command, "load_or_measure", lambda directory, dtype: MACHINE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "zeros"
    folder.mkdir()
    config = {
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_attention_heads": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {f"model.layers.{i}.mlp.weight": (16 * HIDDEN, HIDDEN) for i in range(LAYERS)}
    shapes |= {name: (VOCABULARY, HIDDEN) for name in ("embed.weight", "lm_head.weight")}
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(zeros, folder / "model.safetensors")
    return folder


def ask(model: Path, budget: str = "70%", **changes: Any) -> Question:
    known = {
        "context": 64,
        "sequences": 1,
        "options": "{}",
        "machine": None,
        "sensitivity": None,
    }
    return Question(model, budget, **(known | changes))


def test_table_and_json_of_the_command(model: Path, tmp_path: Path) -> None:
    told, machine = tmp_path / "plan.json", tmp_path / "machine.json"
    machine.write_text(json.dumps(MACHINE.to_json()))
    arguments = ["plan", str(model), "--budget", "900KB", "--context", "16"]
    result = CliRunner().invoke(
        app, [*arguments, "--machine", str(machine), "--json", str(told)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(told.read_text())
    placement = Placement.from_json(answer["placement"])
    assert placement.total_bytes <= answer["budget_bytes"] == 900_000
    assert answer["machine"] == MACHINE.to_json()
    assert not answer["sensitivity_is_measured"]
    assert f"| tau | {placement.prediction.tau:.2f} |" in result.output
    assert f"| together | {placement.total_bytes / 1e6:.1f} MB |" in result.output
    assert "bits by layer: " in result.output
    assert "Sensitivity of the layers: NOT MEASURED" in result.output


def test_context_and_sequences_take_their_kv(model: Path) -> None:
    def kv(**changes: Any) -> int:
        memory = ask(model, "5MB", **changes).answer().placement.memory
        return next(item.bytes for item in memory if item.name == "KV cache")

    assert kv() == 64 * 2 * HIDDEN * LAYERS * 2
    assert kv(context=128, sequences=3) == 6 * kv()


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"resident_layers": 2}, "streamed", (0, 1, 2, 3)),
        ({"bits": 6}, "bits", {6, None}),
        ({"slots": 3, "resident_layers": 2}, "num_slots", 3),
        ({"speculate": False}, "tree", None),
    ],
)
def test_options_win(options: dict[str, Any], name: str, value: Any, model: Path) -> None:
    placement = ask(model, "5MB", options=json.dumps(options)).answer().placement
    found = getattr(placement, name)
    assert set(found) <= value if isinstance(value, set) else found == value


def test_the_tree_of_options(model: Path) -> None:
    options = json.dumps({"width": 2, "depth": 5, "max_nodes": 7})
    tree = ask(model, "5MB", options=options).answer().placement.tree
    assert tree is not None
    assert (tree.width, tree.depth, tree.max_nodes) == (2, 5, 7)


def test_an_emulated_link_is_planned_for(model: Path) -> None:
    for speed, planned in ((1e6, 1e6), (1e12, 1e8)):  # never faster than the machine's own
        options = json.dumps({"emulate_link": speed})
        assert ask(model, "5MB", options=options).answer().machine.link_bytes_per_s == planned


def test_bits_without_a_kernel_are_not_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only(bits: int) -> None:
        if bits == 6:
            raise UnsupportedError("bits 6 needs the native kernel")

    monkeypatch.setattr(plan_command, "shadow_format", only)
    assert plan_command.available_bits() == (4, 8)
    assert 6 not in ask(model, "900KB", context=16).answer().placement.bits


def test_a_measured_sensitivity_is_used(model: Path, tmp_path: Path) -> None:
    flat = Sensitivity({bits: (0.5,) * (LAYERS + 1) for bits in (4, 6, 8)})
    file = tmp_path / "sensitivity.json"
    file.write_text(json.dumps(flat.to_json()))
    poor = ask(model, "5MB", sensitivity=file, options='{"resident_layers": 0}').answer()
    good = ask(model, "5MB", options='{"resident_layers": 0}').answer()
    assert poor.sensitivity_is_measured
    assert poor.placement.prediction.tau < good.placement.prediction.tau
    assert "layers: measured" in render(poor)


def test_what_is_refused(model: Path, tmp_path: Path) -> None:
    for changes, part in (
        ({"options": "{"}, "is no JSON"),
        ({"options": "[1]"}, "no JSON object"),
        ({"options": '{"memory_budget": 1}'}, "leave memory_budget out"),
        ({"options": '{"bitz": 4}'}, "unknown option 'bitz'"),
        ({"machine": tmp_path / "none.json"}, "cannot be read as JSON"),
    ):
        with pytest.raises(ConfigError, match=part):
            ask(model, **changes).answer()
    with pytest.raises(ConfigError, match=r"config\.json"):
        ask(tmp_path).answer()
    with pytest.raises(BudgetError, match="the smallest that works here is"):
        ask(model, "10KB").answer()
