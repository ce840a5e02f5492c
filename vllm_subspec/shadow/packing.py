"""How a shadow stores its weights, and the kernels that multiply by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from subspec_kernels import lowbit_linear
from subspec_kernels.lowbit_linear import Bits

from vllm_subspec.files import tensor_digest
from vllm_subspec.shadow.quantizers import (
    quantize_groups,
    quantizer_identity,
    round_symmetric,
)

if TYPE_CHECKING:
    from vllm_subspec.shadow.formats import ShadowSettings

_BLOCK_WEIGHTS = 1 << 18
_PROBE_ROWS = 256


class ShadowFormat(ABC):
    """One way to store a linear [out, in] in few bits. Stateless; a registry holds one of each.

    ``packed`` is [out, in * bits / 8] of ``packed_dtype``.

    Attributes:
        bits: of a code.
        has_kernel: whether a CPU multiplies by the codes. If not, each use dequantises the weight,
            some rows at a time: that serves experiments on quality, never speed.
    """

    bits: int
    packed_dtype: torch.dtype
    has_kernel = True

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.bits}-bit"

    @abstractmethod
    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        """Why the kernel cannot serve this shape, or None where it can."""

    @abstractmethod
    def recipe(self, settings: ShadowSettings) -> str:
        """All that decides the stored bytes, beside the weights and the scales' dtype.

        Raises:
            DependencyError: the quantizer's package is missing.
        """

    @abstractmethod
    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
        """The shape of ``scales``."""

    def scales_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of ``scales`` for activations of ``dtype``."""
        return dtype

    def is_finite(self, scales: torch.Tensor) -> bool:
        """Whether the weight that ``quantize`` took was finite and not too large."""
        return bool(torch.isfinite(scales).all())

    @abstractmethod
    def quantize(
        self, weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(packed, scales)`` of a weight [out, in] that ``refusal`` lets pass, for activations
        of ``dtype``."""

    @abstractmethod
    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        """x [M, in] (contiguous) times the weight's transpose: [M, out] of x's dtype."""

    @abstractmethod
    def dequantize(
        self, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        """The weight [out, in] that ``matmul`` multiplies by, fp32 and exact. For checks: slow."""


class BlockGroups(ShadowFormat):
    """Codes in the layout of ``subspec_kernels.lowbit_linear``, one for all devices.

    Activations may be fp32, bf16 or fp16; the CPU's native kernel rounds them to int8. Scales are
    fp16. 2, 3 and 4 bits: w = q * s + b. 6 and 8 bits: w = (q - half) * s, half = 2**(bits - 1).
    """

    packed_dtype = torch.uint8

    def __init__(self, kind: Bits) -> None:
        self.kind, self.bits = kind, lowbit_linear.code_bits(kind)
        self.has_kernel = kind in lowbit_linear.NATIVE_BITS

    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        return _group_refusal(out_features, in_features, group_size)

    def recipe(self, settings: ShadowSettings) -> str:
        symmetric = not lowbit_linear.has_offset(self.kind)
        quantizer = "rtn" if symmetric else quantizer_identity(settings.quantizer)
        return f"native int{self.bits} {quantizer} group {settings.group_size}"

    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
        return lowbit_linear.scales_shape(out_features, in_features, self.kind, group_size)

    def scales_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return lowbit_linear.scales_dtype(self.kind)

    def quantize(
        self, weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, channels = settings.group_size, lowbit_linear.CHANNELS
        out_features, in_features = weight.shape
        packed = torch.empty(out_features, in_features * self.bits // 8, dtype=torch.uint8)
        shape = self.scales_shape(out_features, in_features, size)
        scales = torch.empty(shape, dtype=self.scales_dtype(dtype))
        for rows in _row_blocks(weight, multiple=channels):
            codes, parts = self.codes(weight[rows].float().reshape(-1, size), settings)
            blocks = slice(rows.start // channels, rows.stop // channels)
            packed[rows], scales[blocks] = self.pack(
                codes.view(-1, in_features), parts.view(-1, in_features // size, parts.shape[1])
            )
        return packed, scales

    def codes(
        self, groups: torch.Tensor, settings: ShadowSettings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes uint8 and [groups, part] scales of ``groups`` [groups, size] fp32, for ``pack``."""
        if lowbit_linear.has_offset(self.kind):
            return _asymmetric(groups, settings.quantizer, self.bits)
        return round_symmetric(groups, self.bits)

    def pack(self, codes: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(packed, scales)`` of codes [out, in] uint8 and of their groups' scales, ``parts``
        [out, in / group_size, part]: (s, b) where there is an offset, else one."""
        out_features, num_groups, num_parts = parts.shape
        packed = lowbit_linear.pack_codes(codes, self.kind, codes.shape[1] // num_groups)
        # [channel, group, part] -> [group, part, channel] in each block of channels.
        blocks = parts.view(-1, lowbit_linear.CHANNELS, num_groups, num_parts).permute(0, 2, 3, 1)
        shape = self.scales_shape(out_features, num_groups, 1)
        return packed, blocks.reshape(shape).to(lowbit_linear.scales_dtype(self.kind)).contiguous()

    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        return lowbit_linear.lowbit_linear(x, packed, scales, self.kind, group_size)

    def dequantize(
        self, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        return lowbit_linear.dequantize(packed, scales, self.kind, group_size)


class Int4Groups(ShadowFormat):
    """w = (q - 8) * s + z with q in [0, 15]; ``scales`` [in / group_size, out, 2] holds (s, z)."""

    bits = 4
    packed_dtype = torch.uint8

    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        return _group_refusal(out_features, in_features, group_size)

    def recipe(self, settings: ShadowSettings) -> str:
        identity = quantizer_identity(settings.quantizer)
        return f"int4 {identity} group {settings.group_size} layout {_int4_layout()}"

    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
        return in_features // group_size, out_features, 2

    def quantize(
        self, weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = settings.group_size
        out_features, in_features = weight.shape
        codes = torch.empty(out_features, in_features, dtype=torch.int32)
        scales = torch.empty(self.scales_shape(out_features, in_features, size), dtype=dtype)
        for rows in _row_blocks(weight):
            groups = weight[rows].float().reshape(-1, size)
            q, scale, zero = quantize_groups(settings.quantizer, groups, self.bits)
            # The kernel's z is the value of code 8. A group whose codes are all one is stored as
            # that one value instead: its scale is arbitrary (HQQ takes 1 for a range below 1e-4),
            # and z = value + 8 would lose the value in bf16.
            uniform = (q == q[:, :1]).all(dim=1, keepdim=True)
            centre = torch.where(uniform, q[:, :1], 8)
            pairs = torch.cat([scale, (centre - zero) * scale], dim=1)
            scales[:, rows] = pairs.view(-1, scales.shape[0], 2).transpose(0, 1)
            codes[rows] = (q - centre + 8).view(-1, in_features)
        return torch._convert_weight_to_int4pack_for_cpu(codes, 1), scales

    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        # Their CPU kernels are 20-40 times slower in fp32 and fp16 than in bf16.
        y = torch._weight_int4pack_mm_for_cpu(x.to(scales.dtype), packed, group_size, scales)
        return y.to(x.dtype)

    def dequantize(
        self, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        # By feeding the kernel unit vectors, since only torch knows its packing.
        units = torch.split(torch.eye(2 * packed.shape[1], dtype=torch.float32), _PROBE_ROWS)
        columns = [self.matmul(unit, packed, scales.float(), group_size).T for unit in units]
        return torch.cat(columns, dim=1)


class Int8Channels(ShadowFormat):
    """w = q * s with q in [-127, 127]; ``scales`` [out] holds s."""

    bits = 8
    packed_dtype = torch.int8

    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        # torch does not check it: the bf16 kernel steps by 16 and reads past the rows' end.
        return "its in_features are no multiple of 16" if in_features % 16 else None

    def recipe(self, settings: ShadowSettings) -> str:
        return "int8 rtn channels"

    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
        return (out_features,)

    def quantize(
        self, weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0], dtype=dtype)
        for rows in _row_blocks(weight):
            block = weight[rows].float()
            scale = (block.abs().amax(dim=1, keepdim=True) / 127).to(dtype)
            scale.masked_fill_(scale == 0, 1)
            packed[rows] = (block / scale.float()).round_().clamp_(-127, 127)
            scales[rows] = scale.view(-1)
        return packed, scales

    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        return torch._weight_int8pack_mm(x.to(scales.dtype), packed, scales).to(x.dtype)

    def dequantize(
        self, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        return packed.float() * scales.float()[:, None]


def _group_refusal(out_features: int, in_features: int, group_size: int) -> str | None:
    if out_features % 16:
        return "its out_features are no multiple of 16"
    if in_features % group_size:
        return f"its in_features are no multiple of group_size {group_size}"
    return None


def _asymmetric(
    groups: torch.Tensor, quantizer: str, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and [groups, 2] (s, b) of ``groups`` [groups, size]: w = q * s + b."""
    q, scale, zero = quantize_groups(quantizer, groups, bits)
    # A group whose codes are all one is stored as that one value: its scale is arbitrary (HQQ
    # takes 1 for a range below 1e-4), so q * s + b would lose the value in fp16.
    uniform = (q == q[:, :1]).all(dim=1, keepdim=True)
    base = torch.where(uniform, q[:, :1], 0)
    return (q - base).to(torch.uint8), torch.cat([scale, (base - zero) * scale], dim=1)


def _row_blocks(weight: torch.Tensor, multiple: int = 1) -> Iterator[slice]:
    """Row ranges of about ``_BLOCK_WEIGHTS`` weights, a multiple of rows: a quantizer holds several
    fp32 copies of what it works on, and is faster in the processor's cache."""
    rows = weight.shape[0]
    step = max(1, _BLOCK_WEIGHTS // weight.shape[1] // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


@cache
def _int4_layout() -> str:
    """Fingerprint of how this processor's kernel orders packed codes (AVX2, AVX-512 and plain
    differ), so that a cache shared by machines is never read in another's order."""
    row, column = torch.arange(208, dtype=torch.int32)[:, None], torch.arange(64)[None]
    codes = (7 * row + 3 * column**2 + row * column + 5 * (row // 16)) % 16
    return tensor_digest(torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1))[:16]
