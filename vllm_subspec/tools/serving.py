"""A vLLM server of one's own: start it, wait until it answers, read its counters, stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from vllm_subspec.errors import SubSpecError

_HOST = "127.0.0.1"
_POLL_S = 0.2
_STOP_S = 30.0
_WORKERS_STOP_S = 5.0
_DEATH_S = 2.0
_TAIL_LINES = 40


class ServerError(SubSpecError, RuntimeError):
    """A server did not start, or went away; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Memory:
    """Memory of a server's workers, the processes that hold the model, in bytes.

    Attributes:
        resident: VmRSS now.
        peak: VmHWM, the most that was ever resident.
    """

    resident: int
    peak: int


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        process: the command that was started; it leads a process group of its own.
        port: on the loopback interface.
        log: where its output goes.
    """

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Without a trailing slash; the OpenAI API is at ``/v1``."""
        return f"http://{_HOST}:{self.port}"

    def statistics(self) -> dict[str, Any]:
        """SubSpec's counters since the server started (the first rank's, if there are several).

        Raises:
            ServerError: the server was not started by `vllm_serve`, does not run SubSpec, or died.
        """
        try:
            with httpx.Client(trust_env=False, timeout=60.0) as client:
                answer = client.post(
                    f"{self.url}/collective_rpc", json={"method": "subspec_statistics"}
                )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"no statistics ({error}); the log:\n{_tail(self.log)}") from error
        statistics: dict[str, Any] = answer.json()["results"][0]
        return statistics

    def memory(self) -> Memory:
        """Of all workers together.

        Raises:
            ServerError: none is running.
        """
        with _explaining_death(self):
            family = psutil.Process(self.process.pid).children(recursive=True)
            workers = [child for child in family if child.name().startswith("VLLM::Worker")]
            usages = [_memory(worker.pid) for worker in workers]
        if not usages:
            raise ServerError(f"{self.url} has no worker process\n{_tail(self.log)}")
        return Memory(sum(u.resident for u in usages), sum(u.peak for u in usages))


def vllm_serve(model: Path, port: int, options: Sequence[str]) -> list[str]:
    """The command line of ``vllm serve`` on the loopback interface.

    vLLM offers worker RPCs, here used for SubSpec's counters, in its development mode only.
    """
    serve = ["vllm", "serve", str(model), "--host", _HOST, "--port", str(port)]
    return ["env", "VLLM_SERVER_DEV_MODE=1", *serve, *options]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def interrupt_on_termination() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does: with its servers stopped."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)


@contextmanager
def running(
    command: Sequence[str], port: int, log: Path, timeout_s: float = 300.0
) -> Iterator[Server]:
    """Run a server until the block ends, however it ends.

    The server leads a session of its own: Ctrl-C in a terminal reaches the caller alone, which
    then stops the server in order; a process that does not stop in time is killed.

    Args:
        command: what to start; it must answer ``GET /health`` on ``port``.
        port: where it will listen.
        log: the file that takes its output; overwritten.
        timeout_s: seconds it may take until it answers.

    Raises:
        ServerError: it cannot be started, ended, or did not answer in time; or it went away while
            the block failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"cannot start {command[0]}: {error}") from error
    server = Server(process, port, log)
    try:
        _wait_until_healthy(server, timeout_s)
        with _explaining_death(server):
            yield server
    finally:
        _stop(process)


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while server.process.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get(f"{server.url}/health").is_success and server.process.poll() is None:
                    return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server did not answer within {timeout_s:.0f} s: a slower machine needs "
                    f"a longer time-out. The end of {server.log}:\n{_tail(server.log)}"
                )
            time.sleep(_POLL_S)
    raise ServerError(_obituary(server))


@contextmanager
def _explaining_death(server: Server) -> Iterator[None]:
    """A failure of the block is the server's, if that has gone meanwhile."""
    try:
        yield
    except Exception as error:
        # A crash closes the connection a moment before the process is gone.
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(timeout=_DEATH_S)
            raise ServerError(_obituary(server)) from error
        raise


def _obituary(server: Server) -> str:
    status = server.process.returncode
    return (
        f"the server ended with exit status {status}; its own reason is near the end of "
        f"{server.log}:\n{_tail(server.log)}"
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-_TAIL_LINES:])


def _memory(pid: int) -> Memory:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return Memory(resident, peak)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, wait for it and for its workers, and kill what is left of them."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        if process.poll() is not None:
            _wait_for_group(process.pid, _WORKERS_STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_for_group(process.pid, _WORKERS_STOP_S)


def _wait_for_group(group: int, timeout_s: float) -> None:
    """Return when no process of the group lives, or when the time is over."""
    deadline = time.monotonic() + timeout_s
    while any(_lives_in(other, group) for other in psutil.process_iter()):
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _lives_in(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
