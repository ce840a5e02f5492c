"""Parts of the calibration that need no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_subspec.integration import offline
from vllm_subspec.integration.sensitivity import _TargetAttention
from vllm_subspec.plan import Sensitivity
from vllm_subspec.tools import calibrate

HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 8, 7


def naive(q: Any, k: Any, v: Any, keys: Any, values: Any, visible: Any, cap: float) -> torch.Tensor:
    """Row by row: keys and values of the context, and the row's own."""
    out = torch.zeros(TOKENS, HEADS, DIM)
    for row in range(TOKENS):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            seen = [j for j in range(TOKENS) if visible[row, j]]
            key = torch.stack([k[row, group] if j == row else keys[j, group] for j in seen])
            value = torch.stack([v[row, group] if j == row else values[j, group] for j in seen])
            scores = key @ q[row, head] * 0.3
            if cap:
                scores = cap * torch.tanh(scores / cap)
            out[row, head] = scores.softmax(0) @ value
    return out.view(TOKENS, -1)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_attention_keeps_the_first_keys_and_values(cap: float) -> None:
    torch.manual_seed(0)
    impl = SimpleNamespace(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=DIM, scale=0.3, logits_soft_cap=cap
    )
    visible = torch.ones(TOKENS, TOKENS).tril().bool()
    visible[4:, :3] = False  # a second sequence, or a window
    attention = _TargetAttention(impl, visible)
    keys, values = (torch.randn(TOKENS, KV_HEADS, DIM) for _ in range(2))
    for own_keys, own_values in ((keys, values), (keys + 1, values - 1), (2 * keys, values)):
        query = torch.randn(TOKENS, HEADS, DIM)
        flat = [rows.reshape(TOKENS, -1) for rows in (query, own_keys, own_values)]
        expected = naive(query, own_keys, own_values, keys, values, visible, cap)
        torch.testing.assert_close(attention(*flat), expected)


class FakeLLM:
    """Writes two tokens per prompt; has two layers."""

    options: dict[str, Any]
    asked: tuple[Any, ...]

    def __init__(self, model: str, **options: Any) -> None:
        FakeLLM.options = options

    def chat(self, chats: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        done = SimpleNamespace(token_ids=[8, 9])
        return [SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[done]) for _ in chats]

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[list[list[float]]]:
        FakeLLM.asked = (method, *args)
        return [[[0.3, 0.4, 0.5], [0.03, 0.04, 0.05]]]


def test_what_the_model_wrote_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "LLM", FakeLLM)
    monkeypatch.setattr(calibrate, "available_bits", lambda: (4, 8))
    found = calibrate.measure_sensitivity(Path("model"), prompts=["a", "b"], new_tokens=2)
    assert found == Sensitivity({4: (0.3, 0.4, 0.5), 8: (0.03, 0.04, 0.05)})
    sequence = ([1, 2, 3, 8, 9], 3)
    assert FakeLLM.asked == ("subspec_sensitivity", [sequence, sequence], (4, 8))
    assert FakeLLM.options["speculative_config"]["stream"] == "off"


def test_table() -> None:
    lines = calibrate.render(Sensitivity({4: (0.3, 0.4, 0.5), 8: (0.03, 0.04, 0.05)})).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]] == [
        ["layer 0", "300.000", "30.000"],
        ["layer 1", "400.000", "40.000"],
        ["head", "500.000", "50.000"],
        ["all layers", "700.000", "70.000"],
    ]
