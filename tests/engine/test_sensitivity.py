"""Measured sensitivity, against a model whose weights are replaced one unit at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_subspec.shadow import ShadowSettings
from vllm_subspec.shadow.linear import quantize_linear

pytestmark = pytest.mark.engine

# One class for both: vLLM gives the worker class of a process one extension for good.
EXTENSION = "vllm_subspec.integration.calibration.CalibrationExtension"
SUBSPEC = {"width": 2, "depth": 6, "stream": "off", "bits": 8, "quantizer": "rtn"}


def sequences(prompts: tuple[str, ...], engine: Any) -> list[tuple[list[int], int]]:
    tokenizer = engine.llm.get_tokenizer()
    told = [tokenizer.encode(prompt) for prompt in (prompts[0], prompts[4])]
    answers = engine.batch([(tokens, {"max_tokens": 12}) for tokens in told])
    return [
        ([*tokens, *answer.tokens], len(tokens))
        for tokens, answer in zip(told, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def measured(
    open_engine: Any, subspec_cache: Path, lively_model_dir: Path, prompts: tuple[str, ...]
) -> dict[str, Any]:
    """What an engine measured, and what it drafted before and after."""
    with open_engine(lively_model_dir, SUBSPEC, worker_extension_cls=EXTENSION) as engine:

        def drafts() -> tuple[Any, list[int]]:
            before = engine.statistics()
            answers = engine.batch([(prompt, {"max_tokens": 24}) for prompt in prompts[:3]])
            after = engine.statistics()
            names = ("target_passes", "committed_tokens", "draft_steps")
            return answers, [after[name] - before[name] for name in names]

        written = sequences(prompts, engine)
        drafts()  # fills the prefix cache: answers say how much of a prompt it held
        before = drafts()
        cached = set((subspec_cache / "shadows").iterdir())
        found = engine.llm.collective_rpc("subspec_sensitivity", args=(written, (4, 8)))
        made = set((subspec_cache / "shadows").iterdir()) - cached
        return {
            "written": written,
            "kl": found[0],
            "made": made,
            "before": before,
            "after": drafts(),
        }


def reference(model: Any, written: Any, perturb: Callable[[], None]) -> float:
    """Mean KL with the context's keys and values computed before ``perturb``."""
    contexts, targets = [], []
    for tokens, num_prompt in written:
        for end in range(num_prompt - 1, len(tokens)):
            ids = torch.tensor([tokens])
            contexts.append((model(ids[:, :end]).past_key_values, ids[:, end : end + 1]))
            targets.append(model(ids[:, : end + 1]).logits[0, -1].log_softmax(-1))
    perturb()
    total = 0.0
    for (cache, token), target in zip(contexts, targets, strict=True):
        draft = model(token, past_key_values=cache).logits[0, -1].log_softmax(-1)
        total += float((target.exp() * (target - draft)).sum())
    return total / len(targets)


def low_bit(*linears: torch.nn.Module) -> None:
    for linear in linears:
        settings = ShadowSettings(4, 64, "rtn")
        shadow = quantize_linear(linear.weight.data, settings, torch.bfloat16, "linear")
        linear.weight.data = shadow.dequantize()


@pytest.mark.parametrize("unit", [0, 3, "head"])
@torch.inference_mode()
def test_each_unit_alone(unit: int | str, measured: dict[str, Any], lively_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lively_model_dir, dtype=torch.float32)

    def perturb() -> None:
        if unit == "head":
            low_bit(model.lm_head)
        else:
            layer = model.model.layers[unit]
            low_bit(*(m for m in layer.modules() if isinstance(m, torch.nn.Linear)))

    expected = reference(model, measured["written"], perturb)
    found = measured["kl"][0][-1 if unit == "head" else unit]
    # The kernel rounds activations to 8 bits, which the reference does not.
    assert found == pytest.approx(expected, rel=0.1)


def test_more_bits_lose_less(measured: dict[str, Any]) -> None:
    by_bits = measured["kl"]
    assert [len(values) for values in by_bits] == [5, 5]
    for low, high in zip(*by_bits, strict=True):
        assert 0 < high < low / 20


def test_the_engine_drafts_on_as_before(measured: dict[str, Any]) -> None:
    assert measured["after"] == measured["before"]


def test_shadows_are_those_that_serving_caches(measured: dict[str, Any]) -> None:
    # Those of 8 bits were there, whatever vLLM made of the weights since.
    assert len(measured["made"]) <= 5
