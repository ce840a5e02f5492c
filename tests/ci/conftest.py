"""The modules of `ci/gpu`, importable while a test uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Script:
    """The script's modules."""

    def __init__(self) -> None:
        from gpu_bench import checks, device, inputs, main, method, sanitizer, timings

        self.checks, self.main, self.method = checks, main, method
        self.sanitizer, self.timings, self.inputs = sanitizer, timings, inputs
        self.gpu, self.device = device.Gpu, device.NoGpu()

    def run(self, operations: Any, *arguments: str) -> Any:
        run = self.main.Run(self.device, self.main.parse(["--dry-run", *arguments]), operations)
        run.run()
        return run


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    yield Script()
    for name in [name for name in sys.modules if name.split(".")[0] == "gpu_bench"]:
        del sys.modules[name]
