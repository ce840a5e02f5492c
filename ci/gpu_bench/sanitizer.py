"""The checks once more under NVIDIA's compute-sanitizer, where the machine has it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_bench.device import Device
from gpu_bench.report import Row, Rows

TOOLS = {"memcheck": None, "racecheck": "kv_compact"}
"""Tool to the one kernel that it looks at; None for all of them."""
FOUND = 86  # exit status that the sanitizer is told to give
USUAL_PLACE = Path("/usr/local/cuda/bin/compute-sanitizer")
LIMIT_S = 60.0  # of one tool


def sanitize(device: Device, seconds_left: float) -> Rows:
    """One record a tool; its state is "errors" if it found some."""
    binary = shutil.which("compute-sanitizer") or str(USUAL_PLACE)
    is_here = Path(binary).exists()
    rows: Rows = []
    for tool, kernel in TOOLS.items():
        line = command(binary, tool, kernel)
        row: Row = {"tool": tool, "kernels": kernel or "all", "state": "not on this machine"}
        if device.is_dry:
            row["state"] = "dry run"
        elif is_here:
            start = time.monotonic()
            row["state"], row["told"] = _run(line, min(LIMIT_S, seconds_left / 4))
            row["seconds"] = time.monotonic() - start
        rows.append(row)
    return rows


def command(binary: str, tool: str, kernel: str | None) -> list[str]:
    """The command line of one tool."""
    line = [binary, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable]
    line += [str(Path(__file__).parents[1] / "gpu"), "--only", "checks", "--small"]
    return line + (["--kernels", kernel] if kernel else [])


def _run(line: list[str], limit_s: float) -> tuple[str, str]:
    """(state, end of what it printed)."""
    # Torch's allocator would hide reads beyond a tensor within its own big blocks.
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with subprocess.Popen(
        line,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # Its child too, which would go on using the GPU.
            os.killpg(process.pid, signal.SIGKILL)
            return "out of time", f"more than {limit_s:.0f} s"
    status = process.returncode
    state = {0: "clean", FOUND: "errors"}.get(status, f"failed ({status})")
    return state, " ".join(told.strip().splitlines()[-1:])
