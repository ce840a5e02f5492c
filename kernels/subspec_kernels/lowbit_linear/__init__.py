"""The low-bit linear of a draft step: native as ``torch.ops.subspec.lowbit_linear``
(``subspec_kernels.native``), and in plain torch as the reference."""

from subspec_kernels.lowbit_linear.reference import (
    BITS,
    CHANNELS,
    dequantize,
    pack_codes,
)

__all__ = ["BITS", "CHANNELS", "dequantize", "pack_codes"]
