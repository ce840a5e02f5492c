"""Quantizers: groups of weights -> integer codes with one scale and one zero point a group."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from vllm_subspec.errors import ConfigError, DependencyError

Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""``(q [groups, size], scale [groups, 1], zero [groups, 1])``, fp32; weight = (q - zero) * scale,
q whole in [0, 2**bits - 1], zero not rounded."""


def quantize_groups(quantizer: str, groups: torch.Tensor, bits: int) -> Codes:
    """Quantise each row of ``groups`` ([groups, size] fp32, CPU) by the named quantizer."""
    return _QUANTIZERS[quantizer](groups, bits)


def round_symmetric(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of ``groups`` ([groups, size] fp32, CPU) to the nearest level.

    Returns:
        Codes [groups, size] uint8 and scales [groups, 1] fp32 with fp16 values: weight =
        (code - half) * scale, half = 2**(bits - 1). A scale may be negative: a group's weight of
        largest magnitude takes code 0, the end of the range's longer side.
    """
    half = 2 ** (bits - 1)
    scale = symmetric_scale(*groups.aminmax(dim=1, keepdim=True), bits)
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (groups * inverse).round_().add_(half).clamp_(0, 2 * half - 1).to(torch.uint8), scale


def symmetric_scale(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales, fp32 with fp16 values, of groups with these extremes; see ``round_symmetric``."""
    extremes = torch.where(-low > high, low, high)
    return torch.div(extremes, -(2 ** (bits - 1))).half().float()


def quantizer_identity(quantizer: str) -> str:
    """The name, with the version where another package decides what comes out.

    Raises:
        DependencyError: that package is missing.
    """
    return f"hqq {_import('hqq').__version__}" if quantizer == "hqq" else quantizer


def check_quantizer(quantizer: str) -> None:
    """Raise ConfigError, listing the known ones, unless ``quantizer`` is known."""
    if quantizer not in _QUANTIZERS:
        known = ", ".join(sorted(_QUANTIZERS))
        raise ConfigError(f"quantizer {quantizer!r} is unknown; use one of: {known}")


def _half_quadratic(groups: torch.Tensor, bits: int) -> Codes:
    """HQQ, the quantizer of the paper (arXiv 2509.18344, its experiments): group-wise zero points
    that are refined for a robust reconstruction error, without data."""
    quantizer: Any = _import("hqq.core.quantize").Quantizer
    size = groups.shape[1]
    q, meta = quantizer.quantize(
        groups, nbits=bits, group_size=size, axis=1, optimize=True, bitpack=False, device="cpu"
    )
    return q, meta["scale"], meta["zero"]


def _round_to_nearest(groups: torch.Tensor, bits: int) -> Codes:
    """The group's minimum and maximum are the outermost levels, all else rounds to the nearest."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    top = 2**bits - 1
    scale = (high - low) / top
    scale.masked_fill_(scale == 0, 1)
    return ((groups - low) / scale).round_().clamp_(0, top), scale, -low / scale


def _import(module: str) -> ModuleType:
    # Late, since hqq.core takes seconds to import; by name, since it ships no types.
    try:
        import_module("hqq")
        return import_module(module)
    except ImportError as error:
        raise DependencyError(
            f"quantizer 'hqq' needs the hqq package, which cannot be imported ({error}); "
            "run `pip install hqq`, or set quantizer to 'rtn'"
        ) from error


_QUANTIZERS: dict[str, Callable[[torch.Tensor, int], Codes]] = {
    "hqq": _half_quadratic,
    "rtn": _round_to_nearest,
}
