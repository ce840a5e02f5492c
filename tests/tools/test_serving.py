"""A server's life: it starts and is asked, or it fails with its own words; it never outlives us."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from vllm_subspec.tools import serving
from vllm_subspec.tools.measure import run_prompts
from vllm_subspec.tools.serving import Server, ServerError, free_port, running, vllm_serve

FAKE = Path(__file__).with_name("fake_server.py")
Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(serving, "_DEATH_S", 0.5)
    monkeypatch.setattr(serving, "_WORKERS_STOP_S", 1.0)

    def start(mode: str, timeout_s: float = 30.0) -> AbstractContextManager[Server]:
        port = free_port()
        command = [sys.executable, str(FAKE), str(port), mode, str(tmp_path / "child")]
        return running(command, port, tmp_path / "logs" / "server.log", timeout_s)

    return start


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def child_pid(folder: Path) -> int:
    return int((folder / "child").read_text())


def test_server_is_asked_and_then_stopped_with_its_child(start: Start, tmp_path: Path) -> None:
    with start("well") as server:
        assert server.statistics() == {"target_passes": 3, "accepted_by_level": [2, 2, 2]}
        worker = psutil.Process(child_pid(tmp_path)).memory_info().rss
        memory = server.memory()
        assert 64 << 20 < memory.resident <= memory.peak
        assert memory.resident == pytest.approx(worker, rel=0.05)
        assert is_alive(child_pid(tmp_path))
    assert server.process.returncode == 0
    assert not is_alive(child_pid(tmp_path))


def test_prompts_are_streamed_and_counted_without_the_warm_up(start: Start) -> None:
    shown: list[str] = []
    with start("well") as server:
        run = run_prompts(server, "m", ["Hello?", "Again?"], 8, shown.append)
    assert "".join(shown) == "\n> Hello?\nSalut, toi\n\n> Again?\nSalut, toi\n"
    assert [a.tokens for a in run.answers] == [(7, 8, 9, 2)] * 2
    assert [a.prompt for a in run.answers] == [(1, 4, 5)] * 2
    assert run.answers[0].text == "Salut, toi"
    assert run.new_tokens == 8
    assert run.tokens_per_s == pytest.approx(8 / run.seconds)
    # Two passes a question; the warm-up's own two came before the first reading.
    assert run.statistics == {"target_passes": 4, "accepted_by_level": [0] * 5 + [2] * 4}


def test_dead_server_is_quoted(start: Start) -> None:
    with pytest.raises(ServerError) as info, start("dead"):
        pytest.fail("it never answered")
    assert "ended with exit status 1" in str(info.value)
    assert "  | fake server starts\n  | cannot find the weights" in str(info.value)


def test_missing_command_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="cannot start no-such-command"),
        running(["no-such-command"], 1, tmp_path / "log"),
    ):
        pytest.fail("it cannot run")


def test_mute_server_is_given_up_and_stopped(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="did not answer within 1 s"), start("mute", 1.0):
        pytest.fail("it never answered")
    assert not is_alive(child_pid(tmp_path))


def test_death_while_in_use_is_quoted(start: Start, tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"exit status 9(?s:.*)out of luck"),
        start("brittle") as server,
    ):
        run_prompts(server, "m", ["Hello?"], 8, print)
    assert not is_alive(child_pid(tmp_path))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_callers_own_failure_passes_and_stops_the_server(
    start: Start, tmp_path: Path, error: BaseException
) -> None:
    with pytest.raises(type(error)) as info, start("well"):
        raise error
    assert info.value is error
    assert not is_alive(child_pid(tmp_path))


def test_stubborn_server_is_killed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_STOP_S", 0.5)
    with start("stubborn") as server:
        assert is_alive(child_pid(tmp_path))
    assert server.process.returncode == -signal.SIGKILL
    assert not is_alive(child_pid(tmp_path))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_program_stops_its_server(tmp_path: Path, signum: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, str(FAKE), str(port), "well", str(tmp_path / "child")]
    # A shell that starts this suite in the background has SIGINT ignored by all its children.
    program = f"""
import signal, time
from pathlib import Path
from vllm_subspec.tools.serving import interrupt_on_termination, running
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt_on_termination()
with running({command!r}, {port}, Path({str(tmp_path / "log")!r})):
    print("up", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signum)
        _, errors = process.communicate(timeout=20)
    assert errors.endswith("KeyboardInterrupt\n")
    assert not is_alive(child_pid(tmp_path))


def test_free_port_can_be_listened_on() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port() != port


def test_command_line_stays_on_the_loopback_interface() -> None:
    command = vllm_serve(Path("models/m"), 123, ["--max-model-len=64"])
    assert command == [
        *("env", "VLLM_SERVER_DEV_MODE=1", "vllm", "serve", "models/m"),
        *("--host", "127.0.0.1", "--port", "123", "--max-model-len=64"),
    ]
