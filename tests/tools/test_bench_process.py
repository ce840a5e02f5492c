"""Workers from outside: small programs in the worker's place, under this machine's own limits."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vllm_subspec.tools import bench_process
from vllm_subspec.tools.bench_process import WorkerError, WorkerKilled, run_worker
from vllm_subspec.tools.bench_worker import Job
from vllm_subspec.tools.cgroup import NoMemoryGroup

JOB = Job({"model": "m"}, True, ["hi"], 8, False, None)
ANSWER = """
import json, sys, time
job = json.load(open(sys.argv[1]))
held = bytearray(b"1" * (60 << 20))
time.sleep(0.5)  # a few samples
json.dump({"answers": [job["arguments"]], "procs": job["procs"]}, open(sys.argv[2], "w"))
"""


def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(program)
    monkeypatch.setattr(bench_process, "_WORKER", [str(script)])
    return tmp_path / "logs" / "worker.log"


class Group:
    """A memory group of which a test says how many processes the kernel killed."""

    def __init__(self, kills: int) -> None:
        self.procs, self._kills = Path("procs"), kills

    def kills(self) -> int:
        return self._kills

    def peak_bytes(self) -> int:
        return 77


def enforce(monkeypatch: pytest.MonkeyPatch, kills: int = 0) -> None:
    @contextmanager
    def group(limit_bytes: int) -> Any:
        yield Group(kills)

    monkeypatch.setattr(bench_process, "memory_group", group)


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(limit_bytes: int) -> NoReturn:
        raise NoMemoryGroup("no memory controller is mounted here")

    monkeypatch.setattr(bench_process, "memory_group", refuse)


def test_result_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enforce(monkeypatch)
    result, memory = run_worker(JOB, 1 << 30, worker(monkeypatch, tmp_path, ANSWER))
    assert result == {"answers": [{"model": "m"}], "procs": "procs"}
    assert memory.peak_rss >= memory.peak_anonymous > 60 << 20
    assert memory.peak_file > 0
    assert (memory.enforced, memory.within, memory.peak_charged) == (True, True, 77)


def test_without_a_group_the_peak_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forbid(monkeypatch)
    log = worker(monkeypatch, tmp_path, ANSWER)
    result, memory = run_worker(JOB, 50 << 20, log)
    assert result["procs"] is None
    assert (memory.enforced, memory.within, memory.peak_charged) == (False, False, None)
    assert memory.why_not == "no memory controller is mounted here"
    assert run_worker(JOB, 1 << 30, log)[1].within


def test_a_kill_at_the_limit_is_told_from_any_other_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    log = worker(monkeypatch, tmp_path, suicide)
    enforce(monkeypatch, kills=1)
    with pytest.raises(WorkerKilled, match="memory limit of 1073741824 bytes"):
        run_worker(JOB, 1 << 30, log)
    enforce(monkeypatch, kills=0)
    with pytest.raises(WorkerError, match="exit status -9") as caught:
        run_worker(JOB, 1 << 30, log)
    assert not isinstance(caught.value, WorkerKilled)


def test_the_log_explains_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forbid(monkeypatch)
    log = worker(monkeypatch, tmp_path, "print('no such model'); raise SystemExit(3)")
    with pytest.raises(WorkerError, match=r"exit status 3(.|\n)*no such model"):
        run_worker(JOB, 1 << 30, log)
    worker(monkeypatch, tmp_path, "print('forgot the result')")
    with pytest.raises(WorkerError, match="forgot the result"):
        run_worker(JOB, 1 << 30, log)


def test_the_environment_cannot_change_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forbid(monkeypatch)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    names = "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"
    program = (
        f"import json, os, sys; json.dump([os.environ.get(n) for n in {names}], "
        f"open(sys.argv[2], 'w'))"
    )
    result, _ = run_worker(JOB, 1 << 30, worker(monkeypatch, tmp_path, program))
    assert result == [None, "0"]
