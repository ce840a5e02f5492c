"""A benchmark worker from outside: started under a memory limit, watched, and judged."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.errors import SubSpecError
from vllm_subspec.tools.bench_worker import Job
from vllm_subspec.tools.cgroup import MemoryGroup, NoMemoryGroup, memory_group

RUNTIME_ALLOWANCE_BYTES = 1 << 30
"""Added to the budget for what every vLLM process needs whatever its model: Python, torch, vLLM
and their libraries, the tokenizer, activations, one layer while it loads."""

_WORKER = ["-m", "vllm_subspec.tools.bench_worker"]
_POLL_S = 0.1
_TAIL_LINES = 40
_PARTS = {"VmHWM": "peak_rss", "RssAnon": "peak_anonymous", "RssFile": "peak_file"}


class WorkerError(SubSpecError, RuntimeError):
    """A worker failed; the message ends with the tail of its log."""


class WorkerKilled(WorkerError):
    """A worker was killed for its memory limit."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one worker, in bytes.

    Attributes:
        limit: budget and runtime allowance.
        enforced: whether the kernel enforced the limit; if not, ``within`` is all there is.
        why_not: why it could not be enforced; empty if it was.
        within: whether the resident peak stayed below the limit.
        peak_rss: VmHWM, anonymous and file pages together.
        peak_anonymous: the most anonymous pages, sampled every 0.1 s.
        peak_file: the most mapped file pages, sampled likewise; the kernel can drop these.
        peak_charged: the group's own peak, page cache included; ``None`` without a group.
    """

    limit: int
    enforced: bool
    why_not: str
    within: bool
    peak_rss: int
    peak_anonymous: int
    peak_file: int
    peak_charged: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_worker(job: Job, limit_bytes: int, log: Path) -> tuple[dict[str, Any], MemoryUse]:
    """Run one job to its end; its memory group is made and removed here.

    Args:
        job: what to do; ``procs`` is filled in here.
        limit_bytes: memory that it may use, enforced where the machine allows.
        log: takes the worker's output; overwritten.

    Raises:
        WorkerKilled: it used more than the limit.
        WorkerError: it failed for another reason.
    """
    with _limit(limit_bytes) as (group, why_not):
        procs = str(group.procs) if group is not None else None
        try:
            result, peaks = run_job(_WORKER, asdict(job) | {"procs": procs}, log)
        except WorkerError as error:
            if group is not None and group.kills():
                raise WorkerKilled(f"killed at the memory limit of {limit_bytes} bytes") from error
            raise
        charged = group.peak_bytes() if group is not None else None
    within = peaks["peak_rss"] <= limit_bytes
    enforced = group is not None
    return result, MemoryUse(limit_bytes, enforced, why_not, within, peak_charged=charged, **peaks)


def run_job(
    worker: Sequence[str], job: Mapping[str, Any], log: Path
) -> tuple[dict[str, Any], dict[str, int]]:
    """Run Python with ``worker`` and two files: the job to read, and the result to write.

    Args:
        worker: arguments of the interpreter.
        job: JSON-serialisable.
        log: takes the worker's output; overwritten.

    Returns:
        The result, and the peaks of the worker's memory, by the names of ``MemoryUse``.

    Raises:
        WorkerError: it ended without a result.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
        job_file.write_text(json.dumps(job))
        status, peaks = _run([*worker, str(job_file), str(result_file)], log)
        if status != 0 or not result_file.exists():
            raise WorkerError(
                f"a worker ended with exit status {status}; its own reason is near the end of "
                f"{log}:\n{_tail(log)}"
            )
        return json.loads(result_file.read_text()), peaks


@contextmanager
def _limit(limit_bytes: int) -> Iterator[tuple[MemoryGroup | None, str]]:
    """A memory group, or why there is none: then the peak is compared with the limit instead."""
    with ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit_bytes))
        except NoMemoryGroup as error:
            yield None, str(error)
            return
        yield group, ""


def _run(arguments: Sequence[str], log: Path) -> tuple[int, dict[str, int]]:
    # The engine runs in the worker itself, and the size of the KV cache is an argument's alone.
    environment = ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING=0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*environment, sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    peaks = dict.fromkeys(_PARTS.values(), 0)
    try:
        while process.poll() is None:
            _sample(process.pid, peaks)
            time.sleep(_POLL_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, peaks


def _sample(pid: int, peaks: dict[str, int]) -> None:
    """Raise the peaks to what the process has now (proc(5), status); a dead one has nothing."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _PARTS:
            peaks[_PARTS[name]] = max(peaks[_PARTS[name]], int(value.split()[0]) * 1024)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])
