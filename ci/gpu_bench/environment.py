"""What the figures were taken with, and the most that the machine can do."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from gpu_bench.device import Device
from gpu_bench.report import Rows

_ASKED = ["driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"]
_ASKED += ["power.limit", "pcie.link.gen.gpucurrent", "pcie.link.width.current"]


@dataclass(frozen=True)
class Roofline:
    """The denominators of all shares."""

    bytes_per_s: float
    flops_per_s: float

    def bound_s(self, nbytes: int, flops: int) -> tuple[str, float]:
        """What bounds work of that size, and the least seconds it takes."""
        memory, compute = nbytes / self.bytes_per_s, flops / self.flops_per_s
        return ("memory", memory) if memory >= compute else ("compute", compute)


def facts(device: Device, command: str) -> Rows:
    """Provenance, one fact a record."""
    found = {"command": command, "commit": _commit(), "python": platform.python_version()}
    for package in ("torch", "triton", "gemlite"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    found["cuda"] = torch.version.cuda or "none"
    if not device.is_dry:
        properties = torch.cuda.get_device_properties(device.torch_device)
        found["gpu"] = properties.name
        found["processors"] = str(properties.multi_processor_count)
        found["memory_bytes"] = str(properties.total_memory)
        found |= _driver()
    return [{"fact": name, "value": value} for name, value in found.items()]


def roofline(device: Device, small: bool) -> tuple[Roofline, Rows]:
    """A copy within the device's memory, and a matrix product in bf16."""
    nbytes, side = (1 << 12, 64) if small else (1 << 30, 8192)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    copy_ms = device.time_ms(lambda: target.copy_(source))
    a, b = torch.randn(2, side, side, device=device.torch_device).bfloat16()
    product_ms = device.time_ms(lambda: a @ b)
    peaks = Roofline(2 * nbytes / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)
    rows: Rows = [
        {"peak": "memory, a copy", "figure": peaks.bytes_per_s / 1e9, "unit": "GB/s"},
        {"peak": "dense bf16", "figure": peaks.flops_per_s / 1e12, "unit": "TFLOP/s"},
    ]
    return peaks, rows


def _driver() -> dict[str, str]:
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return {}
    query = [binary, f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", "--id=0"]
    said = subprocess.run(query, capture_output=True, text=True, check=False)
    values = [value.strip() for value in said.stdout.split(",")]
    return dict(zip(_ASKED, values, strict=True)) if len(values) == len(_ASKED) else {}


def _commit() -> str:
    """Of this checkout, "-dirty" where tracked files differ."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    said = subprocess.run(describe, cwd=root, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def command_line() -> str:
    """As it was given."""
    return " ".join(["ci/gpu", *sys.argv[1:]])
