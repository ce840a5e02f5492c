"""MXFP4: 4-bit floats, 32 of which share a power of two (OCP Microscaling Formats, 1.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from subspec_kernels.lowbit_linear.reference import E2M1

from vllm_subspec.shadow.packing import BlockGroups

if TYPE_CHECKING:
    from vllm_subspec.shadow.formats import ShadowSettings

_BIAS, _NAN = 127, 255  # of E8M0
_TOP_EXPONENT = 2  # of E2M1's largest value, 6


class MicroscalingGroups(BlockGroups):
    """E2M1 elements with an E8M0 scale for 32 inputs: w = element * 2**(e - 127).

    Scales are made as the specification proposes (its section 6.3), elements are rounded to the
    nearest, ties to even. A group that is not finite gets the scale NaN.
    """

    label = "MXFP4"

    def __init__(self) -> None:
        super().__init__("mxfp4")

    def recipe(self, settings: ShadowSettings) -> str:
        return "mxfp4 nearest"

    def is_finite(self, scales: torch.Tensor) -> bool:
        return bool((scales != _NAN).all())

    def codes(
        self, groups: torch.Tensor, settings: ShadowSettings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return round_mxfp4(groups)


def round_mxfp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 and exponents [groups, 1] uint8 of ``groups`` [groups, 32], fp32."""
    top = groups.abs().amax(dim=1, keepdim=True)
    # frexp's mantissa is in [0.5, 1): its exponent is one above the floor of the logarithm.
    floor = torch.frexp(top).exponent - 1
    exponents = (floor - _TOP_EXPONENT + _BIAS).clamp_(0, _NAN - 1).to(torch.uint8)
    exponents[top == 0] = 0
    elements = groups / exponents.view(torch.float8_e8m0fnu).float()
    codes = torch.bucketize(elements.abs(), _edges(), out_int32=True) | (elements < 0).int() << 3
    exponents[~top.isfinite()] = _NAN
    return codes.to(torch.uint8), exponents


def _edges() -> torch.Tensor:
    """Between neighbouring magnitudes. ``bucketize`` rounds what lies on one down, to the lower
    code: where that is odd, the edge is the next number below, so that it goes up."""
    levels = torch.tensor(E2M1)
    edges = (levels[1:] + levels[:-1]) / 2
    edges[1::2] = torch.nextafter(edges[1::2], torch.zeros(()))
    return edges
