"""The audit of differing answers: what rounding explains is counted, what it cannot is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_subspec.tools.audit import audit, first_difference

PROMPT = [3, 1, 4]
TOKENS = st.lists(st.integers(0, 2), max_size=6)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Random, but after PROMPT the best token has a twin that scores nearly the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(40)
        best = int(logits_after(made, PROMPT).argmax())
        made.lm_head.weight[twin_of(best)] = made.lm_head.weight[best] * (1 - 1e-3)
    return made


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    return path


@torch.inference_mode()
def logits_after(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1]


def twin_of(token: int) -> int:
    return (token + 1) % 32


def greedy(model: LlamaForCausalLM, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(logits_after(model, tokens).argmax()))
    return tokens[len(prompt) :]


def test_equal_answers_need_no_model(tmp_path: Path) -> None:
    assert audit(tmp_path / "none", [PROMPT, PROMPT], [[1, 2], [3]], [[1, 2], [3]]) == []


def test_wrong_token_is_flagged(model: LlamaForCausalLM, folder: Path) -> None:
    expected = greedy(model, PROMPT, 6)
    logits = logits_after(model, PROMPT + expected[:4])
    wrong = int(logits.argmin())
    # What follows the wrong token is no difference of its own.
    [divergence] = audit(folder, [PROMPT], [expected], [[*expected[:4], wrong, 0]])
    assert (divergence.prompt, divergence.position) == (0, 4)
    assert (divergence.expected, divergence.found) == (expected[4], wrong)
    assert divergence.gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-4)
    assert divergence.tolerance == pytest.approx(6 / 256 * float(logits.abs().max()), rel=1e-4)
    assert not divergence.is_near_tie


def test_near_tie_is_counted_on_whichever_side_it_stands(
    model: LlamaForCausalLM, folder: Path
) -> None:
    [best] = greedy(model, PROMPT, 1)
    twin = twin_of(best)
    sides = audit(folder, [PROMPT, PROMPT], [[best], [twin]], [[twin], [best]])
    assert [d.is_near_tie for d in sides] == [True, True]
    assert [(d.expected, d.found) for d in sides] == [(best, twin), (twin, best)]
    assert 0 < sides[0].gap == sides[1].gap < 0.1


def test_tie_of_two_bad_tokens_is_no_near_tie(model: LlamaForCausalLM, folder: Path) -> None:
    worst = logits_after(model, PROMPT).topk(2, largest=False).indices.tolist()
    [divergence] = audit(folder, [PROMPT], [worst[:1]], [worst[1:]])
    assert not divergence.is_near_tie


@pytest.mark.parametrize("which", ["expected", "found"])
def test_early_end_is_wrong_whatever_the_logits(
    model: LlamaForCausalLM, folder: Path, which: str
) -> None:
    answers = {"expected": [8, 8, 8], "found": [8, 8, 8]}
    answers[which] = [8, 8]
    [divergence] = audit(folder, [PROMPT], [answers["expected"]], [answers["found"]])
    assert divergence.position == 2
    assert getattr(divergence, which) is None
    assert divergence.gap == float("inf")
    assert not divergence.is_near_tie


@given(expected=TOKENS, found=TOKENS)
@settings(deadline=None, max_examples=200)
def test_first_difference(expected: list[int], found: list[int]) -> None:
    longest = max(len(expected), len(found))
    differing = [i for i in range(longest) if expected[i : i + 1] != found[i : i + 1]]
    assert first_difference(expected, found) == (differing[0] if differing else None)
