"""The gate: every kernel on the device against its reference on the CPU, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from subspec_kernels import grow_mask as grow_mask_op
from subspec_kernels import kv_compact as kv_compact_op
from subspec_kernels import lowbit_linear as lowbit_linear_op
from subspec_kernels import sharpened_topk as sharpened_topk_op
from subspec_kernels import tree_attention as tree_attention_op
from subspec_kernels.kv_compact import CacheViews
from subspec_kernels.lowbit_linear import BITS, Bits

from gpu_bench.device import Device
from gpu_bench.inputs import (
    PAGE,
    QWEN_7B,
    TINY,
    ModelShape,
    attention_inputs,
    group_of,
    lowbit_weight,
    path_moves,
)
from gpu_bench.report import Rows

Operation = Callable[..., Any]
Problem = str  # empty where there is none

SCORES = 3e-5
ATTENTION = {torch.float32: 5e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
LINEAR = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative and absolute; of a linear, relative to the largest output."""


@dataclass(frozen=True)
class Operations:
    """What is checked and timed: what the engine calls, which picks by device."""

    sharpened_topk: Operation = sharpened_topk_op.sharpened_topk
    grow_mask: Operation = grow_mask_op.grow_mask
    kv_compact: Operation = kv_compact_op.kv_compact
    tree_attention: Operation = tree_attention_op.tree_attention
    lowbit_linear: Operation = lowbit_linear_op.lowbit_linear


@dataclass(frozen=True)
class Case:
    """One comparison. ``find`` runs the operation and says what is wrong with the result."""

    kernel: str
    case: str
    find: Callable[[Operation, Device], Problem]


@dataclass(frozen=True)
class Check:
    """What came of a case."""

    kernel: str
    case: str
    problem: Problem


def run_checks(
    operations: Operations, device: Device, small: bool, kernels: Sequence[str]
) -> list[Check]:
    """Every case of the named kernels; whatever an operation raises is its problem."""
    done = []
    for case in cases(small):
        if case.kernel not in kernels:
            continue
        torch.manual_seed(0)
        try:
            problem = case.find(getattr(operations, case.kernel), device)
        except Exception as error:  # a compiler's, a driver's: each of them is a finding
            problem = f"{type(error).__name__}: {error}"
        done.append(Check(case.kernel, case.case, problem))
    return done


def tables(checks: Sequence[Check]) -> dict[str, Rows]:
    """How many cases each kernel passed, and those it did not."""
    kernels = dict.fromkeys(check.kernel for check in checks)
    counts: Rows = [
        {
            "kernel": kernel,
            "cases": sum(check.kernel == kernel for check in checks),
            "wrong": sum(check.kernel == kernel and bool(check.problem) for check in checks),
        }
        for kernel in kernels
    ]
    wrong: Rows = [asdict(check) for check in checks if check.problem]
    return {"Kernels against their references": counts, "What is wrong": wrong}


def cases(small: bool) -> Iterator[Case]:
    """All of them; ``small`` leaves out what the sanitizer would take minutes for."""
    yield from _topk_cases(small)
    for width, depth in ((1, 3), (6, 12), (8, 32)):
        yield Case("grow_mask", f"{width} x {depth}", partial(_grow_mask, width, depth))
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 20) if small else (1, 20, 200):
            label = f"{rows} rows of a path, {_name(dtype)}"
            yield Case("kv_compact", label, partial(_kv_compact, rows, dtype))
    yield from _attention_cases(small)
    yield from _linear_cases(small)


def _topk_cases(small: bool) -> Iterator[Case]:
    sizes = [(2, 1, 509, 6), (1, 6, 4099, 6), (1, 32, 1031, 32), (2, 3, 5, 8)]
    if not small:
        sizes += [(1, 6, 152064, 6), (2, 8, 262144, 8)]
    for requests, m, vocab, width in sizes:
        for kind in ("plain", "ties", "barred", "noise"):
            label = f"{requests} x {m} x {vocab}, width {width}, {kind}"
            size = (requests, m, vocab)
            yield Case("sharpened_topk", label, partial(_sharpened_topk, size, width, kind))


def _sharpened_topk(
    size: tuple[int, int, int], width: int, kind: str, op: Operation, device: Device
) -> Problem:
    logits = 4 * torch.randn(size, device=device.torch_device)
    if kind == "ties":
        logits = logits.round()
    if kind == "barred":
        logits = logits.masked_fill(torch.rand_like(logits) < 0.9, -torch.inf)
    noise = torch.randn(size[0], 1, size[2], device=device.torch_device).expand(size)
    scores = -torch.rand(size[:2], device=device.torch_device)
    added = noise if kind == "noise" else None
    given = (logits.bfloat16() if kind == "plain" else logits, scores, width, 0.2, added)
    out, right = op(*given), sharpened_topk_op.reference.sharpened_topk(*_on_cpu(given))
    return (
        _unequal("tokens", out.tokens, right.tokens)
        or _unequal("parents", out.parents, right.parents)
        or _far("scores", out.scores, right.scores, SCORES)
    )


