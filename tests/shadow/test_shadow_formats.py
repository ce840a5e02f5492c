"""Shadows by torch's own kernels, and what all formats share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ConfigError, DependencyError, ShadowCacheError, UnsupportedError
from vllm_subspec.files import tensor_digest
from vllm_subspec.shadow import packing
from vllm_subspec.shadow.formats import GROUP_SIZES, ShadowSettings, check_shape
from vllm_subspec.shadow.linear import ShadowLinear, quantize_linear

pytestmark = pytest.mark.usefixtures("torch_kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One rounding of the output, and fp32 accumulation over a few hundred terms.
RTOL = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
RTN4, RTN8 = ShadowSettings(4, 64, "rtn"), ShadowSettings(8, 64, "rtn")


def heavy_tailed(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return 0.02 * torch.distributions.StudentT(3.0).sample((out_features, in_features))


def hqq_dequantized(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    from hqq.core.quantize import Quantizer

    q, meta = Quantizer.quantize(
        weight, nbits=4, group_size=group_size, axis=1, optimize=True, device="cpu"
    )
    restored: torch.Tensor = Quantizer.dequantize(q, meta | {"compute_dtype": torch.float32})
    return restored


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 128), (80, 192), (16, 64)])
def test_call_multiplies_by_the_dequantized_weight(
    bits: int, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = heavy_tailed(out_features, in_features)
    shadow = quantize_linear(weight, ShadowSettings(bits, 64, "rtn"), dtype, "proj")
    assert shadow.shape == (out_features, in_features)
    assert shadow.scales.dtype == dtype
    for rows in (1, 3, 4, 17):
        x = torch.randn(rows, in_features).to(dtype)
        expected = (x.double() @ shadow.dequantize().double().T).float()
        y = shadow(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=RTOL[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_serves_any_number_of_channels(dtype: torch.dtype) -> None:
    weight = heavy_tailed(31, 48)
    shadow = quantize_linear(weight, RTN8, dtype, "proj")
    x = torch.randn(3, 48).to(dtype)
    expected = (x.double() @ shadow.dequantize().double().T).float()
    torch.testing.assert_close(shadow(x).float(), expected, rtol=RTOL[dtype], atol=1e-5)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_dequantize_equals_hqq_own(group_size: int) -> None:
    weight = heavy_tailed(48, 512)
    shadow = quantize_linear(weight, ShadowSettings(4, group_size, "hqq"), torch.float32, "proj")
    # (q - zero) * s against fma(q - 8, s, (8 - zero) * s): a few fp32 roundings of about 16 s.
    torch.testing.assert_close(
        shadow.dequantize(), hqq_dequantized(weight, group_size), rtol=0, atol=1e-6
    )


def test_low_precision_scales_stay_within_their_rounding_of_hqq() -> None:
    weight = heavy_tailed(48, 512)
    shadow = quantize_linear(weight, ShadowSettings(4, 64, "hqq"), torch.bfloat16, "proj")
    # |q - 8| <= 8, and |z| <= 8 s here: bf16 rounds each product off by at most 8 s * 2**-8.
    steps = shadow.scales[..., 0].float().T.repeat_interleave(64, dim=1)
    off = (shadow.dequantize() - hqq_dequantized(weight, 64)).abs()
    assert (off <= 17 * 2**-8 * steps).all()


def test_large_weights_are_quantized_in_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = heavy_tailed(80, 128)
    monkeypatch.setattr(packing, "_BLOCK_WEIGHTS", 48 * 128)
    shadow = quantize_linear(weight, ShadowSettings(4, 64, "hqq"), torch.float32, "proj")
    parts = [hqq_dequantized(part, 64) for part in torch.split(weight, 48)]
    torch.testing.assert_close(shadow.dequantize(), torch.cat(parts), rtol=0, atol=1e-6)
    int8 = quantize_linear(weight, RTN8, torch.float32, "proj")
    monkeypatch.undo()
    assert torch.equal(int8.packed, quantize_linear(weight, RTN8, torch.float32, "proj").packed)


@given(
    spread=st.floats(1e-6, 1e2),
    offset=st.floats(-10, 10),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_int4_rtn_is_off_by_half_a_step(
    spread: float, offset: float, group_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(16, 256) * spread + offset
    shadow = quantize_linear(weight, ShadowSettings(4, group_size, "rtn"), torch.float32, "proj")
    steps = shadow.scales[..., 0].T.repeat_interleave(group_size, dim=1)
    slack = 4 * torch.finfo(torch.float32).eps * (abs(offset) + 16 * steps)
    assert ((shadow.dequantize() - weight).abs() <= steps / 2 + slack).all()


@given(spread=st.floats(1e-6, 1e2), seed=st.integers(0, 2**16), dtype=st.sampled_from(DTYPES[:2]))
@settings(max_examples=30, deadline=None)
def test_int8_is_off_by_half_a_step(spread: float, seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(5, 32) * spread
    shadow = quantize_linear(weight, RTN8, dtype, "proj")
    steps = shadow.scales.float()[:, None]
    # Where bf16 rounds the step down, the largest weight is clipped by up to 127 * 2**-8 of one.
    assert ((shadow.dequantize() - weight).abs() <= 0.5001 * steps).all()
    assert torch.equal(shadow.dequantize(), shadow.packed.float() * steps)


def test_hqq_reconstructs_heavy_tails_no_worse_than_rtn() -> None:
    weight = heavy_tailed(64, 512)
    hqq, rtn = (
        quantize_linear(weight, ShadowSettings(4, 64, q), torch.float32, "proj").dequantize()
        for q in ("hqq", "rtn")
    )
    assert (hqq - weight).abs().mean() < (rtn - weight).abs().mean()
    assert (hqq - weight).norm() < (rtn - weight).norm()
    # Sane at all: 4 bits keep most of the weight's energy.
    assert (rtn - weight).norm() < 0.2 * weight.norm()


@pytest.mark.parametrize("quantizer", ["hqq", "rtn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_groups_keep_their_value(quantizer: str, dtype: torch.dtype) -> None:
    """HQQ gives a range below 1e-4 the scale 1: as s and z, bf16 would lose the value."""
    weight = heavy_tailed(16, 192)
    weight[:, :64] = 0.0123
    weight[3] = 0
    shadow = quantize_linear(weight, ShadowSettings(4, 64, quantizer), dtype, "proj")
    restored = shadow.dequantize()
    kept = torch.tensor(0.0123).to(dtype).float()
    others = [row for row in range(16) if row != 3]
    torch.testing.assert_close(
        restored[others, :64], kept.expand(15, 64), rtol=torch.finfo(dtype).eps, atol=1e-7
    )
    assert (restored[3] == 0).all()


def test_int8_zero_and_tiny_channels() -> None:
    weight = heavy_tailed(4, 32)
    weight[0], weight[1] = 0, 1e-9
    shadow = quantize_linear(weight, RTN8, torch.float16, "proj")
    assert (shadow.scales > 0).all()
    restored = shadow.dequantize()
    assert (restored[:2] == 0).all()
    assert (restored[2:] != 0).any(dim=1).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_bias_is_added_and_kept(bits: int) -> None:
    shadow = quantize_linear(heavy_tailed(32, 64), ShadowSettings(bits, 64, "rtn"), DTYPES[0], "p")
    x, bias = torch.randn(3, 64), torch.randn(32)
    before = bias.clone()
    assert torch.equal(shadow(x, bias), shadow(x) + before)
    assert torch.equal(bias, before)


@pytest.mark.parametrize("bits", [4, 8])
def test_any_leading_shape_and_layout_of_x(bits: int) -> None:
    shadow = quantize_linear(heavy_tailed(32, 64), ShadowSettings(bits, 64, "rtn"), DTYPES[0], "p")
    x = torch.randn(2, 3, 64)
    flat = shadow(x.view(6, 64))
    assert torch.equal(shadow(x), flat.view(2, 3, 32))
    assert torch.equal(shadow(x[0, 0]), shadow(x[0, :1])[0])
    assert torch.equal(shadow(x.view(6, 64).T.contiguous().T), flat)
    assert torch.equal(shadow(torch.cat([x, x], dim=-1)[..., :64]), flat.view(2, 3, 32))
    assert shadow(x[:0]).shape == (0, 3, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_any_float_dtype(dtype: torch.dtype) -> None:
    weight = heavy_tailed(16, 64).to(dtype)
    ours = quantize_linear(weight.requires_grad_(), RTN4, torch.float32, "proj")
    same = quantize_linear(weight.detach().float(), RTN4, torch.float32, "proj")
    assert torch.equal(ours.packed, same.packed)
    assert torch.equal(ours.scales, same.scales)
    assert not ours.scales.requires_grad


@pytest.mark.parametrize("quantizer", ["hqq", "rtn"])
def test_the_caller_torch_modes_change_nothing(quantizer: str) -> None:
    """An engine loads weights under its own default dtype and in inference mode."""
    weight, chosen = heavy_tailed(32, 64), ShadowSettings(4, 64, quantizer)
    plain = quantize_linear(weight, chosen, torch.bfloat16, "proj")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            other = quantize_linear(weight, chosen, torch.bfloat16, "proj")
        restored = other.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(other.packed, plain.packed)
    assert torch.equal(other.scales, plain.scales)
    assert torch.equal(restored, plain.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_call_traces_into_one_graph(bits: int) -> None:
    shadow = quantize_linear(heavy_tailed(32, 64), ShadowSettings(bits, 64, "rtn"), DTYPES[0], "p")
    x, bias = torch.randn(3, 64), torch.randn(32)
    traced = torch.compile(lambda x: shadow(x, bias), backend="eager", fullgraph=True)
    assert torch.equal(traced(x), shadow(x, bias))


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "expected"),
    [(4, 64, DTYPES[1], 4.5 / 8), (4, 64, DTYPES[0], 5 / 8), (4, 256, DTYPES[1], 4.125 / 8)],
)
def test_bytes_per_weight_count_the_scales(
    bits: int, group_size: int, dtype: torch.dtype, expected: float
) -> None:
    shadow = quantize_linear(
        heavy_tailed(32, 256), ShadowSettings(bits, group_size, "rtn"), dtype, "proj"
    )
    assert shadow.bytes_per_weight == expected
    assert shadow.nbytes == expected * 32 * 256


def test_bytes_per_weight_of_int8() -> None:
    shadow = quantize_linear(heavy_tailed(32, 256), RTN8, torch.bfloat16, "proj")
    assert shadow.bytes_per_weight == 1 + 2 / 256


@pytest.mark.parametrize(
    ("shape", "bits", "group_size", "fixes"),
    [
        ((24, 64), 4, 64, ["set bits to 8"]),
        ((32, 96), 4, 64, ["set group_size to 32", "set bits to 8"]),
        ((32, 384), 4, 256, ["set group_size to 32 or 64 or 128", "set bits to 8"]),
        ((24, 40), 4, 32, []),
        ((32, 40), 8, 32, []),
        ((32, 72), 8, 64, []),
    ],
)
def test_unserved_shapes_are_refused_with_what_would_do(
    shape: tuple[int, int], bits: int, group_size: int, fixes: list[str]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        quantize_linear(
            torch.zeros(shape), ShadowSettings(bits, group_size, "rtn"), torch.float32, "model.proj"
        )
    message = str(caught.value)
    assert "model.proj" in message
    assert str(list(shape)) in message
    assert f"{bits}-bit" in message
    assert message.partition("; ")[2] == ", or ".join([*fixes, "keep this layer resident"])


@given(
    out_features=st.integers(1, 12).map(lambda n: 8 * n),
    in_features=st.integers(1, 40).map(lambda n: 8 * n),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_what_is_not_refused_is_served(
    out_features: int, in_features: int, bits: int, group_size: int, dtype: torch.dtype
) -> None:
    chosen = ShadowSettings(bits, group_size, "rtn")
    try:
        check_shape(out_features, in_features, chosen, "proj")
    except UnsupportedError:
        return
    shadow = quantize_linear(heavy_tailed(out_features, in_features), chosen, dtype, "proj")
    # NaN behind the rows shows a kernel that reads too far.
    x = torch.full((3 * in_features + 64,), torch.nan, dtype=dtype)
    x = x[: 3 * in_features].view(3, in_features).normal_()
    expected = (x.double() @ shadow.dequantize().double().T).float()
    torch.testing.assert_close(shadow(x).float(), expected, rtol=RTOL[dtype], atol=2e-5)


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (torch.full((16, 64), torch.nan), torch.float32, "not finite"),
        (torch.full((16, 64), torch.inf), torch.float32, "not finite"),
        (torch.full((16, 64), 1e9), torch.float16, "too large"),
        (torch.zeros(16, 64, dtype=torch.int8), torch.float32, "int8"),
        (torch.zeros(2, 16, 64), torch.float32, "2, 16, 64"),
        (torch.zeros(16, 64), torch.float64, "float64"),
        (torch.zeros(16, 64, device="meta"), torch.float32, "meta"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_unserved_tensors_are_refused(
    weight: torch.Tensor, dtype: torch.dtype, reason: str, bits: int
) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        quantize_linear(weight, ShadowSettings(bits, 64, "rtn"), dtype, "model.proj")
    assert "model.proj" in str(caught.value)


def test_non_finite_weights_are_refused_by_hqq_too() -> None:
    weight = heavy_tailed(16, 64)
    weight[5, 7] = torch.nan
    with pytest.raises(UnsupportedError, match="not finite"):
        quantize_linear(weight, ShadowSettings(4, 64, "hqq"), torch.float32, "proj")


@pytest.mark.parametrize(
    ("bits", "group_size", "quantizer", "message"),
    [
        (5, 64, "rtn", r"bits 5 .*2, 3, 4, 6, 8, mxfp4"),
        (4, 48, "rtn", r"group_size 48 .*32, 64, 128, 256"),
        (4, 64, "awq", r"quantizer 'awq' .*hqq, rtn"),
    ],
)
def test_unknown_settings_list_the_known_ones(
    bits: int, group_size: int, quantizer: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ShadowSettings(bits, group_size, quantizer)


def test_missing_hqq_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq", None)
    weight = heavy_tailed(16, 64)
    with pytest.raises(DependencyError, match="pip install hqq"):
        quantize_linear(weight, ShadowSettings(4, 64, "hqq"), torch.float32, "proj")
    for needs_no_hqq in (RTN4, ShadowSettings(8, 64, "hqq")):
        quantize_linear(weight, needs_no_hqq, torch.float32, "proj")


def test_quantizing_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    quantize_linear(heavy_tailed(16, 64), ShadowSettings(4, 64, "hqq"), torch.float32, "proj")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bits", [4, 8])
def test_from_tensors_takes_only_what_tensors_gave(bits: int) -> None:
    chosen = ShadowSettings(bits, 32, "rtn")
    shadow = quantize_linear(heavy_tailed(32, 64), chosen, torch.bfloat16, "proj")
    good = shadow.tensors()
    again = ShadowLinear.from_tensors(good, chosen)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(again(x), shadow(x))
    packed, scales = good["packed"], good["scales"]
    for bad in (
        {"packed": packed},
        good | {"zeros": scales},
        good | {"packed": packed.float()},
        good | {"packed": packed[0]},
        good | {"packed": packed[:16]},
        good | {"packed": packed[:, :8]},
        good | {"scales": scales[:1]},
        good | {"scales": scales.double()},
    ):
        with pytest.raises(ShadowCacheError):
            ShadowLinear.from_tensors(bad, chosen)


PROBE = """
import sys, torch
from vllm_subspec.files import tensor_digest
from vllm_subspec.shadow import build, packing
torch.manual_seed(0)
codes = torch.randint(0, 16, (112, 96), dtype=torch.int32)
packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
print(packing._int4_layout(), tensor_digest(packed), "hqq" in sys.modules)
"""


def test_layout_names_the_processor_packing_and_import_is_lazy() -> None:
    """Codes packed for another instruction set are other bytes: the layout must tell them apart."""
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True
    )
    layout, packed, hqq_imported = done.stdout.split()
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (112, 96), dtype=torch.int32)
    here = tensor_digest(torch._convert_weight_to_int4pack_for_cpu(codes, 1))
    assert (layout == packing._int4_layout()) == (packed == here)
    assert hqq_imported == "False"
