"""What shadows can be made here: their settings, and the format that serves each width in bits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

from subspec_kernels import lowbit_linear, native
from subspec_kernels.lowbit_linear import Bits

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.files import private_directory
from vllm_subspec.shadow.microscaling import MicroscalingGroups
from vllm_subspec.shadow.packing import BlockGroups, Int4Groups, Int8Channels, ShadowFormat
from vllm_subspec.shadow.quantizers import check_quantizer

GROUP_SIZES = (32, 64, 128, 256)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShadowSettings:
    """How to make shadows.

    Args:
        bits: 4 (asymmetric groups), 6 or 8 (symmetric); for experiments on quality, without a CPU
            kernel, 2, 3 (asymmetric) or "mxfp4".
        group_size: weights along the inputs that share a scale; 32 for "mxfp4". torch's 8-bit
            kernel, which stands in for the native one, has one scale a channel instead.
        quantizer: "hqq" or "rtn" (round to nearest) at 2, 3 and 4 bits; the others always round to
            nearest.

    Raises:
        ConfigError: one of them is unknown, or they do not go together.
    """

    bits: Bits
    group_size: int
    quantizer: str

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        check_quantizer(self.quantizer)
        if self.group_size not in GROUP_SIZES:
            known = ", ".join(map(str, GROUP_SIZES))
            raise ConfigError(f"group_size {self.group_size!r} is unknown; use one of: {known}")
        if self.bits == "mxfp4" and self.group_size != lowbit_linear.MX_GROUP:
            raise ConfigError(
                f"group_size {self.group_size} does not go with bits 'mxfp4', whose groups are "
                f"{lowbit_linear.MX_GROUP} by definition; set group_size to that"
            )


_NATIVE: dict[Bits, ShadowFormat] = {b: BlockGroups(b) for b in lowbit_linear.NATIVE_BITS}
_TORCH: dict[Bits, ShadowFormat] = {fmt.bits: fmt for fmt in (Int4Groups(), Int8Channels())}
_WITHOUT_KERNEL: dict[Bits, ShadowFormat] = {
    2: BlockGroups(2),
    3: BlockGroups(3),
    "mxfp4": MicroscalingGroups(),
}


def shadow_format(bits: Bits) -> ShadowFormat:
    """The format of a width in bits: native where that kernel can be built, else torch's.

    One that no CPU kernel serves (``has_kernel``) is named in a warning, once.

    The first call on a machine builds the kernel, which takes 10 s.

    Raises:
        ConfigError: no format has it; the known ones are listed.
        UnsupportedError: only the native kernel has it, and that cannot be built here.
    """
    _check_bits(bits)
    if bits in _WITHOUT_KERNEL:
        _warn_of_dequantizing(_WITHOUT_KERNEL[bits].label)
        return _WITHOUT_KERNEL[bits]
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
    return tuple(sorted(fmt.bits for fmt in _formats().values()))


def _formats() -> dict[Bits, ShadowFormat]:
    return _NATIVE if _native_kernel()[1] is None else _TORCH


@cache
def _native_kernel() -> tuple[str, str | None]:
    """(instruction set, None), or ("", the reason why there is no native kernel)."""
    try:
        return native.load(private_directory(envs.cache_dir() / "kernels")), None
    except (native.KernelBuildError, OSError) as error:
        _log.warning("shadows use torch's slower low-bit kernels, without 6 bits: %s", error)
        return "", str(error)


@cache
def _warn_of_dequantizing(label: str) -> None:
    _log.warning(
        "%s shadows have no CPU kernel: each use dequantises the weights. Acceptance is as it "
        "would be, speed is not",
        label,
    )


def _check_bits(bits: Bits) -> None:
    if bits not in lowbit_linear.BITS:
        known = ", ".join(map(str, lowbit_linear.BITS))
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
    own = shadow_format(settings.bits)
    for bits, fmt in {**_formats(), settings.bits: own}.items():
        sizes = [g for g in GROUP_SIZES if fmt.refusal(out_features, in_features, g) is None]
        if bits == settings.bits and sizes:
            fixes.append("set group_size to " + " or ".join(map(str, sizes)))
        elif settings.group_size in sizes:
            fixes.append(f"set bits to {bits}")
    fixes.append("keep this layer resident")
    raise UnsupportedError(
        f"{name}: no {own.label} kernel serves a weight of shape "
        f"[{out_features}, {in_features}], since {why}; {', or '.join(fixes)}"
    )
