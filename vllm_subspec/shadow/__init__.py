"""Shadows: the target's linears in few bits, for drafting."""

from vllm_subspec.shadow.build import build_shadows
from vllm_subspec.shadow.cache import ShadowCache
from vllm_subspec.shadow.formats import ShadowSettings, available_bits, kernel_status
from vllm_subspec.shadow.linear import ShadowLinear

__all__ = [
    "ShadowCache",
    "ShadowLinear",
    "ShadowSettings",
    "available_bits",
    "build_shadows",
    "kernel_status",
]
