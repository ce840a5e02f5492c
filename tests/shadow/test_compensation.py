"""Compensated shadows, against rounding to the nearest and the paper's own formulas."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.shadow import ShadowCache, ShadowSettings, build_shadows, compensation
from vllm_subspec.shadow.cache import shadow_key
from vllm_subspec.shadow.compensation import InputGram, compensate_linear, quantize_compensated
from vllm_subspec.shadow.linear import quantize_linear

pytestmark = pytest.mark.usefixtures("native_kernels")

BITS = (2, 3, 4, 6, 8)
BF16 = torch.bfloat16


def rtn(bits: int, group_size: int = 64) -> ShadowSettings:
    return ShadowSettings(bits, group_size, "rtn")


def inputs_like_a_model(rows: int, features: int, rank: int, seed: int) -> torch.Tensor:
    """Correlated, of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, rank, generator=generator) @ torch.randn(
        rank, features, generator=generator
    )
    return mixed * torch.randn(features, generator=generator).exp()


def values(codes: torch.Tensor, parts: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    scale, base = parts[..., 0], parts[..., 1] if bits <= 4 else -(2 ** (bits - 1)) * parts[..., 0]
    scale, base = (part.repeat_interleave(group_size, dim=1) for part in (scale, base))
    return codes * scale + base


def losses(change: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Of each output."""
    change = change.double()
    return ((change @ gram.double()) * change).sum(dim=1)


def nearest_change(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """By rounding to the nearest: codes chosen after the scales are cut to fp16.

    `quantize_linear` chooses them before, and one code that differs may weigh much: [out, in].
    """
    groups = weight.T.reshape(-1, group_size, len(weight))
    grid = compensation._Grid.of(*groups.aminmax(dim=1, keepdim=True), bits)
    return (grid.values(grid.codes(groups)) - groups).flatten(0, 1).T


@given(
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([32, 64]),
    rows=st.integers(1, 200),
    rank=st.integers(1, 128),
    num_dead=st.integers(0, 128),
    copies=st.sampled_from([1, 2, 4]),
    spread=st.sampled_from([0.02, 3.0]),
    seed=st.integers(0, 2**16),
)
@example(bits=4, group_size=32, rows=1, rank=1, num_dead=2, copies=4, spread=0.02, seed=12038)
@settings(max_examples=60, deadline=None)
def test_never_worse_than_the_nearest(
    bits: int,
    group_size: int,
    rows: int,
    rank: int,
    num_dead: int,
    copies: int,
    spread: float,
    seed: int,
) -> None:
    x = inputs_like_a_model(rows, 128 // copies, rank, seed).repeat(1, copies)
    x[:, torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:num_dead]] = 0
    gram = x.T @ x
    weight = spread * torch.randn(16, 128, generator=torch.Generator().manual_seed(seed + 1))
    made = compensate_linear(weight, InputGram.of(gram, "p"), rtn(bits, group_size), "p")
    changes = made.dequantize() - weight, nearest_change(weight, bits, group_size)
    ours, theirs = (losses(change, gram) for change in changes)
    # fp32 keeps a gram's small eigenvalues to a part in 1e6 of its large ones.
    size = torch.maximum(*(c.square().sum(dim=1) for c in changes)) * gram.diagonal().sum()
    assert (ours <= theirs + 1e-5 * size).all(), float(((ours - theirs) / size).max())


def test_far_better_on_correlated_inputs() -> None:
    x = inputs_like_a_model(400, 256, 40, seed=3) + 0.1 * torch.randn(
        400, 256, generator=torch.Generator().manual_seed(4)
    )
    gram = x.T @ x
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    for bits in BITS:
        made = compensate_linear(weight, InputGram.of(gram, "p"), rtn(bits), "p")
        nearest = quantize_linear(weight, rtn(bits), BF16, "p")
        ours, theirs = (losses(s.dequantize() - weight, gram).sum() for s in (made, nearest))
        assert ours < 0.4 * theirs


@pytest.mark.parametrize("bits", [4, 6])
def test_only_unimportant_outliers_are_cut(bits: int) -> None:
    weight = torch.rand(16, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 7] = 2.0
    steps = {}
    for size in (0.01, 1.0):
        diagonal = torch.linspace(1, 2, 64)
        diagonal[7] = size
        _, parts = quantize_compensated(weight, InputGram.of(torch.diag(diagonal), "p"), bits, 64)
        steps[size] = parts[..., 0].abs().mean()
    assert steps[0.01] < 0.95 * steps[1.0]


def on_grid(weight: torch.Tensor, parts: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Values of ``weight`` rounded to the nearest level of its group."""
    zero = values(torch.zeros_like(weight), parts, bits, group_size)
    scale = values(torch.ones_like(weight), parts, bits, group_size) - zero
    return ((weight - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("bits", BITS)
def test_independent_inputs_round_to_the_nearest_of_good_levels(bits: int) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    nearest = quantize_linear(weight, rtn(bits), BF16, "p").dequantize()
    for diagonal in (torch.rand(128, generator=torch.Generator().manual_seed(1)), torch.zeros(128)):
        inputs = InputGram.of(torch.diag(diagonal), "p")
        codes, parts = quantize_compensated(weight, inputs, bits, 64)
        found = values(codes, parts, bits, 64)
        ties = (found - on_grid(weight, parts, bits, 64)).abs() > 1e-4
        assert ties.float().mean() < 0.01
        if diagonal.any():
            error, plain = (((v - weight) ** 2 @ diagonal).sum() for v in (found, nearest))
            assert error <= (0.97 if bits <= 4 else 1.0001) * plain


@pytest.mark.parametrize("bits", BITS)
def test_same_as_the_papers_formulas(bits: int) -> None:
    """Its equations 2 and 3: after each input, that input is eliminated from the inverse."""
    x = inputs_like_a_model(300, 192, 96, seed=1)
    gram = x.T @ x
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(2))
    codes, parts = quantize_compensated(weight, InputGram.of(gram, "p"), bits, 64)
    assert codes.dtype == torch.uint8
    assert parts.shape == (48, 3, 2 if bits <= 4 else 1)
    assert torch.equal(parts, parts.half().float())
    left = weight.double()
    inverse = torch.linalg.inv(gram.double() + 0.1 * gram.diagonal().mean() * torch.eye(192))
    for j in gram.diagonal().argsort(descending=True).tolist():
        rounded = on_grid(left, parts, bits, 64)[:, j]
        error = (left[:, j] - rounded) / inverse[j, j]
        left = left - error[:, None] * inverse[j]
        left[:, j] = rounded
        inverse = inverse - inverse[:, j, None] * inverse[None, j] / inverse[j, j]
        inverse[j, :] = inverse[:, j] = 0
    # A code that a last bit decides changes what follows in its row.
    same = ((values(codes, parts, bits, 64) - left).abs() < 1e-4).all(dim=1)
    assert same.float().mean() > 0.7


@pytest.mark.parametrize("bits", BITS)
def test_packed_as_the_kernel_reads_it(bits: int) -> None:
    x = inputs_like_a_model(64, 192, 30, seed=7)
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(2)).to(BF16)
    inputs = InputGram.of(x.T @ x, "p")
    codes, parts = quantize_compensated(weight, inputs, bits, 32)
    shadow = compensate_linear(weight, inputs, rtn(bits, 32), "p")
    assert torch.equal(shadow.dequantize(), values(codes, parts, bits, 32))
    expected = x.float() @ shadow.dequantize().T
    assert (shadow(x) - expected).norm() < 0.02 * expected.norm()  # int8 activations


def test_blocks_of_rows_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs_like_a_model(64, 128, 30, seed=7)
    inputs = InputGram.of(x.T @ x, "p")
    weight = torch.randn(80, 128, generator=torch.Generator().manual_seed(2))
    whole, _ = quantize_compensated(weight, inputs, 4, 64)
    monkeypatch.setattr(compensation, "_ROWS", 32)
    pieces, _ = quantize_compensated(weight, inputs, 4, 64)
    assert pieces.shape == whole.shape
    assert (pieces == whole).all(dim=1).float().mean() > 0.8


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    x = inputs_like_a_model(30, 96, 30, seed=0)
    gram = x.T @ x
    inputs = InputGram.of(gram, "p")
    factor = inputs.factor
    damped = gram.double() + 0.1 * gram.diagonal().mean() * torch.eye(96)
    damped = damped[inputs.order][:, inputs.order]
    assert torch.equal(factor, factor.triu())
    assert (damped.diagonal().diff() <= 0).all()
    torch.testing.assert_close(
        factor.double().T @ factor.double() @ damped, torch.eye(96).double(), rtol=0, atol=1e-3
    )


def test_damping_rises_until_it_helps() -> None:
    gram = torch.eye(64)
    gram[0, 1] = gram[1, 0] = 1.5  # no real gram's: one more tenth would not do
    factor = InputGram.of(gram, "p").factor
    damped = gram + torch.eye(64)
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(64), rtol=0, atol=1e-4)


def test_hopeless_inputs_are_refused_by_name() -> None:
    gram = torch.eye(64)
    gram[0, 1] = gram[1, 0] = 1e6
    with pytest.raises(UnsupportedError, match=r"layer 3\.o_proj.*64 x 64.*more text"):
        InputGram.of(gram, "layer 3.o_proj")
    gram[5, 5] = torch.nan
    with pytest.raises(UnsupportedError, match=r"layer 3\.o_proj.*not finite"):
        InputGram.of(gram, "layer 3.o_proj")
    with pytest.raises(UnsupportedError, match=r"layer 3\.o_proj.*not finite"):
        compensate_linear(
            torch.full((16, 64), torch.inf),
            InputGram.of(torch.eye(64), "p"),
            rtn(4),
            "layer 3.o_proj",
        )


def calibrated(cache: ShadowCache, weights: dict[str, torch.Tensor], bits: int) -> Path:
    """Put compensated shadows of ``weights`` into the cache; their file."""
    x = inputs_like_a_model(64, 128, 30, seed=7)
    inputs = InputGram.of(x.T @ x, "p")
    made = {
        name: compensate_linear(weight, inputs, rtn(bits), name) for name, weight in weights.items()
    }
    key = shadow_key(weights, rtn(bits), BF16, compensated=True)
    cache.store(key, made)
    return cache.directory / f"{key}.safetensors"


def test_calibrated_shadows_win_for_their_bits(tmp_path: Path) -> None:
    cache = ShadowCache(tmp_path / "shadows")
    weights = {"proj": torch.randn(32, 128, generator=torch.Generator().manual_seed(2))}
    plain = {bits: build_shadows(weights, rtn(bits), BF16, cache, "l")[0] for bits in (4, 6)}
    calibrated(cache, weights, bits=4)
    for bits in (4, 6):
        found, from_cache = build_shadows(weights, rtn(bits), BF16, cache, "l")
        assert from_cache
        same = torch.equal(found["proj"].packed, plain[bits]["proj"].packed)
        assert same == (bits == 6)
    weights["proj"][0, 0] += 1
    assert not build_shadows(weights, rtn(4), BF16, cache, "l")[1]


def test_a_damaged_calibration_is_told_and_plain_shadows_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ShadowCache(tmp_path / "shadows")
    weights = {"proj": torch.randn(32, 128, generator=torch.Generator().manual_seed(2))}
    plain, _ = build_shadows(weights, rtn(4), BF16, cache, "layer 7")
    file = calibrated(cache, weights, bits=4)
    file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        found, _ = build_shadows(weights, rtn(4), BF16, cache, "layer 7")
    assert torch.equal(found["proj"].packed, plain["proj"].packed)
    (record,) = caplog.records
    assert "layer 7" in record.getMessage()
    assert "calibrated again" in record.getMessage()
