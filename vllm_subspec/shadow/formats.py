"""How a shadow stores its weights, and the CPU kernels that multiply by them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.files import tensor_digest
from vllm_subspec.shadow.quantizers import check_quantizer, quantize_groups, quantizer_identity

GROUP_SIZES = (32, 64, 128, 256)
_BLOCK_WEIGHTS = 1 << 18


@dataclass(frozen=True)
class ShadowSettings:
    """How to make shadows.

    Args:
        bits: a registered width: 4 (asymmetric groups) or 8 (symmetric output channels).
        group_size: weights that share a scale at 4 bits; 8 bits have one scale a channel.
        quantizer: "hqq" or "rtn" (round to nearest) at 4 bits; 8 bits always round to nearest.

    Raises:
        ConfigError: one of them is unknown.
    """

    bits: int
    group_size: int
    quantizer: str

    def __post_init__(self) -> None:
        shadow_format(self.bits)
        check_quantizer(self.quantizer)
        if self.group_size not in GROUP_SIZES:
            known = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size {self.group_size!r} is unknown; use one of: {known}")


class ShadowFormat(ABC):
    """One way to store a linear [out, in] in few bits. Stateless; a registry holds one of each.

    ``packed`` is [out, in * bits / 8] of ``packed_dtype``; ``scales`` has the activations' dtype.
    """

    bits: int
    packed_dtype: torch.dtype

    @abstractmethod
    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        """Why the kernel cannot serve this shape, or None where it can."""

    @abstractmethod
    def recipe(self, settings: ShadowSettings) -> str:
        """All that decides the stored bytes, beside weights and dtype (raises DependencyError)."""

    @abstractmethod
    def scales_shape(self, out_features: int, in_features: int, group_size: int) -> tuple[int, ...]:
        """The shape of ``scales``."""

    @abstractmethod
    def quantize(
        self, weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(packed, scales)`` of a weight [out, in] that ``refusal`` lets pass."""

    @abstractmethod
    def matmul(
        self, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group_size: int
    ) -> torch.Tensor:
        """x [M, in] (contiguous, dtype of ``scales``) times the weight's transpose: [M, out]."""


class Int4Groups(ShadowFormat):
    """w = (q - 8) * s + z with q in [0, 15]; ``scales`` [in / group_size, out, 2] holds (s, z)."""

    bits = 4
    packed_dtype = torch.uint8

    def refusal(self, out_features: int, in_features: int, group_size: int) -> str | None:
        if out_features % 16:
            return "its out_features are no multiple of 16"
        if in_features % group_size:
            return f"its in_features are no multiple of group_size {group_size}"
        return None

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
        return torch._weight_int4pack_mm_for_cpu(x, packed, group_size, scales)


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
        return torch._weight_int8pack_mm(x, packed, scales)


_FORMATS: dict[int, ShadowFormat] = {fmt.bits: fmt for fmt in (Int4Groups(), Int8Channels())}


def shadow_format(bits: int) -> ShadowFormat:
    """The format of a width in bits.

    Raises:
        ConfigError: no format has it; the known ones are listed.
    """
    if (found := _FORMATS.get(bits)) is None:
        known = ", ".join(map(str, sorted(_FORMATS)))
        raise ConfigError(f"bits {bits!r} is unknown; use one of: {known}")
    return found


def check_shape(out_features: int, in_features: int, settings: ShadowSettings, name: str) -> None:
    """Raise UnsupportedError, naming what would do, unless a kernel serves this linear."""
    why = shadow_format(settings.bits).refusal(out_features, in_features, settings.group_size)
    if why is None:
        return
    fixes = []
    for bits, fmt in _FORMATS.items():
        sizes = [g for g in GROUP_SIZES if fmt.refusal(out_features, in_features, g) is None]
        if bits == settings.bits and sizes:
            fixes.append("set group_size to " + " or ".join(map(str, sizes)))
        elif settings.group_size in sizes:
            fixes.append(f"set bits to {bits}")
    fixes.append("keep this layer resident")
    raise UnsupportedError(
        f"{name}: no {settings.bits}-bit kernel serves a weight of shape "
        f"[{out_features}, {in_features}], since {why}; {', or '.join(fixes)}"
    )


def _row_blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Row ranges of about ``_BLOCK_WEIGHTS`` weights: a quantizer holds several fp32 copies of
    what it works on, and is faster in the processor's cache."""
    step = max(1, _BLOCK_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)


@cache
def _int4_layout() -> str:
    """Fingerprint of how this processor's kernel orders packed codes (AVX2, AVX-512 and plain
    differ), so that a cache shared by machines is never read in another's order."""
    row, column = torch.arange(208, dtype=torch.int32)[:, None], torch.arange(64)[None]
    codes = (7 * row + 3 * column**2 + row * column + 5 * (row // 16)) % 16
    return tensor_digest(torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1))[:16]
