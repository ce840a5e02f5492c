"""The low-bit linear of a draft step (arXiv 2509.18344, its substitute layers), by device."""

from __future__ import annotations

import torch

from subspec_kernels.lowbit_linear import reference
from subspec_kernels.lowbit_linear.reference import (
    BITS,
    CHANNELS,
    MX_GROUP,
    NATIVE_BITS,
    Bits,
    code_bits,
    dequantize,
    has_offset,
    pack_codes,
    round_activations,
    scales_dtype,
    scales_shape,
)
from subspec_kernels.native import is_loaded

__all__ = [
    "BITS",
    "CHANNELS",
    "MX_GROUP",
    "NATIVE_BITS",
    "Bits",
    "code_bits",
    "dequantize",
    "has_offset",
    "lowbit_linear",
    "pack_codes",
    "round_activations",
    "scales_dtype",
    "scales_shape",
]


def lowbit_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: Bits, group_size: int
) -> torch.Tensor:
    """``reference.lowbit_linear``, by Triton on a GPU and by the native op on a CPU that has it.

    The native op multiplies by 4, 6 and 8 bits, and by ``round_activations(x, group_size)`` instead
    of x: integers are several times faster there. Without it a CPU dequantises, which is slow.
    """
    if x.is_cuda:
        from subspec_kernels.lowbit_linear import triton

        return triton.lowbit_linear(x, packed, scales, bits, group_size)
    if bits in NATIVE_BITS and is_loaded():
        # Named by its overload: choosing one among them costs as much as the call.
        linear = torch.ops.subspec.lowbit_linear.default
        y: torch.Tensor = linear(x, packed, scales, bits, group_size)
        return y
    return reference.lowbit_linear(x, packed, scales, bits, group_size)
