"""What shadows can be made here: their settings, and the format that serves each width in bits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from subspec_kernels import lowbit_linear, native

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.files import private_directory
from vllm_subspec.shadow.packing import Int4Groups, Int8Channels, NativeGroups, ShadowFormat
from vllm_subspec.shadow.quantizers import check_quantizer

GROUP_SIZES = (32, 64, 128, 256)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShadowSettings:
    """How to make shadows.

    Args:
        bits: 4 (asymmetric groups), 6 or 8 (symmetric).
        group_size: weights along the inputs that share a scale. torch's 8-bit kernel, which stands
            in for the native one, has one scale a channel instead.
        quantizer: "hqq" or "rtn" (round to nearest) at 4 bits; 6 and 8 bits always round to
            nearest.

    Raises:
        ConfigError: one of them is unknown.
    """

    bits: int
    group_size: int
    quantizer: str

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        check_quantizer(self.quantizer)
        if self.group_size not in GROUP_SIZES:
            known = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size {self.group_size!r} is unknown; use one of: {known}")


_NATIVE: dict[int, ShadowFormat] = {bits: NativeGroups(bits) for bits in lowbit_linear.BITS}
_TORCH: dict[int, ShadowFormat] = {fmt.bits: fmt for fmt in (Int4Groups(), Int8Channels())}


def shadow_format(bits: int) -> ShadowFormat:
    """The format of a width in bits: native where that kernel can be built, else torch's.

    The first call on a machine builds the kernel, which takes 10 s.

    Raises:
        ConfigError: no format has it; the known ones are listed.
        UnsupportedError: only the native kernel has it, and that cannot be built here.
    """
    _check_bits(bits)
    if (found := _formats().get(bits)) is None:
        raise UnsupportedError(
            f"bits {bits} needs the native kernel, which is not available: {_native_kernel()[1]}. "
            f"Mend that, or set bits to {' or '.join(map(str, _TORCH))}"
        )
    return found


def kernel_status() -> str:
    """Which kernels serve shadows here, and why not the native ones. Builds them if need be."""
    isa, problem = _native_kernel()
    return f"native, {isa}" if problem is None else f"torch's own (4 and 8 bits): {problem}"


def available_bits() -> tuple[int, ...]:
    """Widths for which this machine has a kernel, ascending."""
    return tuple(sorted(_formats()))


def _formats() -> dict[int, ShadowFormat]:
    return _NATIVE if _native_kernel()[1] is None else _TORCH


@cache
def _native_kernel() -> tuple[str, str | None]:
    """(instruction set, None), or ("", the reason why there is no native kernel)."""
    try:
        return native.load(private_directory(envs.cache_dir() / "kernels")), None
    except (native.KernelBuildError, OSError) as error:
        _log.warning("shadows use torch's slower low-bit kernels, without 6 bits: %s", error)
        return "", str(error)


def _check_bits(bits: int) -> None:
    if bits not in _NATIVE:
        known = ", ".join(map(str, _NATIVE))
        raise ConfigError(f"bits {bits!r} is unknown; use one of: {known}")


def refusal(out_features: int, in_features: int, settings: ShadowSettings) -> str | None:
    """Why no kernel serves this linear, or None where one does."""
    return shadow_format(settings.bits).refusal(out_features, in_features, settings.group_size)


def check_shape(out_features: int, in_features: int, settings: ShadowSettings, name: str) -> None:
    """Raise UnsupportedError, naming what would do, unless a kernel serves this linear."""
    why = refusal(out_features, in_features, settings)
    if why is None:
        return
    fixes = []
    for bits, fmt in _formats().items():
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
