"""A shadow linear: one of the target's linears in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vllm_subspec.errors import ShadowCacheError, UnsupportedError
from vllm_subspec.shadow.formats import ShadowSettings, check_shape, shadow_format
from vllm_subspec.shadow.packing import ShadowFormat

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ShadowLinear:
    """Stands in for one of the target's linears while drafting (arXiv 2509.18344, its substitute
    layers). Make one with ``quantize_linear`` or ``from_tensors``.

    Args:
        settings: what it was made with.
        format: what stores and multiplies it.
        packed: codes in the kernel's own order, [out, in * bits / 8].
        scales: ``ShadowFormat`` gives shape, dtype and meaning.
    """

    settings: ShadowSettings
    format: ShadowFormat
    packed: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], settings: ShadowSettings
    ) -> ShadowLinear:
        """The inverse of ``tensors()``.

        Raises:
            ShadowCacheError: names, shapes or dtypes are not what ``settings`` makes here. A
                kernel would read past the end of some of these.
        """
        if tensors.keys() != {"packed", "scales"}:
            raise ShadowCacheError(f"a shadow is made of packed and scales, not {sorted(tensors)}")
        fmt = shadow_format(settings.bits)
        linear = cls(settings, fmt, tensors["packed"], tensors["scales"])
        if linear.packed.dim() != 2 or linear.packed.dtype != fmt.packed_dtype:
            raise ShadowCacheError(f"{_describe(linear.packed)} are no {fmt.label} codes")
        why = fmt.refusal(*linear.shape, settings.group_size)
        scales_shape = fmt.scales_shape(*linear.shape, settings.group_size)
        known_dtype = linear.scales.dtype in {fmt.scales_dtype(dtype) for dtype in _DTYPES}
        if why or linear.scales.shape != scales_shape or not known_dtype:
            raise ShadowCacheError(
                f"scales {_describe(linear.scales)} do not belong to {fmt.label} codes of "
                f"a weight {list(linear.shape)} at group_size {settings.group_size}"
            )
        return linear

    def to(self, device: torch.device) -> ShadowLinear:
        """The same on ``device``, which a format of ``subspec_kernels`` may be any of."""
        return replace(self, packed=self.packed.to(device), scales=self.scales.to(device))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that ``from_tensors`` needs, beside the settings."""
        return {"packed": self.packed, "scales": self.scales}

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] -> [..., out] of x's dtype; ``bias`` [out] is added.

        x is fp32, bf16 or fp16; with torch's formats, the dtype that the shadow was made for. The
        kernel accumulates in fp32 and rounds once; the CPU's native one rounds x to int8 first.
        """
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        size = self.settings.group_size
        y = self.format.matmul(rows.contiguous(), self.packed, self.scales, size)
        if bias is not None:
            y += bias
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def dequantize(self) -> torch.Tensor:
        """The weight [out, in] that the kernel multiplies by, fp32 and exact. For checks: slow."""
        return self.format.dequantize(self.packed, self.scales, self.settings.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        rows, row_bytes = self.packed.shape[0], self.packed.shape[1] * self.packed.itemsize
        return rows, row_bytes * 8 // self.format.bits

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, scales included."""
        return self.packed.nbytes + self.scales.nbytes

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that one weight costs, scales included."""
        return self.nbytes / (self.shape[0] * self.shape[1])


def quantize_linear(
    weight: torch.Tensor, settings: ShadowSettings, dtype: torch.dtype, name: str
) -> ShadowLinear:
    """Make the shadow of one linear.

    Needs, beside ``weight`` and the shadow, a few MiB, and 4 bytes a weight for torch's 4 bits.

    Args:
        weight: [out, in], fp32, bf16 or fp16, on the CPU.
        settings: how.
        dtype: the activations' dtype: fp32, bf16 or fp16.
        name: the linear's name, for errors.

    Raises:
        UnsupportedError: no kernel serves this shape, dtype or device, or a weight is not finite.
        DependencyError: the quantizer's package is missing.
    """
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{name}: activations are {dtype}; use float32, bfloat16 or float16")
    if weight.dim() != 2 or weight.dtype not in _DTYPES or weight.device.type != "cpu":
        raise UnsupportedError(
            f"{name}: a shadow is made from a float32, bfloat16 or float16 matrix on the CPU, not "
            f"from {_describe(weight)} on {weight.device}; keep this layer resident"
        )
    out_features, in_features = weight.shape
    check_shape(out_features, in_features, settings, name)
    fmt = shadow_format(settings.bits)
    packed, scales = fmt.quantize(weight.detach(), settings, dtype)
    if not fmt.is_finite(scales):
        raise UnsupportedError(
            f"{name}: its weights are not finite, or too large for {scales.dtype} scales; "
            "check the checkpoint, or keep this layer resident"
        )
    return ShadowLinear(settings, fmt, packed, scales)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
