"""Noise against Python integers, and against the very sampler that it foresees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.verify.noise import (
    draw_exponentials,
    draw_integers,
    gumbel_noise,
    peek_exponentials,
    peek_integers,
    rewound,
)

FIXED = settings(deadline=None, max_examples=50, derandomize=True)
MASK = (1 << 64) - 1


def splitmix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_noise(seed: int, token_id: int) -> float:
    key = splitmix64(seed & MASK)
    bits = splitmix64((key + (token_id + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
    return -math.log(-math.log((bits + 0.5) * 2.0**-53))


@FIXED
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=8),
)
def test_gumbel_noise_equals_unsigned_arithmetic(seeds, token_ids):
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(token_ids))
    assert noise.dtype == torch.float64
    expected = [[reference_noise(seed, token) for token in token_ids] for seed in seeds]
    torch.testing.assert_close(
        noise, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_gumbel_noise_broadcasts_token_ids_per_seed_and_leaves_its_inputs():
    seeds, ids = torch.tensor([[3], [4]]), torch.tensor([[[0, 5]], [[7, 9]]])
    copies = seeds.clone(), ids.clone()
    noise = gumbel_noise(seeds, ids)
    assert noise.shape == (2, 1, 2)
    assert noise[1, 0, 1].item() == pytest.approx(reference_noise(4, 9), rel=1e-12)
    assert torch.equal(seeds, copies[0])
    assert torch.equal(ids, copies[1])


def test_gumbel_noise_has_the_gumbel_law():
    """Argmax of log-probabilities plus noise draws each token as often as its probability."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    seeds = torch.randint(0, 2**31, (20_000,), generator=torch.Generator().manual_seed(0))
    draws = (probabilities.log() + gumbel_noise(seeds, torch.arange(4))).argmax(-1)
    expected = probabilities.double() * len(seeds)
    chi_square = ((draws.bincount(minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # 0.1 % point at 3 degrees of freedom


def single_integers(generator: torch.Generator, count: int) -> list[int]:
    return [
        int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))
        for _ in range(count)
    ]


@pytest.mark.parametrize("skipped", [0, 1, 623])
@pytest.mark.parametrize("count", [0, 1, 2, 17, 1000])
def test_peeked_integers_are_what_single_draws_give(skipped, count):
    ours, theirs = (torch.Generator().manual_seed(11) for _ in range(2))
    single_integers(ours, skipped)
    single_integers(theirs, skipped)
    peeked = peek_integers(ours, count)
    assert peeked.dtype == torch.int64
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert peeked.tolist() == single_integers(theirs, count)
    assert torch.equal(draw_integers(ours, count), peeked)
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 33, 500])
def test_peeked_exponentials_are_what_single_draws_give(vocab_size, dtype):
    ours, theirs = (torch.Generator().manual_seed(12) for _ in range(2))
    peeked = peek_exponentials(ours, vocab_size, 4, dtype)
    assert torch.equal(ours.get_state(), theirs.get_state())
    for row in peeked:
        single = torch.empty(vocab_size, dtype=dtype).exponential_(generator=theirs)
        assert torch.equal(row, single)
    assert torch.equal(draw_exponentials(ours, vocab_size, 4, dtype), peeked)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_rewound_restores_after_an_error_too():
    generator = torch.Generator().manual_seed(13)
    before = generator.get_state()
    with pytest.raises(RuntimeError, match="std"), rewound(generator):
        draw_exponentials(generator, 3, 2).normal_(0, -1)
    assert torch.equal(generator.get_state(), before)


@pytest.fixture(scope="module")
def fused_argmax():
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C.fused_gumbel_argmax


@pytest.mark.engine
@pytest.mark.parametrize(("rows", "vocab"), [(3000, 7), (500, 1000), (24, 49_157)])
def test_argmax_equals_the_kernel_of_vllms_cpu_sampler(fused_argmax, rows, vocab):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[torch.rand(logits.shape, generator=generator) < 0.3] = -math.inf
    logits[:, 0] = 0.0
    seeds = draw_integers(generator, rows)
    ours = (logits.double() + gumbel_noise(seeds, torch.arange(vocab))).argmax(-1)
    assert torch.equal(ours, fused_argmax(logits, seeds))


@pytest.mark.engine
def test_the_kernel_decides_as_we_do_in_near_ties(fused_argmax):
    """Two tokens as close as float32 logits allow: the noise itself agrees, not most draws."""
    seeds = draw_integers(torch.Generator().manual_seed(5), 4000)
    noise = gumbel_noise(seeds, torch.arange(2))
    logits = torch.stack([torch.zeros(len(seeds)), (noise[:, 0] - noise[:, 1]).float()], 1)
    ours = (logits.double() + noise).argmax(-1)
    assert 1500 < ours.sum() < 2500
    assert torch.equal(ours, fused_argmax(logits, seeds))


@pytest.mark.engine
@pytest.mark.parametrize("fp64", [False, True])
def test_exponentials_foresee_vllms_native_sampler(fp64):
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(60, 500, generator=generator)
    dtype = torch.float64 if fp64 else torch.float32
    q = peek_exponentials(generator, 500, len(logits), dtype)
    ours = (logits.log_softmax(-1) - q.log()).argmax(-1)
    theirs = [random_sample(row.softmax(-1)[None], {0: generator}, fp64) for row in logits]
    assert torch.equal(ours, torch.cat(theirs))
