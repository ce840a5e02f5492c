"""A linear by weights of 4, 6 or 8 bits: the memory layout and the maths, in plain torch.

A weight [out, in] is cut into blocks of 16 output channels and groups of ``group_size`` inputs.
A block is stored group after group; a group is stored in *quads*, 16 channels x 4 inputs, one byte
or a part of one a code:

- 8 bits: 64 bytes a quad, channel by channel;
- 4 bits: two quads share 64 bytes, the even one in the low nibbles;
- 6 bits: the low four bits of all the group's quads as above, then the high two bits, four quads
  in 64 bytes, the first in the lowest bits.

``scales`` has 16 channels of a group side by side. 4 bits: w = q * s + b, scales [out / 16,
in / group_size, 2, 16] hold s and b. 6 and 8 bits: w = (q - 2**(bits - 1)) * s, scales [out / 16,
in / group_size, 16] hold s.

Activations are rounded to int8 by row and group: x = a * t with t = max|x| / 127.
"""

from __future__ import annotations

import torch

CHANNELS = 16
"""Output channels of a block."""
BITS = (4, 6, 8)
_TINY = 1e-35  # a group of activations below it counts as zero: 127 / max|x| must stay finite


def pack_codes(codes: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Codes [out, in] uint8, in [0, 2**bits - 1] -> packed [out, in * bits / 8] uint8.

    out is a multiple of 16, in of ``group_size``, ``group_size`` of 16. The rows of the result are
    no output channels: it is one run of memory.
    """
    out_features, in_features = codes.shape
    quads = codes.view(out_features // CHANNELS, CHANNELS, -1, group_size // 4, 4)
    quads = quads.permute(0, 2, 3, 1, 4).reshape(-1, group_size // 4, 64)
    if bits == 8:
        return quads.view(out_features, in_features)
    pairs = quads.view(len(quads), -1, 2, 64)
    planes = [(pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)]
    if bits == 6:
        fours = (quads >> 4).view(len(quads), -1, 4, 64)
        low, high = fours[:, :, 0] | (fours[:, :, 1] << 2), fours[:, :, 2] | (fours[:, :, 3] << 2)
        planes.append(low | (high << 4))
    return torch.cat(planes, dim=1).view(out_features, -1)


def unpack_codes(packed: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The inverse of ``pack_codes``."""
    out_features = packed.shape[0]
    memory = packed.view(-1, group_size * bits // 32, 64)
    if bits == 8:
        quads = memory
    else:
        low = memory[:, : group_size // 8]
        quads = torch.stack([low & 15, low >> 4], dim=2).flatten(1, 2)
        if bits == 6:
            high = memory[:, group_size // 8 :]
            quads |= torch.stack([(high >> s & 3) << 4 for s in (0, 2, 4, 6)], 2).flatten(1, 2)
    quads = quads.view(out_features // CHANNELS, -1, group_size // 4, CHANNELS, 4)
    return quads.permute(0, 3, 1, 2, 4).reshape(out_features, -1)


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """The weight [out, in] that packed codes and scales stand for, fp32."""
    codes = unpack_codes(packed, bits, group_size).float()
    scale, offset = (part.repeat_interleave(group_size, dim=1) for part in _parts(scales, bits))
    return codes * scale + offset


def quantize_activations(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, in] -> whole numbers in [-127, 127] [M, in / group_size, group_size] and their scale
    [M, in / group_size], both fp32."""
    groups = x.float().view(len(x), -1, group_size)
    top = groups.abs().amax(dim=2)
    some = top > _TINY
    # A tensor of 127: a number over a tensor is computed as its reciprocal, rounded twice.
    inverse = torch.where(some, torch.full_like(top, 127) / top, 0)
    return (groups * inverse[..., None]).round(), torch.where(some, top / 127, 0)


def lowbit_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """x times the weight's transpose, with x rounded to int8.

    Args:
        x: [M, in], fp32, bf16 or fp16, finite.
        packed: what ``pack_codes`` gave.
        scales: fp16, see above.
        bits: 4, 6 or 8.
        group_size: inputs that share a scale.

    Returns:
        [M, out] in x's dtype, accumulated in fp32.
    """
    rounded, step = quantize_activations(x, group_size)
    codes = unpack_codes(packed, bits, group_size).float().view(packed.shape[0], -1, group_size)
    scale, offset = _parts(scales, bits)
    dots = torch.einsum("mgk,ngk->mng", rounded, codes)  # whole numbers below 2**24: exact
    sums = rounded.sum(dim=2)[:, None]
    groups = (dots * scale + sums * offset) * step[:, None]
    return groups.sum(dim=2).to(x.dtype)


def _parts(scales: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, offset), each [out, in / group_size] fp32: w = q * scale + offset."""
    if bits == 4:
        scale, offset = (part.transpose(1, 2).flatten(0, 1) for part in scales.float().unbind(2))
        return scale, offset
    scale = scales.float().transpose(1, 2).flatten(0, 1)
    return scale, -(2 ** (bits - 1)) * scale
