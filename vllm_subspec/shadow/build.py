"""A layer's shadows, from the cache where it has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vllm_subspec.errors import ShadowCacheError
from vllm_subspec.shadow.cache import ShadowCache, shadow_key, weight_digest
from vllm_subspec.shadow.formats import ShadowSettings
from vllm_subspec.shadow.linear import ShadowLinear, quantize_linear

_log = logging.getLogger(__name__)


def build_shadows(
    weights: Mapping[str, torch.Tensor],
    settings: ShadowSettings,
    dtype: torch.dtype,
    cache: ShadowCache | None,
    name: str,
) -> tuple[dict[str, ShadowLinear], bool]:
    """Load or make the shadows of one decoder layer's linears.

    Those that a calibration left in the cache (see ``compensation``) win over plain ones.
    A damaged cache file is logged as a warning, made anew and replaced; a file that cannot be
    written is logged as a warning.

    Args:
        weights: linear name -> weight [out, in], fp32, bf16 or fp16, on the CPU.
        settings: how to make them.
        dtype: the activations' dtype.
        cache: where they rest, or None to make them each time.
        name: the layer's name, for errors and warnings.

    Returns:
        The shadows by linear name, and whether they came from the cache.

    Raises:
        UnsupportedError: no kernel serves one of the linears.
        DependencyError: the quantizer's package is missing.
    """
    if cache is None:
        return _quantize(weights, settings, dtype, name), False
    digests = {linear: weight_digest(weight) for linear, weight in weights.items()}
    calibrated = shadow_key(digests, settings, dtype, compensated=True)
    key = shadow_key(digests, settings, dtype)
    for found, otherwise in (
        (calibrated, "until it is calibrated again, its shadow is a plain one"),
        (key, "its shadow is made anew and replaces the file"),
    ):
        try:
            cached = cache.load(found, settings, dtype)
        except ShadowCacheError as error:
            _log.warning("%s: %s; %s", name, error, otherwise)
        else:
            if cached is not None:
                return cached, True
    shadows = _quantize(weights, settings, dtype, name)
    try:
        cache.store(key, shadows)
    except OSError as error:
        _log.warning(
            "%s: its shadow cannot be cached in %s (%s) and will be made again next time",
            name,
            cache.directory,
            error,
        )
    return shadows, False


def _quantize(
    weights: Mapping[str, torch.Tensor], settings: ShadowSettings, dtype: torch.dtype, name: str
) -> dict[str, ShadowLinear]:
    return {
        linear: quantize_linear(weight, settings, dtype, f"{name}.{linear}")
        for linear, weight in weights.items()
    }
