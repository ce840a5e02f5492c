"""Shadows that no CPU kernel serves: 2 and 3 bits, and MXFP4."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.lowbit_linear import Bits
from subspec_kernels.lowbit_linear.reference import E2M1, unpack_codes

from vllm_subspec.errors import ConfigError, ShadowCacheError, UnsupportedError
from vllm_subspec.shadow import formats
from vllm_subspec.shadow.build import build_shadows
from vllm_subspec.shadow.cache import ShadowCache
from vllm_subspec.shadow.compensation import InputGram, compensate_linear
from vllm_subspec.shadow.formats import ShadowSettings, available_bits, check_shape, shadow_format
from vllm_subspec.shadow.linear import ShadowLinear, quantize_linear
from vllm_subspec.shadow.microscaling import round_mxfp4

pytestmark = pytest.mark.usefixtures("native_kernels")

BF16 = torch.bfloat16
EXPERIMENTS: list[ShadowSettings] = [
    ShadowSettings(2, 64, "hqq"),
    ShadowSettings(3, 64, "hqq"),
    ShadowSettings(3, 32, "rtn"),
    ShadowSettings("mxfp4", 32, "hqq"),
]
each = pytest.mark.parametrize("chosen", EXPERIMENTS, ids=lambda s: f"{s.bits}-{s.quantizer}")


def heavy_tailed(out_features: int, in_features: int) -> torch.Tensor:
    torch.manual_seed(0)
    return 0.02 * torch.distributions.StudentT(3.0).sample((out_features, in_features))


def error(weight: torch.Tensor, bits: Bits, group_size: int, quantizer: str) -> float:
    chosen = ShadowSettings(bits, group_size, quantizer)
    restored = quantize_linear(weight, chosen, BF16, "p").dequantize()
    return float((restored - weight).norm() / weight.norm())


@pytest.mark.parametrize(
    ("bits", "group_size", "expected"),
    [(2, 64, 2.5), (3, 64, 3.5), (4, 64, 4.5), (6, 64, 6.25), (8, 64, 8.25), ("mxfp4", 32, 4.25)],
)
def test_bytes_per_weight_count_codes_and_scales(
    bits: Bits, group_size: int, expected: float
) -> None:
    chosen = ShadowSettings(bits, group_size, "rtn")
    shadow = quantize_linear(heavy_tailed(32, 256), chosen, BF16, "p")
    assert shadow.bytes_per_weight == expected / 8
    assert shadow.nbytes == expected / 8 * 32 * 256
    assert shadow.shape == (32, 256)


def test_only_formats_with_a_kernel_are_available() -> None:
    assert available_bits() == (4, 6, 8)
    for bits in (*available_bits(), 2, 3, "mxfp4"):
        assert shadow_format(bits).has_kernel == (bits in available_bits())


def test_a_warning_says_that_they_are_slow(caplog: pytest.LogCaptureFixture) -> None:
    formats._warn_of_dequantizing.cache_clear()
    with caplog.at_level(logging.WARNING):
        for bits in (2, 2, "mxfp4", 4):
            shadow_format(bits)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(" ")[0] for message in messages] == ["2-bit", "MXFP4"]
    assert all("dequantises" in message for message in messages)


@each
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_call_multiplies_by_the_dequantized_weight(
    chosen: ShadowSettings, dtype: torch.dtype
) -> None:
    shadow = quantize_linear(heavy_tailed(48, 192), chosen, dtype, "p")
    x, bias = torch.randn(2, 3, 192).to(dtype), torch.randn(48).to(dtype)
    expected = x.float() @ shadow.dequantize().T + bias.float()
    tolerance = {torch.float32: 1e-5, BF16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(shadow(x, bias).float(), expected, rtol=tolerance, atol=tolerance)


@each
def test_call_traces_into_one_graph(chosen: ShadowSettings) -> None:
    shadow, x = quantize_linear(heavy_tailed(32, 64), chosen, BF16, "p"), torch.randn(3, 64)
    traced = torch.compile(lambda x: shadow(x), backend="eager", fullgraph=True)
    assert torch.equal(traced(x), shadow(x))


@each
def test_the_cache_gives_back_the_same(chosen: ShadowSettings, tmp_path: Path) -> None:
    cache, weights = ShadowCache(tmp_path / "shadows"), {"proj": heavy_tailed(32, 128)}
    made, _ = build_shadows(weights, chosen, BF16, cache, "layers.0")
    again, from_cache = build_shadows(weights, chosen, BF16, cache, "layers.0")
    assert from_cache
    assert torch.equal(made["proj"].dequantize(), again["proj"].dequantize())
    tensors = made["proj"].tensors()
    for bad in (
        tensors | {"packed": tensors["packed"][:, :-1]},
        tensors | {"scales": tensors["scales"][:1]},
        tensors | {"scales": tensors["scales"].float()},
    ):
        with pytest.raises(ShadowCacheError):
            ShadowLinear.from_tensors(bad, chosen)


@each
def test_unserved_weights_are_refused(chosen: ShadowSettings) -> None:
    with pytest.raises(UnsupportedError, match=r"p: no (\d-bit|MXFP4) .* no multiple of 16"):
        check_shape(24, 64, chosen, "p")
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = heavy_tailed(16, 64)
        weight[5, 7] = value
        with pytest.raises(UnsupportedError, match="not finite"):
            quantize_linear(weight, chosen, BF16, "p")


def test_mxfp4_has_groups_of_32() -> None:
    with pytest.raises(ConfigError, match=r"group_size 64 .*mxfp4.* 32"):
        ShadowSettings("mxfp4", 64, "rtn")
    with pytest.raises(UnsupportedError, match="MXFP4 shadows cannot be calibrated"):
        compensate_linear(
            heavy_tailed(16, 32), InputGram.of(torch.eye(32), "p"), EXPERIMENTS[-1], "p"
        )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_hqq_reconstructs_no_worse_than_rtn(bits: int) -> None:
    for weight in (heavy_tailed(64, 512), 0.02 * torch.randn(64, 512)):
        assert error(weight, bits, 64, "hqq") < error(weight, bits, 64, "rtn")


def test_more_bits_reconstruct_better() -> None:
    weight = heavy_tailed(64, 512)
    errors = [error(weight, bits, 64, "rtn") for bits in (2, 3, 4, 6, 8)]
    assert all(more < 0.6 * fewer for fewer, more in pairwise(errors))
    assert error(weight, "mxfp4", 32, "rtn") < errors[1]


@given(spread=st.floats(-30, 30), offset=st.floats(-2, 2), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_mxfp4_is_what_the_specification_says(spread: float, offset: float, seed: int) -> None:
    torch.manual_seed(seed)
    weight = ((torch.randn(16, 64) + offset) * 2.0**spread).float()
    shadow = quantize_linear(weight, EXPERIMENTS[-1], BF16, "p")
    restored = shadow.dequantize().view(-1, 32)
    for group, found in zip(weight.view(-1, 32), restored, strict=True):
        scale = 2.0 ** (math.floor(math.log2(float(group.abs().max()))) - 2)
        for value, got in zip(group.tolist()[::5], found.tolist()[::5], strict=True):
            nearest = min(E2M1, key=lambda level: abs(abs(value) / scale - level))
            near = abs(abs(value) / scale - abs(got) / scale)
            assert near <= abs(abs(value) / scale - nearest)
            assert got == 0 or (got < 0) == (value < 0)


def test_mxfp4_ties_go_to_even_and_too_large_elements_to_six() -> None:
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 7.9]
    group = torch.zeros(1, 32)
    group[0, :9], group[0, 9:18] = torch.tensor(halves), -torch.tensor(halves)
    codes, exponents = round_mxfp4(group)
    assert exponents.item() == 127
    assert codes[0, :9].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7]
    assert codes[0, 9:18].tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15]


def test_mxfp4_keeps_what_it_can_hold() -> None:
    """All elements at the ends of the scale's range, and a group of zeros."""
    levels = torch.tensor([*E2M1, *(-level for level in E2M1)]).repeat(2)
    for exponent in (-126, 0, 125):
        weight = (levels * 2.0**exponent).expand(16, 32).contiguous()
        shadow = quantize_linear(weight, EXPERIMENTS[-1], torch.float32, "p")
        assert torch.equal(shadow.dequantize(), weight)
    zero = quantize_linear(torch.zeros(16, 32), EXPERIMENTS[-1], torch.float32, "p")
    assert not zero.dequantize().any()
    assert not unpack_codes(zero.packed, "mxfp4", 32).any()
