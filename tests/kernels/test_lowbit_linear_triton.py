"""The low-bit linear on a GPU against its reference, for all formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from subspec_kernels import lowbit_linear as op
from subspec_kernels.lowbit_linear import reference
from subspec_kernels.lowbit_linear import triton as kernel
from subspec_kernels.lowbit_linear.reference import BITS, Bits

# fp32 sums in another order, relative to the largest result; the interpreter cuts fp32 to bf16.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
Weight = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _exact_dots(device: torch.device) -> Iterator[None]:
    """As a GPU multiplies bf16; Triton's interpreter takes its bits for whole numbers."""
    if device.type == "cuda":
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    dot = InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest),
        )
        yield


@pytest.fixture(autouse=True)
def _outputs_are_nan_before(monkeypatch: pytest.MonkeyPatch) -> None:
    new_empty = torch.Tensor.new_empty

    def new_nan(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = new_empty(self, *shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


def make_codes(out_features: int, in_features: int, bits: Bits, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    top = 2 ** reference.code_bits(bits)
    return torch.randint(0, top, (out_features, in_features), dtype=torch.uint8)


def make_weight(
    out_features: int, in_features: int, bits: Bits, group_size: int, seed: int = 0
) -> Weight:
    """Codes that use all levels, and scales."""
    codes = make_codes(out_features, in_features, bits, seed)
    shape = reference.scales_shape(out_features, in_features, bits, group_size)
    if bits == "mxfp4":
        scales = torch.randint(118, 124, shape, dtype=torch.uint8)
    else:
        scales = torch.randn(shape).mul(0.01).half()
    return reference.pack_codes(codes, bits, group_size), scales


def run(
    device: torch.device, x: torch.Tensor, weight: Weight, bits: Bits, group_size: int
) -> torch.Tensor:
    packed, scales = (part.to(device) for part in weight)
    return kernel.lowbit_linear(x.to(device), packed, scales, bits, group_size).cpu()


def assert_near(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.shape == expected.shape
    off = (y.float() - expected.float()).abs().max()
    assert off <= TOLERANCE[y.dtype] * expected.float().abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size"), [*((bits, 64) for bits in BITS if bits != "mxfp4"), ("mxfp4", 32)]
)
def test_equals_reference(
    bits: Bits, group_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = make_weight(80, 192, bits, group_size)
    x = torch.randn(5, 192).to(dtype)
    y = run(device, x, weight, bits, group_size)
    assert y.dtype == dtype
    assert_near(y, reference.lowbit_linear(x.float(), *weight, bits, group_size))


@pytest.mark.parametrize("bits", [3, 6, 8])
@pytest.mark.parametrize("group_size", [32, 128, 256])
def test_groups_of_any_size(bits: int, group_size: int, device: torch.device) -> None:
    weight = make_weight(16, 2 * group_size, bits, group_size)
    x = torch.randn(3, 2 * group_size)
    y = run(device, x, weight, bits, group_size)
    assert_near(y, reference.lowbit_linear(x, *weight, bits, group_size))


@pytest.mark.parametrize("rows", [1, 16, 17, 33])
def test_any_number_of_rows(rows: int, device: torch.device) -> None:
    weight, x = make_weight(48, 128, 4, 64), torch.randn(rows, 128)
    y = run(device, x, weight, 4, 64)
    assert_near(y, reference.lowbit_linear(x, *weight, 4, 64))


@pytest.mark.parametrize(
    ("channels", "inputs", "split"),
    [(16, 64 * 3, 1), (64, 64 * 9, 2), (16, 64 * 83, 16), (64 * 300, 64 * 99, 2), (2**17, 4096, 1)],
)
def test_inputs_are_split_where_channels_are_few(channels: int, inputs: int, split: int) -> None:
    steps, block_channels, found = kernel._cut(channels, inputs, 64)
    assert (steps, found) == (inputs // 64, split)
    assert block_channels == min(channels, 64)


@pytest.mark.parametrize("steps", [9, 11, 13])
def test_split_inputs_add_up_in_a_fixed_order(steps: int, device: torch.device) -> None:
    """Programs have unequal shares; the last has less, or nothing."""
    weight = make_weight(32, 64 * steps, 8, 64)
    x = torch.randn(5, 64 * steps).half()
    y = run(device, x, weight, 8, 64)
    assert_near(y, reference.lowbit_linear(x, *weight, 8, 64))
    assert torch.equal(run(device, x, weight, 8, 64), y)


def test_microscaling_extremes(device: torch.device) -> None:
    """The subnormal scale 2**-127, the largest one, NaN, and every element."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 2)
    packed = reference.pack_codes(codes, "mxfp4", 32)
    x = torch.zeros(16, 32)
    x[:, :16] = torch.eye(16)
    for exponent in (0, 1, 127, 252, 255):
        scales = torch.full((1, 1, 16), exponent, dtype=torch.uint8)
        y = run(device, x, (packed, scales), "mxfp4", 32)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scale = 2.0 ** (exponent - 127) if exponent < 255 else torch.nan
        expected = (torch.cat([values, -values]).double() * scale).float()[:, None].expand(16, 16)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        dequantized = reference.dequantize(packed, scales, "mxfp4", 32)[:, :16].T
        torch.testing.assert_close(dequantized, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", BITS)
def test_a_unit_vector_reads_its_column_exactly(bits: Bits, device: torch.device) -> None:
    group_size = 32
    weight = make_weight(32, 64, bits, group_size)
    y = run(device, torch.eye(64), weight, bits, group_size)
    expected = reference.dequantize(*weight, bits, group_size).T
    # Of q * s + b a GPU rounds once.
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-8)


def test_non_finite_activations_stay_in_their_row(device: torch.device) -> None:
    weight, x = make_weight(32, 128, 4, 64), torch.randn(4, 128)
    clean = run(device, x, weight, 4, 64)
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    y = run(device, x, weight, 4, 64)
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert not y[1:3].isfinite().any()


def test_strided_and_empty_inputs(device: torch.device) -> None:
    weight, x = make_weight(32, 128, 6, 64), torch.randn(3, 256)[:, ::2]
    assert torch.equal(run(device, x, weight, 6, 64), run(device, x.clone(), weight, 6, 64))
    assert run(device, x[:0], weight, 6, 64).shape == (0, 32)
    nothing = (torch.empty(32, 0, dtype=torch.uint8), torch.empty(2, 0, 16).half())
    assert (run(device, torch.empty(3, 0), nothing, 6, 64) == 0).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_planes_are_laid_out_as_documented(bits: Bits, group_size: int) -> None:
    codes = make_codes(32, 2 * group_size, bits, seed=1)
    packed = reference.pack_codes(codes, bits, group_size)
    assert torch.equal(reference.unpack_codes(packed, bits, group_size), codes)
    memory, width = packed.flatten().tolist(), reference.code_bits(bits)
    for channel, k in ((0, 0), (5, 6), (15, 29), (16, group_size + 13), (31, 2 * group_size - 1)):
        group, inside = divmod(k, group_size)
        start = (channel // 16 * 2 + group) * 2 * group_size * width
        quad, lane = inside // 4, channel % 16 * 4 + inside % 4
        code, shift = 0, 0
        for plane in {3: (2, 1), 6: (4, 2)}.get(width, (width,)):
            quads = 8 // plane
            byte = memory[start + quad // quads * 64 + lane]
            code |= (byte >> quad % quads * plane & 2**plane - 1) << shift
            start, shift = start + 2 * group_size * plane, shift + plane
        assert code == codes[channel, k]


@pytest.mark.parametrize("linear", [reference.lowbit_linear, kernel.lowbit_linear])
def test_what_does_not_fit_together_is_refused(linear: Callable[..., torch.Tensor]) -> None:
    packed, scales = make_weight(32, 128, 4, 64)
    x = torch.randn(3, 128)
    for bad, why in (
        ((x, packed, scales, 5, 64), "bits 5 .*2, 3, 4, 6, 8, mxfp4"),
        ((x, packed, scales, 6, 64), "no codes of 6 bits"),
        ((x, packed, scales, 4, 32), r"scales are float16 \[2, 2, 2, 16\]"),
        ((x, packed, scales, 4, 48), "group_size 48 .*power of two"),
        ((x, packed, scales, "mxfp4", 64), "group_size 64 .*32"),
        ((x[:, :64], packed, scales, 4, 64), "for 64 inputs"),
        ((x[0], packed, scales, 4, 64), r"x is float32 \[128\]"),
        ((x.double(), packed, scales, 4, 64), "float64"),
        ((x, packed[:24], scales, 4, 64), r"uint8 \[24, 64\]"),
        ((x, packed.T, scales, 4, 64), "pack_codes"),
        ((x, packed, scales.float(), 4, 64), "float16"),
    ):
        with pytest.raises(ValueError, match=why):
            linear(*bad)


@pytest.mark.parametrize("bits", BITS)
def test_a_cpu_dequantizes_where_it_has_no_kernel(
    bits: Bits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of rows, which change nothing."""
    weight, x = make_weight(80, 128, bits, 32), torch.randn(3, 128)
    monkeypatch.setattr(op, "is_loaded", lambda: False)
    whole = op.lowbit_linear(x, *weight, bits, 32)
    torch.testing.assert_close(whole, x @ reference.dequantize(*weight, bits, 32).T)
    monkeypatch.setattr(reference, "_BLOCK_WEIGHTS", 32 * 128)
    torch.testing.assert_close(op.lowbit_linear(x, *weight, bits, 32), whole)


def test_compiles_for_gpus(compile_kernels: Callable[..., list[dict[str, Any]]]) -> None:
    def multiply(bits: Bits, group_size: int, dtype: str, parts: str) -> dict[str, Any]:
        planes = reference.PLANES[bits]
        return {
            "kernel": "subspec_kernels.lowbit_linear.triton:_multiply",
            "signature": {
                "x": f"*{dtype}",
                "packed": "*u32",
                "scales": "*u8" if bits == "mxfp4" else "*fp16",
                "parts": f"*{parts}",
                **dict.fromkeys(("rows", "channels", "inputs", "steps"), "i32"),
            },
            "constexprs": {
                "LOW": planes[0],
                "HIGH": sum(planes[1:]),
                "MX": bits == "mxfp4",
                "OFFSET": reference.has_offset(bits),
                "GROUP": group_size,
                "BLOCK_INPUTS": min(group_size, 128),
                "BLOCK_CHANNELS": 64,
                "ROWS": 16,
            },
        }

    add_parts = {
        "kernel": "subspec_kernels.lowbit_linear.triton:_add_parts",
        "signature": {"parts": "*fp32", "y": "*bf16", "size": "i32"},
        "constexprs": {"SPLIT": 8, "BLOCK": 1024},
    }
    made = [multiply(4, 64, "bf16", "fp32"), multiply(3, 64, "fp16", "fp16")]
    made += [multiply("mxfp4", 32, "bf16", "bf16")]
    *products, _, _ = compile_kernels([*made, add_parts])
    for compiled in products:
        assert "mma.sync" in compiled["ptx"], "no tensor cores"
        assert "cp.async" in compiled["ptx"], "weights are not fetched ahead"
        assert ".ftz" not in compiled["ptx"], "MXFP4 is decoded by way of subnormals"
