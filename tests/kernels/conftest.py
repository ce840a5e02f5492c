"""Triton kernels are tested everywhere: on a GPU where there is one, else by interpretation.

Without a GPU every ``subspec_kernels/<op>/triton.py`` is imported here, once, for Triton's
interpreter. Triton itself comes in as usual, and the environment variable is set only while this
folder's tests run: others, and the engines that they start, see neither.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import subspec_kernels
import torch

HAS_GPU = torch.cuda.is_available()
COMPILER = Path(__file__).with_name("compiled.py")
Compile = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def _import_interpreted() -> None:
    import triton  # noqa: F401  (before the variable is set: its own functions stay compilable)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for file in sorted(Path(subspec_kernels.__file__).parent.glob("*/triton.py")):
            importlib.import_module(f"subspec_kernels.{file.parent.name}.triton")


if not HAS_GPU:
    _import_interpreted()


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    if HAS_GPU:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def interpret(function: Any, *args: Any, **kwargs: Any) -> Any:
        return InterpretedFunction(function.fn)(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Triton's own functions, such as tl.max, were made for the compiler: called directly they
        # would only raise.
        patch.setattr(JITFunction, "__call__", interpret)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton kernels are run."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def compile_kernels() -> Compile:
    """Compiles kernels for sm_80 and sm_90 without a GPU; see ``compiled.py``."""

    def run(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
        variables = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, str(COMPILER)],
            input=json.dumps(kernels),
            env=variables | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        compiled: list[dict[str, Any]] = json.loads(done.stdout)
        return compiled

    return run
