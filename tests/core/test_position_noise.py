"""PositionNoise: peeked draws choose what the sampler chooses token by token, for both samplers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_subspec.verify.noise import gumbel_noise
from vllm_subspec.verify.position_noise import ExponentialNoise, HashedNoise, PositionNoise

VOCAB = 97


def hashed_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    return (logits.double() + gumbel_noise(seeds, torch.arange(VOCAB))).argmax(-1)


def exponential_argmax(probs: Tensor, q: Tensor) -> Tensor:
    return (probs / q).argmax(-1)


def draw_hashed(generator: torch.Generator, logits: Tensor) -> int:
    """One token, as vLLM's CPU sampler draws it."""
    seed = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.int64)
    return int(hashed_argmax(logits[None], seed))


def draw_exponential(generator: torch.Generator, logits: Tensor) -> int:
    """One token, as vLLM's native sampler draws it."""
    q = torch.empty(VOCAB).exponential_(generator=generator)
    return int((logits.softmax(-1) / q).argmax())


KINDS = pytest.mark.parametrize(
    ("noise", "draw"),
    [
        (HashedNoise(hashed_argmax), draw_hashed),
        (ExponentialNoise(VOCAB, torch.float32, exponential_argmax), draw_exponential),
    ],
    ids=["hashed", "exponential"],
)


def sharp_logits(count: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@KINDS
def test_draws_fixed_ahead_are_those_drawn_one_by_one(
    noise: PositionNoise, draw: Callable[[torch.Generator, Tensor], int]
) -> None:
    ours, theirs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    logits = sharp_logits(40)
    tokens: list[int] = []
    while len(tokens) < 40:  # passes that foresee 7 positions and commit 1 to 5 of them
        commit = min(1 + len(tokens) % 5, 40 - len(tokens))
        draws = noise.peek(ours, 7)[:commit]
        rows = logits[len(tokens) : len(tokens) + commit].clone()
        tokens += noise.choose(rows, draws).tolist()
        noise.advance(ours, commit)
    assert tokens == [draw(theirs, row) for row in logits]
    assert torch.equal(ours.get_state(), theirs.get_state())


@KINDS
def test_logits_plus_gumbel_rank_the_chosen_token_first(
    noise: PositionNoise, draw: Callable[[torch.Generator, Tensor], int]
) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = sharp_logits(32)
    draws = noise.peek(generator, 32)
    ids = torch.arange(VOCAB).expand(32, 1, VOCAB)
    ranked = logits[:, None].double() + noise.gumbel(draws, ids)
    assert torch.equal(ranked.argmax(-1)[:, 0], noise.choose(logits.clone(), draws))