def _grow_mask(width: int, depth: int, op: Operation, device: Device) -> Problem:
    place = device.torch_device
    right = torch.zeros(2, 1, 1 + width * depth // 64, dtype=torch.int64)
    out = right.to(place)
    for first, m in [(0, 1)] + [(1 + i * width, width) for i in range(depth)]:
        parents = torch.randint(0, right.shape[1], (2, m))
        right = grow_mask_op.reference.grow_mask(right, parents, first)
        out = op(out, parents.to(place), first)
        if problem := _unequal(f"words of the level at slot {first}", out, right):
            return problem
    return ""


def _kv_compact(rows: int, dtype: torch.dtype, op: Operation, device: Device) -> Problem:
    contexts, nodes = (5, 33), 2 * rows + 3
    pages = -(-(max(contexts) + 1 + nodes) // PAGE)
    place = device.torch_device
    layers = torch.randn(3, 2, len(contexts) * pages, PAGE, 2, 24, device=place).to(dtype)
    source, target = path_moves(rows, nodes, contexts, pages, place)
    source[0] = source[0].flip(0)  # later rows overtake earlier ones
    source[1, -1] = -1
    right = CacheViews(list(layers.cpu().clone().flatten(0, 1)))
    kv_compact_op.reference.kv_compact(right, source.cpu(), target.cpu())
    op(CacheViews(list(layers.flatten(0, 1))), source, target)
    return _unequal("caches", layers.flatten(0, 1), torch.stack(right.caches))


_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"soft_cap": 20.0}, {"window": 40})


def _attention_cases(small: bool) -> Iterator[Case]:
    shape = replace(TINY, heads=6, head_dim=64)
    sizes = [
        (shape, contexts, queries, nodes, torch.bfloat16)
        for contexts in ((0,), (17, 300))
        for queries, nodes in ((1, 1), (6, 49), (130, 130))
    ]
    sizes += [(shape, (17, 300), 6, 49, dtype) for dtype in (torch.float16, torch.float32)]
    if not small:
        nodes_of_7b = ((6, 289), (289, 289), (512, 512))
        sizes += [(QWEN_7B, (2051,), *nodes, torch.bfloat16) for nodes in nodes_of_7b]
    for model, contexts, queries, nodes, dtype in sizes:
        label = f"{queries} of {nodes} nodes, context {contexts}, {model.name}, {_name(dtype)}"
        is_varied = dtype == torch.bfloat16 and model is shape
        for extra in _VARIANTS if is_varied else _VARIANTS[:1]:
            find = partial(_attention, (model, contexts, queries, nodes, dtype), extra)
            yield Case("tree_attention", " ".join([label, *map(str, extra.items())]), find)


def _attention(
    sizes: tuple[ModelShape, Sequence[int], int, int, torch.dtype],
    extra: dict[str, Any],
    op: Operation,
    device: Device,
) -> Problem:
    given = attention_inputs(*sizes, device.torch_device) | extra
    if sizes[2] > 1:
        given["mask"][0, -1] = 0  # padding
    right = tree_attention_op.reference.tree_attention(**_on_cpu(given))
    return _far("output", op(**given), right, ATTENTION[sizes[4]])


def _linear_cases(small: bool) -> Iterator[Case]:
    odd = (208, 320)
    given = [(rows, odd, bits, torch.bfloat16) for bits in BITS for rows in (1, 6, 16)]
    given += [(6, odd, bits, d) for bits in BITS for d in (torch.float16, torch.float32)]
    given += [(6, (16, 64), 4, torch.bfloat16)]
    if not small:
        linears = QWEN_7B.linears
        given += [(6, linears["qkv"], bits, torch.bfloat16) for bits in BITS]
        given += [(6, linears["down"], 4, torch.bfloat16)]
    for rows, size, bits, dtype in given:
        label = f"{rows} rows, {size[0]} x {size[1]}, {bits} bits, {_name(dtype)}"
        yield Case("lowbit_linear", label, partial(_linear, rows, size, bits, dtype))


def _linear(
    rows: int,
    size: tuple[int, int],
    bits: Bits,
    dtype: torch.dtype,
    op: Operation,
    device: Device,
) -> Problem:
    x = torch.randn(rows, size[1], device=device.torch_device).to(dtype)
    weight = lowbit_weight(size, bits, group_of(bits), device.torch_device)
    given = (x, *weight, bits, group_of(bits))
    right = lowbit_linear_op.reference.lowbit_linear(*_on_cpu(given))
    return _far("output", op(*given), right, LINEAR[dtype], to_largest=True)


def _on_cpu(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _on_cpu(value) for name, value in given.items()}
    if isinstance(given, tuple):
        return tuple(map(_on_cpu, given))
    return given.cpu() if isinstance(given, torch.Tensor) else given


def _unequal(what: str, out: torch.Tensor, right: torch.Tensor) -> Problem:
    if out.shape != right.shape or out.dtype != right.dtype:
        return f"{what} are {out.dtype} {list(out.shape)}, not {right.dtype} {list(right.shape)}"
    different = int((out.cpu() != right).sum())
    return f"{different} of {right.numel()} {what} differ" if different else ""


def _far(
    what: str, out: torch.Tensor, right: torch.Tensor, tolerance: float, to_largest: bool = False
) -> Problem:
    if out.shape != right.shape or out.dtype != right.dtype:
        return f"{what} is {out.dtype} {list(out.shape)}, not {right.dtype} {list(right.shape)}"
    given, wanted = out.cpu().double(), right.double()
    allowed = tolerance * (wanted.abs().max() if to_largest else 1 + wanted.abs())
    within = ((given - wanted).abs() <= allowed) & wanted.isfinite()  # NaN is never within
    within |= given == wanted
    if bool(within.all()):
        return ""
    worst = float((given - wanted).abs().nan_to_num(torch.inf, torch.inf).max())
    return f"{int((~within).sum())} of {right.numel()} of {what} are off, by up to {worst:.3g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
