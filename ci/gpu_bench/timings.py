"""How long each kernel takes, as a share of the roofline, and what its rivals take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from subspec_kernels import lowbit_linear
from subspec_kernels.kv_compact import CacheViews
from subspec_kernels.lowbit_linear import BITS, Bits

from gpu_bench import rivals
from gpu_bench.checks import Operations
from gpu_bench.device import Call, Device
from gpu_bench.environment import Roofline
from gpu_bench.inputs import (
    PAGE,
    ModelShape,
    attention_inputs,
    group_of,
    lowbit_weight,
    path_moves,
)
from gpu_bench.report import Row, Rows, Tables

CONTEXTS = (256, 2048, 8192)
ROWS = (1, 4, 6, 8, 16)
VERIFIED = (65, 289)
WIDTH, DEPTH, TAU, TEMPERATURE = 6, 48, 20, 0.2
OURS = "ours"
_LEFT_OUT = "left out: time"
_COMPILER_S = 60.0


@dataclass(frozen=True)
class Timed:
    """One call to be timed.

    ``make`` prepares the inputs and returns the call. ``captured``: a graph can hold it.
    ``compiles``: it takes long to prepare, so it comes last.
    """

    kernel: str
    case: str
    by: str
    nbytes: int
    flops: int
    make: Callable[[], Call]
    captured: bool = True
    compiles: bool = False


class Kernels:
    """Every kernel at one model's sizes."""

    def __init__(self, device: Device, operations: Operations, shape: ModelShape) -> None:
        self._device, self._shape = device, shape
        self._place = device.torch_device
        self._operations = operations

    def all(self) -> list[Timed]:
        """Ours before rivals, and those that compile last."""
        every = [
            *self._topk(),
            *self._masks(),
            *self._moves(),
            *self._attention(),
            *self._linears(),
        ]
        return sorted(every, key=lambda timed: (timed.compiles, timed.by != OURS))

    def _topk(self) -> Iterator[Timed]:
        vocab = self._shape.vocab
        for rows in (1, WIDTH, 32):
            size = (1, rows, vocab)
            for noisy in (False, True):
                nbytes = 2 * rows * vocab + (4 * vocab if noisy else 0)
                case = f"{rows} rows of {vocab}" + (", noise" if noisy else "")
                timed = partial(Timed, "sharpened_topk", case, nbytes=nbytes, flops=0)
                inputs = partial(rivals.topk_inputs, size, noisy, WIDTH, TEMPERATURE, self._place)
                yield timed(OURS, make=partial(_bind, self._operations.sharpened_topk, inputs))
                if not noisy:
                    yield timed("torch.topk", make=partial(_bind, rivals.torch_topk, inputs))
            if rows == WIDTH:
                make = partial(rivals.compiled_topk, self._device, inputs)
                yield timed("torch.compile", make=make, compiles=True)

    def _masks(self) -> Iterator[Timed]:
        count = 1 + WIDTH * DEPTH // 64
        nbytes = 2 * 8 * WIDTH * (count + 1)
        timed = partial(Timed, "grow_mask", f"{WIDTH} nodes, {count} words", nbytes=nbytes, flops=0)

        def inputs() -> tuple[Any, ...]:
            words = torch.zeros(1, WIDTH, count, dtype=torch.int64, device=self._place)
            parents = torch.zeros(1, WIDTH, dtype=torch.int64, device=self._place)
            return words, parents, 7

        yield timed(OURS, make=partial(_bind, self._operations.grow_mask, inputs))
        yield timed("reference", make=partial(_bind, rivals.reference_mask, inputs))

    def _moves(self) -> Iterator[Timed]:
        shape, nodes = self._shape, WIDTH * DEPTH
        pages = -(-(1 + nodes) // PAGE)
        row = shape.kv_heads * shape.head_dim
        case = f"{TAU} rows of {2 * shape.layers} caches"
        nbytes = 2 * 2 * shape.layers * TAU * row * 2
        timed = partial(Timed, "kv_compact", case, nbytes=nbytes, flops=0)

        def inputs() -> tuple[Any, ...]:
            size = (2 * shape.layers, pages, PAGE, shape.kv_heads, shape.head_dim)
            caches = torch.zeros(size, dtype=torch.bfloat16, device=self._place)
            return CacheViews(list(caches)), *path_moves(TAU, nodes, (0,), pages, self._place)

        yield timed(OURS, make=partial(_bind, self._operations.kv_compact, inputs))
        # It selects the moves by a mask: the host waits for their number.
        make = partial(_bind, rivals.reference_moves, inputs)
        yield timed("reference", make=make, captured=False)

    def _attention(self) -> Iterator[Timed]:
        shape, nodes = self._shape, 1 + WIDTH * DEPTH
        steps = [("draft", m, nodes) for m in ROWS] + [("verify", m, m) for m in VERIFIED]
        for step, m, filled in steps:
            for context in CONTEXTS:
                keys = context + filled
                nbytes = 2 * 2 * keys * shape.kv_heads * shape.head_dim
                nbytes += 2 * 2 * m * shape.heads * shape.head_dim + m * -(-filled // 64) * 8
                flops = 4 * m * keys * shape.heads * shape.head_dim
                case = f"{step}, {m} of {filled} nodes, context {context}"
                timed = partial(Timed, "tree_attention", case, nbytes=nbytes, flops=flops)
                sizes = (shape, (context,), m, filled, torch.bfloat16, self._place)
                inputs = partial(attention_inputs, *sizes)
                yield timed(OURS, make=partial(_bind, self._operations.tree_attention, inputs))
                yield timed("SDPA, dense context", make=partial(rivals.sdpa, inputs))
                if context == CONTEXTS[1] and m in (WIDTH, VERIFIED[1]):
                    flex = partial(rivals.flex_attention, self._device, inputs)
                    yield timed("FlexAttention, dense context", make=flex, compiles=True)
                    # It goes through requests on the host, so no graph holds it.
                    whole = partial(rivals.compiled_attention, self._device, inputs)
                    yield timed("torch.compile", make=whole, captured=False, compiles=True)

    def _linears(self) -> Iterator[Timed]:
        for name, size in self._shape.linears.items():
            for rows in ROWS:
                for bits in BITS:
                    if bits == 4 or (name == "gate_up" and rows in (1, WIDTH, 16)):
                        yield from self._linear(name, size, rows, bits)
                # The bound of a bf16 product is its own weight's reading.
                nbytes, flops = 2 * size[0] * size[1], 2 * rows * size[0] * size[1]
                make = partial(rivals.dense_linear, size, rows, self._place)
                case = f"{name}, {rows} rows, bf16"
                yield Timed("lowbit_linear", case, "cuBLAS bf16", nbytes, flops, make)

    def _linear(self, name: str, size: tuple[int, int], rows: int, bits: Bits) -> Iterator[Timed]:
        out, inputs_ = size
        group = group_of(bits)
        scales = prod(lowbit_linear.scales_shape(out, inputs_, bits, group))
        nbytes = out * inputs_ * lowbit_linear.code_bits(bits) // 8
        nbytes += scales * lowbit_linear.scales_dtype(bits).itemsize + 2 * rows * (out + inputs_)
        case = f"{name}, {rows} rows, {bits} bits"
        flops = 2 * rows * out * inputs_
        timed = partial(Timed, "lowbit_linear", case, nbytes=nbytes, flops=flops)

        def inputs() -> tuple[Any, ...]:
            x = torch.randn(rows, inputs_, device=self._place, dtype=torch.bfloat16)
            return x, *lowbit_weight(size, bits, group, self._place), bits, group

        yield timed(OURS, make=partial(_bind, self._operations.lowbit_linear, inputs))
        if bits == 4:
            int4 = partial(rivals.torch_int4, size, rows, group, self._place)
            yield timed("torch int4", make=int4)
            kept = partial(rivals.gemlite, size, rows, group, self._place)
            yield timed("gemlite", make=kept, compiles=True)
            if name == "o" and rows == WIDTH:
                make = partial(rivals.compiled_linear, self._device, inputs)
                yield timed("torch.compile", make=make, compiles=True)


def time_all(
    device: Device, timed: list[Timed], peaks: Roofline, ends_at: float
) -> tuple[Tables, bool]:
    """The times, and what has none and why; and whether all of ours ran.

    What is due after ``ends_at`` is left out.
    """
    times: list[tuple[Timed, Row]] = []
    without: Counter[tuple[str, str, str]] = Counter()
    for each in timed:
        # A compiler may take a minute, and cannot be interrupted.
        needed_s = _COMPILER_S if each.compiles and not device.is_dry else 0.0
        if time.monotonic() + needed_s > ends_at:
            without[each.kernel, each.by, _LEFT_OUT] += 1
            continue
        try:
            took_s = device.time_ms(each.make(), each.captured) / 1e3
        except Exception as error:  # rivals depend on what is installed: say why there is none
            without[each.kernel, each.by, f"{type(error).__name__}: {str(error)[:120]}"] += 1
        else:
            times.append((each, _row(each, took_s, peaks)))
    cases = list(dict.fromkeys((each.kernel, each.case) for each in timed))
    times.sort(key=lambda pair: cases.index((pair[0].kernel, pair[0].case)))
    rows: Rows = [
        {"kernel": kernel, "by": by, "cases": count, "why": why}
        for (kernel, by, why), count in without.items()
    ]
    all_ran = not any(by == OURS and why != _LEFT_OUT for _, by, why in without)
    return {"Times": [row for _, row in times], "Without a time": rows}, all_ran


def _row(timed: Timed, took_s: float, peaks: Roofline) -> Row:
    bound, least_s = peaks.bound_s(timed.nbytes, timed.flops)
    return {
        "kernel": timed.kernel,
        "case": timed.case,
        "by": timed.by,
        "us": took_s * 1e6,
        "GB_per_s": timed.nbytes / took_s / 1e9,
        "bound_us": least_s * 1e6,
        "bound": bound,
        "share_of_bound": least_s / took_s,
    }


def _bind(operation: Callable[..., Any], inputs: Callable[[], Any]) -> Call:
    """The operation on inputs that are made now."""
    given = inputs()
    if isinstance(given, dict):
        return lambda: operation(**given)
    return lambda: operation(*given)
