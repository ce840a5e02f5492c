"""Shadows by the native kernels, and the choice between these and torch's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels import native

from vllm_subspec.errors import ConfigError, ShadowCacheError, UnsupportedError
from vllm_subspec.shadow import formats, packing
from vllm_subspec.shadow.build import build_shadows
from vllm_subspec.shadow.cache import ShadowCache, shadow_key
from vllm_subspec.shadow.formats import GROUP_SIZES, ShadowSettings, check_shape, kernel_status
from vllm_subspec.shadow.linear import ShadowLinear, quantize_linear

pytestmark = pytest.mark.usefixtures("native_kernels")

BITS = (4, 6, 8)
BF16 = torch.bfloat16


def heavy_tailed(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return 0.02 * torch.distributions.StudentT(3.0).sample((out_features, in_features))


def rtn(bits: int, group_size: int = 64) -> ShadowSettings:
    return ShadowSettings(bits, group_size, "rtn")


def group_range(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(width, magnitude) of each weight's group, in the weight's shape."""
    groups = weight.view(len(weight), -1, group_size)
    parts = (groups.amax(2) - groups.amin(2), groups.abs().amax(2))
    width, magnitude = (part.repeat_interleave(group_size, dim=1) for part in parts)
    return width, magnitude


@given(
    bits=st.sampled_from(BITS),
    spread=st.floats(1e-3, 1e2),
    offset=st.floats(-3, 3),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_weights_are_off_by_half_a_step(
    bits: int, spread: float, offset: float, group_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = (torch.randn(32, 512) + offset) * spread
    restored = quantize_linear(weight, rtn(bits, group_size), BF16, "proj").dequantize()
    width, magnitude = group_range(weight, group_size)
    # A symmetric range lacks one level on one side: there the largest may be a whole step off.
    allowed = width / 30 if bits == 4 else magnitude / 2 ** (bits - 1)
    fp16 = 2**-11 * (width + 2 * magnitude)
    assert ((restored - weight).abs() <= allowed * 1.001 + fp16).all()
    if bits != 4:
        mean = (restored - weight).abs().mean()
        assert mean <= 0.26 * (magnitude / 2 ** (bits - 1)).mean() + 2**-11 * magnitude.mean()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_four_bits_keep_hqq_float_zeros(group_size: int) -> None:
    from hqq.core.quantize import Quantizer

    weight = heavy_tailed(48, 512)
    q, meta = Quantizer.quantize(
        weight, nbits=4, group_size=group_size, axis=1, optimize=True, device="cpu"
    )
    hqq = Quantizer.dequantize(q, meta | {"compute_dtype": torch.float32})
    restored = quantize_linear(
        weight, ShadowSettings(4, group_size, "hqq"), BF16, "proj"
    ).dequantize()
    width, magnitude = group_range(weight, group_size)
    assert ((restored - hqq).abs() <= 2**-11 * (width + 2 * magnitude) + 1e-7).all()


@pytest.mark.parametrize("quantizer", ["hqq", "rtn"])
def test_uniform_groups_keep_their_value(quantizer: str) -> None:
    weight = heavy_tailed(16, 192)
    weight[:, :64], weight[3] = 0.0123, 0
    for bits in BITS:
        restored = quantize_linear(
            weight, ShadowSettings(bits, 64, quantizer), BF16, "proj"
        ).dequantize()
        others = [row for row in range(16) if row != 3]
        torch.testing.assert_close(
            restored[others, :64], torch.full((15, 64), 0.0123), rtol=2**-10, atol=0
        )
        assert (restored[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_call_multiplies_by_the_dequantized_weight(bits: int, dtype: torch.dtype) -> None:
    shadow = quantize_linear(heavy_tailed(80, 192), rtn(bits), dtype, "proj")
    assert shadow.shape == (80, 192)
    for rows in (1, 3, 17):
        x = torch.randn(rows, 192).to(dtype)
        expected = x.float() @ shadow.dequantize().T
        y = shadow(x)
        assert y.dtype == dtype
        # Activations are off by at most half of max / 127, evenly: 0.6 % of a normal vector.
        assert (y.float() - expected).norm() < 0.015 * expected.norm()


@pytest.mark.parametrize(("bits", "expected"), [(4, 4.5), (6, 6.25), (8, 8.25)])
def test_bytes_per_weight(bits: int, expected: float) -> None:
    shadow = quantize_linear(heavy_tailed(32, 256), rtn(bits), BF16, "p")
    assert shadow.bytes_per_weight == expected / 8


@pytest.mark.parametrize("bits", BITS)
def test_row_blocks_change_nothing(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = heavy_tailed(80, 128)
    whole = quantize_linear(weight, rtn(bits), BF16, "proj")
    monkeypatch.setattr(packing, "_BLOCK_WEIGHTS", 40 * 128)
    parts = quantize_linear(weight, rtn(bits), BF16, "proj")
    assert torch.equal(parts.packed, whole.packed)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("bits", BITS)
def test_leading_shapes_bias_and_one_graph(bits: int) -> None:
    shadow = quantize_linear(heavy_tailed(32, 64), rtn(bits), torch.float32, "proj")
    x, bias = torch.randn(2, 3, 64), torch.randn(32)
    flat = shadow(x.view(6, 64))
    assert torch.equal(shadow(x), flat.view(2, 3, 32))
    assert torch.equal(shadow(x[0, 0]), flat[0])
    assert torch.equal(shadow(x.view(6, 64).T.contiguous().T), flat)
    assert shadow(x[:0]).shape == (0, 3, 32)
    traced = torch.compile(lambda x: shadow(x, bias), backend="eager", fullgraph=True)
    assert torch.equal(traced(x), shadow(x) + bias)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (torch.zeros(24, 64), "out_features are no multiple of 16"),
        (torch.zeros(32, 96), "in_features are no multiple of group_size 64; set group_size to 32"),
        (torch.full((16, 64), torch.nan), "not finite"),
        (torch.full((16, 64), torch.inf), "not finite"),
        (torch.full((16, 64), 1e9), r"too large for torch\.float16"),
    ],
)
def test_unserved_weights_are_refused(weight: torch.Tensor, reason: str, bits: int) -> None:
    if weight.isfinite().all() and weight.any():
        weight[:, ::2] *= -1  # no uniform group
    with pytest.raises(UnsupportedError, match=rf"model\.proj.*{reason}"):
        quantize_linear(weight, rtn(bits), BF16, "model.proj")


@pytest.mark.parametrize("bits", BITS)
def test_the_cache_gives_back_the_same(bits: int, tmp_path: Path) -> None:
    cache, weights = ShadowCache(tmp_path / "shadows"), {"proj": heavy_tailed(32, 128)}
    made, _ = build_shadows(weights, rtn(bits), BF16, cache, "layers.0")
    again, from_cache = build_shadows(weights, rtn(bits), BF16, cache, "layers.0")
    assert from_cache
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(made["proj"](x), again["proj"](x))
    assert torch.equal(made["proj"].dequantize(), again["proj"].dequantize())


@pytest.mark.parametrize("bits", BITS)
def test_from_tensors_takes_only_what_tensors_gave(bits: int) -> None:
    good = quantize_linear(heavy_tailed(32, 64), rtn(bits, 32), BF16, "proj").tensors()
    ShadowLinear.from_tensors(good, rtn(bits, 32))
    packed, scales = good["packed"], good["scales"]
    for bad in (
        good | {"packed": packed.view(torch.int8)},
        good | {"packed": packed[:16]},
        good | {"packed": packed[:, :-1]},
        good | {"packed": packed[:, : packed.shape[1] // 2]},
        good | {"scales": scales[:1]},
        good | {"scales": scales.flatten()},
        good | {"scales": scales.bfloat16()},
    ):
        with pytest.raises(ShadowCacheError):
            ShadowLinear.from_tensors(bad, rtn(bits, 32))


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(directory: Path) -> str:
        raise native.KernelBuildError("no C++ compiler is on PATH; install one of: g++")

    monkeypatch.setattr(native, "load", fail)
    formats._native_kernel.cache_clear()
    yield
    formats._native_kernel.cache_clear()


def keys() -> list[str]:
    weights = {"proj": heavy_tailed(32, 64)}
    return [shadow_key(weights, rtn(bits), torch.float16) for bits in (4, 8)]


def test_native_and_torch_never_share_a_key(request: pytest.FixtureRequest) -> None:
    of_native = keys()
    request.getfixturevalue("no_native")
    assert len({*of_native, *keys()}) == 4


@pytest.mark.usefixtures("no_native")
def test_without_the_native_kernel_torch_serves_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        four = quantize_linear(heavy_tailed(32, 64), rtn(4), BF16, "proj")
        check_shape(32, 64, rtn(8), "proj")
        with pytest.raises(UnsupportedError, match=r"bits 6 .*install one of: g\+\+.*4 or 8"):
            check_shape(32, 64, rtn(6), "proj")
    assert isinstance(four.format, packing.Int4Groups)
    assert four(torch.randn(1, 64).bfloat16()).shape == (1, 32)
    assert "no C++ compiler" in kernel_status()
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()


def test_unknown_bits_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"bits 5 .*4, 6, 8"):
        formats.shadow_format(5)
