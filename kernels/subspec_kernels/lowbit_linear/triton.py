# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A linear by weights of few bits, for the few rows of a draft step, on a GPU.

Per call each program reads its channels' codes once (bits / 8 bytes a weight), their scales (2 or 4
bytes a group) and the rows of x, and writes [rows, channels]; 16 rows share one reading. So it is
bound by the bandwidth of memory: in * out * bits / 8 bytes take that long at least, however many of
the 16 rows there are. Where there are too few channels to keep a GPU busy, the inputs are split
among programs, which add a workspace of [split, rows, out] fp32, written and read once.

Codes are whole numbers of at most 8 bits, exact in bf16 and fp16, so the tensor cores multiply x by
the codes themselves, and a group's scale and offset are applied to its sum in fp32. Nothing but the
result is rounded. The price is 7 to 14 instructions a weight and 16 rows (counted for sm_90), which
a GPU with much bandwidth for its arithmetic may feel before its memory: this is unmeasured. Rows in
fp32 use no tensor cores: they are there to check others.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from subspec_kernels.lowbit_linear.reference import PLANES, Bits, check, has_offset

_ROWS = 16  # a tensor core's least
_PROGRAMS = 512  # about four for each of a large GPU's processors
_LEAST_STEPS = 4  # of a program, or splitting costs more than it brings
_REDUCED = 1024  # results of a program that adds the parts


