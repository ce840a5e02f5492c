"""A server that is going to be killed: found in a phase of its start, or in the midst of work."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from proofs.servers import options
from vllm_subspec.tools.serving import free_port, vllm_serve

START_S = 600.0
# vLLM's own time-out, for an engine core whose API server was killed before it greeted it.
GONE_S = 330.0
VICTIMS = ("API server", "EngineCore", "Worker")


@dataclass(frozen=True)
class Mortal:
    """A server of a process group of its own, from its first moment on."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def is_healthy(self) -> bool:
        """Whether it answers."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=5.0).is_success
        return False

    def wait_for(self, phase: Callable[[], bool], poll_s: float = 0.1) -> bool:
        """Whether ``phase`` came, before the server ended or ``START_S`` were over."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if phase():
                return True
            time.sleep(poll_s)
        return False

    def kill(self, victim: str) -> bool:
        """SIGKILL to one of ``VICTIMS``; False where there is no such process yet."""
        if victim == "API server":
            self.process.kill()
            return True
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.name().startswith(f"VLLM::{victim}"):
                    os.kill(process.pid, signal.SIGKILL)
                    return True
        return False

    def survivors(self) -> list[str]:
        """Processes that are still there after ``GONE_S``; normally none."""
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.2)
        return [str(process) for process in left]

    def processes(self) -> list[psutil.Process]:
        """All processes that the server started and that live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found


@contextmanager
def started(model: Path, log: Path, subspec: dict[str, object], cache: Path) -> Iterator[Mortal]:
    """Start a server, and leave no process of it behind.

    Args:
        model: what it serves.
        log: where its output goes; overwritten.
        subspec: SubSpec's options.
        cache: of shadows and spills; temporary files go beside it.
    """
    port = free_port()
    temporary = cache.with_name("tmp")
    temporary.mkdir(exist_ok=True)
    variables = os.environ | {"SUBSPEC_CACHE": str(cache), "TMPDIR": str(temporary)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            vllm_serve(model, port, options(subspec)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
        )
    server = Mortal(process, f"http://127.0.0.1:{port}", log)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        server.survivors()
