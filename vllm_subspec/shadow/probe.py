"""How fast this machine multiplies few rows by low-bit weights, and many rows by plain ones.

Weights are larger together than a processor's cache: they come from memory, as a model's do. Times
are the least of several, since whatever else runs can only add to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F

from vllm_subspec.shadow.formats import ShadowSettings, shadow_format
from vllm_subspec.shadow.linear import ShadowLinear

_OUT, _IN = 4096, 2048  # of one linear: a layer of a small model has several such
_FLOPS_PER_ROW = 2.0 * _OUT * _IN
_LEAST_OUT, _LEAST_IN = 16, 64
_WEIGHT_BYTES = 320 << 20
_SETTINGS = ShadowSettings(
    bits=4, group_size=64, quantizer="rtn"
)  # every machine has a 4-bit kernel
_FEW_ROWS, _BUSY_ROWS = 4, 16  # bound by reading weights; by products
_TARGET_ROWS = (17, 33, 65)
_PASSES = 6
_CALLS = 2000


@dataclass(frozen=True)
class DraftRates:
    """The draft's figures of ``plan.MachineFigures``."""

    bytes_per_s: float
    flops_per_s: float


def draft_rates(weight_bytes: int = _WEIGHT_BYTES) -> DraftRates:
    """Multiply few rows by low-bit weights, for about a second.

    Args:
        weight_bytes: of all linears together, about; one at least is measured.
    """
    shadows = _shadows(weight_bytes)
    read_s = _seconds_per_linear(shadows, torch.ones(_FEW_ROWS, _IN, dtype=torch.bfloat16))
    busy_s = _seconds_per_linear(shadows, torch.ones(_BUSY_ROWS, _IN, dtype=torch.bfloat16))
    return DraftRates(shadows[0].nbytes / read_s, _FLOPS_PER_ROW * _BUSY_ROWS / busy_s)


def target_flops_per_s(dtype: torch.dtype, weight_bytes: int = _WEIGHT_BYTES) -> float:
    """Multiply as many rows as a tree has by plain weights, for about a second.

    Args:
        dtype: of the target.
        weight_bytes: as in ``draft_rates``.
    """
    plain = _plain_linears(dtype, weight_bytes)
    return median(
        _FLOPS_PER_ROW * rows / _seconds_per_linear(plain, torch.ones(rows, _IN, dtype=dtype))
        for rows in _TARGET_ROWS
    )


def call_s() -> float:
    """Seconds of one call of an op that has next to nothing to do: Python and dispatch."""
    (shadow,) = _shadows(1, _LEAST_OUT, _LEAST_IN)
    x = torch.ones(_FEW_ROWS, _LEAST_IN, dtype=torch.bfloat16)
    return _seconds_per_linear([shadow] * _CALLS, x)


def _shadows(weight_bytes: int, rows: int = _OUT, columns: int = _IN) -> list[ShadowLinear]:
    """Shadows of no weight: a kernel's time does not depend on the codes."""
    fmt = shadow_format(_SETTINGS.bits)
    row_codes = columns * fmt.bits // 8 // fmt.packed_dtype.itemsize
    shape = fmt.scales_shape(rows, columns, _SETTINGS.group_size)
    linears: list[ShadowLinear] = []
    while not linears or sum(linear.nbytes for linear in linears) < weight_bytes:
        tensors = {
            # Written, since untouched memory is one page of zeros, which stays in the cache.
            "packed": torch.full((rows, row_codes), 0x17, dtype=fmt.packed_dtype),
            "scales": torch.ones(shape, dtype=fmt.scales_dtype(torch.bfloat16)),
        }
        linears.append(ShadowLinear.from_tensors(tensors, _SETTINGS))
    return linears


def _plain_linears(
    dtype: torch.dtype, weight_bytes: int
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    count = max(1, weight_bytes // (_OUT * _IN * dtype.itemsize))
    return [partial(F.linear, weight=torch.ones(_OUT, _IN, dtype=dtype)) for _ in range(count)]


def _seconds_per_linear(
    linears: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> float:
    """The least over a few passes through all of them; the first one warms up."""
    times = []
    for _ in range(1 + _PASSES):
        start = perf_counter()
        for linear in linears:
            linear(x)
        times.append((perf_counter() - start) / len(linears))
    return min(times[1:])
