"""A linear by weights of few bits: the memory layout and the maths, in plain torch.

One layout serves every device. A weight [out, in] is cut into blocks of 16 output channels and
groups of ``group_size`` inputs. A block is stored group after group; a group is stored in *quads*,
16 channels x 4 inputs, one byte or a part of one a code, channel by channel:

- a plane of w bits puts 8 / w quads in 64 bytes, the first in the lowest bits;
- codes of 2, 4 and 8 bits are one such plane; 3 bits are the low two bits of all the group's quads,
  then the high bit; 6 bits are the low four, then the high two.

``scales`` has 16 channels of a group side by side:

| bits | weight | scales |
|---|---|---|
| 2, 3, 4 | q * s + b | fp16 [out / 16, in / group_size, 2, 16]: s and b |
| 6, 8 | (q - 2**(bits - 1)) * s | fp16 [out / 16, in / group_size, 16]: s |
| "mxfp4" | E2M1 of the code * 2**(e - 127) | uint8 [out / 16, in / 32, 16]: e (E8M0) |

MXFP4 is that of the OCP Microscaling Formats specification, version 1.0: a code's highest bit is
the sign, then two bits of exponent and one of mantissa; groups are of 32. e = 255 stands for NaN.
"""

from __future__ import annotations

from typing import Literal

import torch

Bits = int | Literal["mxfp4"]

CHANNELS = 16
"""Output channels of a block."""
BITS: tuple[Bits, ...] = (2, 3, 4, 6, 8, "mxfp4")
NATIVE_BITS = (4, 6, 8)
"""What the CPU's native op multiplies by."""
MX_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of MXFP4's codes 0 to 7; codes 8 to 15 are their negatives."""
PLANES: dict[Bits, tuple[int, ...]] = {
    2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,), "mxfp4": (4,)
}  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_WEIGHTS = 1 << 20  # dequantised at once
_TINY = 1e-35  # a group of activations below it counts as zero: 127 / max|x| must stay finite


def code_bits(bits: Bits) -> int:
    """Bits of one code."""
    return sum(PLANES[bits])


def has_offset(bits: Bits) -> bool:
    """Whether a group has an offset b beside its scale."""
    return bits in (2, 3, 4)


def scales_shape(
    out_features: int, in_features: int, bits: Bits, group_size: int
) -> tuple[int, ...]:
    """The shape of ``scales``."""
    pair = (2,) if has_offset(bits) else ()
    return out_features // CHANNELS, in_features // group_size, *pair, CHANNELS


def scales_dtype(bits: Bits) -> torch.dtype:
    """The dtype of ``scales``."""
    return torch.uint8 if bits == "mxfp4" else torch.float16


