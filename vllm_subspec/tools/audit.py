"""Which differences between two texts bfloat16's rounding explains, and which are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from vllm_subspec.verify.noise import gumbel_noise, peek_integers

BF16_UNIT_ROUNDOFF = 2.0**-8
"""Largest relative error of rounding to bfloat16's 8 significant bits."""

TOLERATED_ROUNDOFFS = 6.0
"""Widest gap, in unit roundoffs of the position's largest logit, that rounding may close.

Rounding the two logits to bfloat16 moves their difference by at most 2 roundoffs: a bound. What the
layers before them add has only a spread: in bfloat16 the difference of the two best logits of the
example model (30 layers, width x2) was off float32's by 1.1 roundoffs rms and 5.3 at most, over 8
greedy answers of 64 tokens, each computed as one batch and token by token (transformers, CPU).
So 6 is above all of these, and near 2 + 4 rms. Its price: at 22 % of those positions the second
best token lies within it, so second-best tokens would be caught at about four positions of five.
"""

Noise = Callable[[int, int, int], torch.Tensor]
"""What is added to the logits before the best token is taken: of (prompt, position among the new
tokens, vocabulary size), float [vocabulary size]."""


def sampling_noise(seeds: Sequence[int], temperature: float) -> Noise:
    """The noise of vLLM's CPU sampler for seeded requests, in units of logits.

    Args:
        seeds: of the prompts' requests, which set a temperature and nothing else.
        temperature: of all of them.
    """

    def noise(prompt: int, position: int, vocab_size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seeds[prompt])
        draw = peek_integers(generator, position + 1)[-1]
        return temperature * gumbel_noise(draw, torch.arange(vocab_size))

    return noise


@dataclass(frozen=True)
class Divergence:
    """The first difference between two answers to one prompt.

    Attributes:
        prompt: index of the prompt.
        position: index among the new tokens.
        expected: the reference's token there; ``None`` if it had ended.
        found: the other's token there; ``None`` if it had ended.
        gap: how far the worse of the two lies below the best token, in float32 logits (with the
            noise of the position, where the texts were sampled).
        tolerance: the gap that rounding may close there.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    gap: float
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it; otherwise one of the two tokens is wrong."""
        return self.gap <= self.tolerance


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first token in which they differ, or where one of them has ended."""
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def audit(
    model: Path,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    noise: Noise | None = None,
) -> list[Divergence]:
    """Judge each prompt's first difference by the model's own float32 logits.

    Later tokens of such a pair follow different texts and say nothing. The model is loaded, at 4
    bytes a parameter, only if there is a difference.

    Args:
        model: Hugging Face folder of the model that both texts claim to be from.
        prompts: token ids of each prompt, special tokens included.
        expected: token ids that followed it, by the reference.
        found: token ids that followed it, by what is audited.
        noise: that both texts were sampled by; none for greedy ones.
    """
    places = [
        (prompt, position)
        for prompt, pair in enumerate(zip(expected, found, strict=True))
        if (position := first_difference(*pair)) is not None
    ]
    if not places:
        return []
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, local_files_only=True
    ).eval()
    divergences = []
    for prompt, position in places:
        prefix = [*prompts[prompt], *expected[prompt][:position]]
        with torch.inference_mode():
            logits = reference(torch.tensor([prefix]), logits_to_keep=1).logits[0, -1]
        tokens = _at(expected[prompt], position), _at(found[prompt], position)
        tolerance = TOLERATED_ROUNDOFFS * BF16_UNIT_ROUNDOFF * float(logits.abs().max())
        if noise is not None:
            logits = logits + noise(prompt, position, len(logits))
        gap = _gap(logits, tokens)
        divergences.append(Divergence(prompt, position, *tokens, gap, tolerance))
    return divergences


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def _gap(logits: torch.Tensor, candidates: Sequence[int | None]) -> float:
    """Of the worse one; a text that ended without a token for it is beyond any tolerance."""
    tokens = [token for token in candidates if token is not None]
    if len(tokens) < len(candidates):
        return float("inf")
    return float(logits.max() - logits[tokens].min())
