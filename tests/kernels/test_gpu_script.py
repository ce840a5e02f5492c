"""`ci/gpu` with the Triton kernels themselves: its gate passes, its method runs.

Where there is no GPU, that shows that the script asks the kernels for what they take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
KERNELS = ["sharpened_topk", "grow_mask", "kv_compact", "tree_attention", "lowbit_linear"]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="run ci/gpu itself")


def kernel(name: str) -> Callable[..., Any]:
    entry: Callable[..., Any] = getattr(import_module(f"subspec_kernels.{name}.triton"), name)
    return entry


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu_bench"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 products are those of numbers: the interpreter multiplies their bits in ``tl.dot``."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    dot = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    attention = import_module("subspec_kernels.tree_attention.triton")
    monkeypatch.setattr(attention, "_processors", lambda _: 8)


@pytest.mark.parametrize("name", KERNELS)
def test_the_gate_passes(name: str) -> None:
    from gpu_bench.checks import Operations, run_checks
    from gpu_bench.device import NoGpu

    operations = Operations(**{name: kernel(name)})
    checks = run_checks(operations, NoGpu(), small=True, kernels=[name])
    assert checks
    assert [check for check in checks if check.problem] == []


def test_the_method_runs_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_bench import inputs, method, model
    from gpu_bench.device import NoGpu

    from vllm_subspec.draft import growth

    for module, name in (
        (growth, "sharpened_topk"),
        (model, "tree_attention"),
        (model, "lowbit_linear"),
        (method, "kv_compact"),
    ):
        monkeypatch.setattr(module, name, kernel(name))
    plan = model.Plan(
        residents=1, slots=1, host_layers=2, bits=4, width=2, depth=2, context=21, tau=2
    )
    tables = method.measure_method(NoGpu(), inputs.TINY, plan)
    modes = tables["Speed (acceptance is forced, not measured)"]
    assert [row["tau"] for row in modes] == [1, 2]