def pack_codes(codes: torch.Tensor, bits: Bits, group_size: int) -> torch.Tensor:
    """Codes [out, in] uint8, in [0, 2**bits - 1] -> packed [out, in * bits / 8] uint8.

    out is a multiple of 16, in of ``group_size``, ``group_size`` of 32. The rows of the result are
    no output channels: it is one run of memory.
    """
    out_features = codes.shape[0]
    quads = codes.view(out_features // CHANNELS, CHANNELS, -1, group_size // 4, 4)
    quads = quads.permute(0, 2, 3, 1, 4).reshape(-1, group_size // 4, 64)
    planes, shift = [], 0
    for width in PLANES[bits]:
        parts = (quads >> shift & (2**width - 1)).view(len(quads), -1, 8 // width, 64)
        plane = torch.zeros_like(parts[:, :, 0])
        for part in range(8 // width):
            plane |= parts[:, :, part] << part * width
        planes.append(plane)
        shift += width
    return torch.cat(planes, dim=1).view(out_features, -1)


def unpack_codes(packed: torch.Tensor, bits: Bits, group_size: int) -> torch.Tensor:
    """The inverse of ``pack_codes``."""
    out_features = packed.shape[0]
    memory = packed.view(-1, group_size * code_bits(bits) // 32, 64)
    quads = torch.zeros_like(memory[:, :1]).repeat(1, group_size // 4, 1)
    shift, start = 0, 0
    for width in PLANES[bits]:
        stop = start + group_size * width // 32
        parts = [memory[:, start:stop] >> s & (2**width - 1) for s in range(0, 8, width)]
        quads |= torch.stack(parts, dim=2).flatten(1, 2) << shift
        shift, start = shift + width, stop
    quads = quads.view(out_features // CHANNELS, -1, group_size // 4, CHANNELS, 4)
    return quads.permute(0, 3, 1, 2, 4).reshape(out_features, -1)


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, bits: Bits, group_size: int
) -> torch.Tensor:
    """The weight [out, in] that packed codes and scales stand for, fp32."""
    codes = unpack_codes(packed, bits, group_size)
    if bits == "mxfp4":
        levels = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
        values = levels[codes.int()]
    else:
        values = codes.float()
    scale, offset = (part.repeat_interleave(group_size, dim=1) for part in _parts(scales, bits))
    return values * scale + offset


def lowbit_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: Bits, group_size: int
) -> torch.Tensor:
    """x times the weight's transpose.

    The weight is dequantised some rows at a time, never whole: this is slow, and takes a few MiB.

    Args:
        x: [M, in], fp32, bf16 or fp16.
        packed: what ``pack_codes`` gave.
        scales: see above.
        bits: 2, 3, 4, 6, 8 or "mxfp4".
        group_size: inputs that share a scale.

    Returns:
        [M, out] in x's dtype, accumulated in fp32 and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    check(x, packed, scales, bits, group_size)
    out_features, in_features = packed.shape[0], x.shape[1]
    step = max(1, _BLOCK_WEIGHTS // max(1, CHANNELS * in_features)) * CHANNELS
    y = x.new_empty(len(x), out_features)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        block = scales[start // CHANNELS : stop // CHANNELS]
        weight = dequantize(packed[start:stop], block, bits, group_size)
        y[:, start:stop] = x.float() @ weight.T
    return y


def round_activations(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """What the CPU's native op makes of x [M, in] before it multiplies: fp32 of the same shape.

    Each row's groups are rounded to a * t with whole a in [-127, 127] and t = max|x| / 127, so that
    products of integers do the work.
    """
    groups = x.float().view(len(x), -1, group_size)
    top = groups.abs().amax(dim=2, keepdim=True)
    some = top > _TINY
    # A tensor of 127: a number over a tensor is computed as its reciprocal, rounded twice.
    inverse = torch.where(some, torch.full_like(top, 127) / top, 0)
    return ((groups * inverse).round() * torch.where(some, top / 127, 0)).view(x.shape)


def check(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: Bits, group_size: int
) -> None:
    """Raise ValueError, naming the value, unless ``lowbit_linear``'s arguments fit together."""
    if bits not in PLANES:
        raise ValueError(f"bits {bits!r} is unknown; use one of: {', '.join(map(str, BITS))}")
    if group_size < 32 or group_size & (group_size - 1) or (bits == "mxfp4" and group_size != 32):
        fix = "32, as MXFP4 is defined" if bits == "mxfp4" else "a power of two from 32 on"
        raise ValueError(f"group_size {group_size} has no layout; use {fix}")
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x is {_describe(x)}; give a float32, bfloat16 or float16 matrix")
    if packed.dim() != 2 or packed.dtype != torch.uint8 or not packed.is_contiguous():
        raise ValueError(f"packed is {_describe(packed)}; give what `pack_codes` returned")
    out_features, in_features = packed.shape[0], x.shape[1]
    if (
        out_features % CHANNELS
        or in_features % group_size
        or packed.shape[1] * 8 != in_features * code_bits(bits)
    ):
        raise ValueError(
            f"packed is {_describe(packed)}, which holds no codes of {bits!r} bits in groups of "
            f"{group_size} for {in_features} inputs; give the bits and group_size it was made with"
        )
    shape, dtype = scales_shape(out_features, in_features, bits, group_size), scales_dtype(bits)
    if scales.shape != shape or scales.dtype != dtype or not scales.is_contiguous():
        raise ValueError(
            f"scales are {_describe(scales)}; a weight [{out_features}, {in_features}] of "
            f"{bits!r} bits has contiguous {_name(dtype)} {list(shape)}"
        )


def _parts(scales: torch.Tensor, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset), each [out, in / group_size] fp32: w = value * scale + offset."""
    if has_offset(bits):
        scale, offset = (part.transpose(1, 2).flatten(0, 1) for part in scales.float().unbind(2))
        return scale, offset
    if bits == "mxfp4":
        scale = scales.view(torch.float8_e8m0fnu).float().transpose(1, 2).flatten(0, 1)
        return scale, torch.zeros_like(scale)
    assert isinstance(bits, int)
    scale = scales.float().transpose(1, 2).flatten(0, 1)
    return scale, -(2 ** (bits - 1)) * scale


def _describe(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
