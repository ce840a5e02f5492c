"""What would stop SubSpec on this machine, or slow it down; and how fast the link is."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from vllm_subspec import envs
from vllm_subspec.errors import SpillError
from vllm_subspec.files import private_directory
from vllm_subspec.plan.budget import device_memory_bytes
from vllm_subspec.stream.probe import PROBE_LAYER_BYTES, PROBE_LAYERS, link_bytes_per_s
from vllm_subspec.tools.bench_report import gib, table

Verdict = Literal["ok", "slow", "stops"]
_SPARE_BYTES = 64 << 20
_GOOD_LINK = 0.5e9  # bytes/s; below it even a small model waits a second a token


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        found: what is there.
        verdict: ``ok``; ``slow``: SubSpec works, but not at this machine's best; ``stops``.
        advice: what to do; empty where all is well.
        figure: what was measured, in bytes or bytes a second; for the JSON file.
    """

    name: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""
    figure: float | None = None


def diagnose(model: Path | None, stream_dir: Path | None) -> list[Check]:
    """Look at everything; takes about ten seconds, a minute where the kernel is not built yet.

    Args:
        model: folder of a target that is to be served; ``None`` for none.
        stream_dir: where its spill would lie; ``None`` for the default.
    """
    checks = [*_software(), *_threads(), _kernel(), *_memory(), _cache()]
    checks += _disk(stream_dir or envs.cache_dir() / "spill")
    if model is not None:
        checks.append(_model(model))
    return checks


def _software() -> Iterator[Check]:
    yield Check("Python", platform.python_version())
    yield Check("torch", torch.__version__)
    if importlib.util.find_spec("vllm") is None:
        yield Check("vLLM", "not installed", "stops", "install vllm-subspec[cpu]")
        return
    from vllm_subspec.integration import diagnosis

    yield _judged("vLLM", diagnosis.vllm_facts(), diagnosis.vllm_problem())
    yield _judged("plugin", "vllm.general_plugins: subspec", diagnosis.plugin_problem())
    try:
        yield Check("quantizer", f"hqq {version('hqq')}")
    except PackageNotFoundError:
        advice = "install hqq, or set quantizer to 'rtn'"
        yield Check("quantizer", "hqq is not installed", "stops", advice)


def _judged(name: str, found: str, problem: str | None) -> Check:
    return Check(name, found) if problem is None else Check(name, found, "stops", problem)


def _threads() -> Iterator[Check]:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    found = f"{threads} OpenMP threads on {cores} cores"
    if threads < cores:
        yield Check("threads", found, "slow", f"unset OMP_NUM_THREADS, or set it to {cores}")
    else:
        yield Check("threads", found)
    if "libiomp5" in Path("/proc/self/maps").read_text():
        yield Check("OpenMP runtime", "libiomp5")
    else:
        advice = "put libiomp5.so (package intel-openmp) into LD_PRELOAD: several times faster"
        yield Check("OpenMP runtime", "libiomp5 is not loaded", "slow", advice)
    if importlib.util.find_spec("vllm") is None:
        return
    from vllm_subspec.integration.diagnosis import reserved_cores

    reserved = reserved_cores()
    found = "vLLM's default, one a worker" if reserved is None else str(reserved)
    if reserved == 0 or cores > 4:
        yield Check("reserved cores", found)
    else:
        advice = f"set VLLM_CPU_NUM_OF_RESERVED_CPU=0: with {cores} cores each one counts"
        yield Check("reserved cores", found, "slow", advice)


def _kernel() -> Check:
    from vllm_subspec.shadow import kernel_status

    status = kernel_status()
    if status.startswith("native"):
        return Check("low-bit kernel", status)
    return Check("low-bit kernel", status, "slow", "mend that: 6 bits need the native kernel")


def _memory() -> Iterator[Check]:
    total, usable = psutil.virtual_memory().total, device_memory_bytes()
    found = f"{gib(total)}, {gib(psutil.virtual_memory().available)} available"
    yield Check("memory", found, figure=total)
    limit = "none below that" if usable >= total else gib(usable)
    yield Check("cgroup limit", limit, figure=usable)


def _cache() -> Check:
    folder = envs.cache_dir()
    try:
        private_directory(folder / "shadows")
    except OSError as error:
        return Check("cache", str(folder), "stops", f"{error}; or name another in SUBSPEC_CACHE")
    return Check("cache", f"{folder}, writable, private")


def _disk(folder: Path) -> list[Check]:
    """Free space for a spill, and the speed of reading one."""
    probe_bytes = PROBE_LAYERS * PROBE_LAYER_BYTES
    try:
        free = shutil.disk_usage(private_directory(folder)).free
    except OSError as error:
        return [Check("spill", str(folder), "stops", f"{error}; or name another by stream_dir")]
    if free < probe_bytes + _SPARE_BYTES:
        advice = "free some, or set stream_dir to a larger disk: a spill is as large as the layers"
        return [Check("spill", f"{gib(free)} free in {folder}", "stops", advice)]
    space = Check("spill", f"{gib(free)} free in {folder}")
    try:
        speed = link_bytes_per_s(folder)
    except SpillError as error:
        return [space, Check("link", "cannot be read", "stops", str(error))]
    found = f"{speed / 1e9:.2f} GB/s, O_DIRECT reads of {gib(probe_bytes)}"
    if speed >= _GOOD_LINK:
        return [space, Check("link", found, figure=speed)]
    advice = "set stream_dir to a faster, local disk"
    return [space, Check("link", found, "slow", advice, speed)]


def _model(model: Path) -> Check:
    from vllm_subspec.integration.diagnosis import refusal

    return _judged("model", str(model), refusal(model, {}))


def render(checks: Sequence[Check]) -> str:
    """A markdown table."""
    rows = [
        [c.name, c.verdict, f"{c.found}" + (f": {c.advice}" if c.advice else "")] for c in checks
    ]
    return "\n".join(table(["check", "verdict", "found"], rows))


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """JSON-serialisable: whether nothing stops SubSpec, and every check."""
    return {"works": not stops(checks), "checks": [asdict(check) for check in checks]}


def stops(checks: Sequence[Check]) -> bool:
    """Whether something would stop SubSpec."""
    return any(check.verdict == "stops" for check in checks)