def lowbit_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: Bits, group_size: int
) -> torch.Tensor:
    """``reference.lowbit_linear`` of the same arguments, on a GPU; made for 1 to 16 rows.

    Sums are taken in a fixed order: equal calls give equal results.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    check(x, packed, scales, bits, group_size)
    x = x.contiguous()
    (rows, inputs), channels = x.shape, packed.shape[0]
    y = x.new_empty(rows, channels)
    if y.numel() == 0 or inputs == 0:
        return y.zero_()
    steps, block_channels, split = _cut(channels, inputs, group_size)
    parts = y if split == 1 else x.new_empty(split, rows, channels, dtype=torch.float32)
    grid = (triton.cdiv(channels, block_channels), split, triton.cdiv(rows, _ROWS))
    _multiply[grid](
        x,
        packed.view(torch.uint32),
        scales,
        parts,
        rows,
        channels,
        inputs,
        triton.cdiv(steps, split),
        LOW=PLANES[bits][0],
        HIGH=sum(PLANES[bits][1:]),
        MX=bits == "mxfp4",
        OFFSET=has_offset(bits),
        GROUP=group_size,
        BLOCK_INPUTS=_block_inputs(group_size),
        BLOCK_CHANNELS=block_channels,
        ROWS=_ROWS,
        num_warps=4,
    )
    if split > 1:
        _add_parts[(triton.cdiv(y.numel(), _REDUCED),)](
            parts, y, y.numel(), SPLIT=split, BLOCK=_REDUCED
        )
    return y


def _block_inputs(group_size: int) -> int:
    return min(group_size, 128)


def _cut(channels: int, inputs: int, group_size: int) -> tuple[int, int, int]:
    """(steps along the inputs, channels of a program, programs that share the inputs)."""
    steps = inputs // _block_inputs(group_size)
    block_channels = 64 if channels >= 64 else triton.next_power_of_2(channels)
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(channels, block_channels))
    split = max(1, min(wanted, steps // _LEAST_STEPS, 16))
    return steps, block_channels, split


@triton.jit
def _spread(words, SHIFT: tl.constexpr):
    """[n, channels] -> [2 n, channels]: each row, then the same shifted right."""
    both = tl.permute(tl.join(words, words >> SHIFT), (0, 2, 1))
    return tl.reshape(both, (2 * words.shape[0], words.shape[1]))


@triton.jit
def _plane(packed, at, inside, WIDTH: tl.constexpr, INPUTS: tl.constexpr):
    """Codes [INPUTS, channels] of one plane.

    ``at`` [channels] are the words where the channels' planes start; others than ``inside`` are not
    read. A word has 4 inputs of a channel in its bytes, and in a byte as many quads as fit: so each
    bit of an input's index within a word is a shift of its own, the highest first.
    """
    word = tl.arange(0, INPUTS * WIDTH // 32)
    codes = tl.load(packed + (at[None, :] + word[:, None] * 16), mask=inside[None, :], other=0)
    if WIDTH <= 1:
        codes = _spread(codes, 4 * WIDTH)
    if WIDTH <= 2:
        codes = _spread(codes, 2 * WIDTH)
    if WIDTH <= 4:
        codes = _spread(codes, WIDTH)
    codes = _spread(codes, 16)
    codes = _spread(codes, 8)
    return codes & ((1 << WIDTH) - 1)


@triton.jit
def _multiply(
    x,  # [rows, inputs]
    packed,  # [channels, inputs * bits / 32] uint32: runs of 16 channels
    scales,  # [channels / 16, inputs / GROUP, 1 or 2, 16] fp16, or uint8 where MX
    parts,  # [split, rows, channels]
    rows,
    channels,
    inputs,
    steps,  # of one program
    LOW: tl.constexpr,  # bits of the planes
    HIGH: tl.constexpr,
    MX: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    has_channel, has_row = channel < channels, row < rows
    block, lane = (channel // 16).to(tl.int64), channel % 16
    BITS: tl.constexpr = LOW + HIGH
    GROUP_WORDS: tl.constexpr = GROUP * BITS // 2  # of 16 channels
    PAIR: tl.constexpr = 32 if OFFSET else 16
    words = block * (inputs // GROUP * GROUP_WORDS) + lane
    scale_at = block * (inputs // GROUP * PAIR) + lane
    x_at = row[:, None].to(tl.int64) * inputs + tl.arange(0, BLOCK_INPUTS)[None, :]

    total = tl.zeros((ROWS, BLOCK_CHANNELS), dtype=tl.float32)
    first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, inputs // BLOCK_INPUTS)
    for step in tl.range(first, last, num_stages=4):
        start = step * BLOCK_INPUTS
        group, inside = start // GROUP, start % GROUP
        at = words + (group * GROUP_WORDS + inside * LOW // 2)
        codes = _plane(packed, at, has_channel, LOW, BLOCK_INPUTS)
        if HIGH:
            at = words + (group * GROUP_WORDS + GROUP * LOW // 2 + inside * HIGH // 2)
            codes |= _plane(packed, at, has_channel, HIGH, BLOCK_INPUTS) << LOW
        scale = tl.load(scales + (scale_at + group * PAIR), mask=has_channel, other=0)
        if MX:
            # The magnitude's bits under fp32's exponent of another bias, 2**126 times too small.
            bits = (codes & 8) << 28 | (codes & 7) << 22
            weights = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
            exponent = scale.to(tl.uint32)
            power = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2**-127 is subnormal
            power = tl.where(exponent == 255, 0x7FC00000, power)
            factor = power.to(tl.float32, bitcast=True)
        else:
            # 2**23 + code by its bits: a GPU converts integers at a quarter of its speed or less.
            shifted = (codes | 0x4B000000).to(tl.float32, bitcast=True)
            weights = shifted - (8388608.0 if OFFSET else 8388608.0 + (1 << BITS - 1))
            factor = scale.to(tl.float32)
        values = tl.load(x + (x_at + start), mask=has_row[:, None], other=0.0)
        products = tl.dot(values, weights.to(values.dtype), input_precision="ieee")
        total += products * factor[None, :]
        if OFFSET:
            offset = tl.load(scales + (scale_at + group * PAIR + 16), mask=has_channel, other=0)
            sums = tl.sum(values.to(tl.float32), axis=1)
            total += sums[:, None] * offset.to(tl.float32)[None, :]

    out = (tl.program_id(1).to(tl.int64) * rows + row[:, None]) * channels + channel[None, :]
    inside_both = has_row[:, None] & has_channel[None, :]
    tl.store(parts + out, total.to(parts.dtype.element_ty), mask=inside_both)


@triton.jit
def _add_parts(parts, y, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y [size] is the sum of parts [SPLIT, size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * size.to(tl.int64) + at, mask=at < size, other=0.0)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < size)
