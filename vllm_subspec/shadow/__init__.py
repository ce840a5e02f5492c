"""Shadows: the target's linears in few bits, for drafting."""

from vllm_subspec.shadow.build import build_shadows
from vllm_subspec.shadow.cache import ShadowCache
from vllm_subspec.shadow.formats import ShadowSettings
from vllm_subspec.shadow.linear import ShadowLinear

__all__ = ["ShadowCache", "ShadowLinear", "ShadowSettings", "build_shadows"]
