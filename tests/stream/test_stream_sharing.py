"""A spill that several processes want, and writers that die: no one ever reads wrong bytes."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_subspec.errors import SpillDamagedError, SpillError
from vllm_subspec.stream import Spill, SpillLayout, SpillWriter, TensorSpec
from vllm_subspec.stream.blockfile import BlockFile

CHILD = """
import sys, time, torch
from pathlib import Path
from vllm_subspec.errors import SpillError
from vllm_subspec.stream import SpillLayout, SpillWriter, TensorSpec
directory, num_layers = Path(sys.argv[1]), int(sys.argv[2])
layout = SpillLayout.of([[TensorSpec("w", (64, 64), torch.float32)]] * num_layers)
"""


def test_processes_with_the_same_weights_share(case: Any) -> None:
    weights = case.weights(0)
    case.write(weights)
    with case.open() as first:
        assert case.write(weights) == [False, False, False]
        with case.open() as second:
            case.assert_holds(second, weights)
        case.assert_holds(first, weights)


def test_a_spill_in_use_is_not_rewritten(case: Any) -> None:
    weights = case.weights(0)
    case.write(weights)
    with case.open() as used:
        with pytest.raises(SpillError, match=r"m\.spill is in use .*stream_dir"):
            case.writer("b")
        with case.writer() as writer:
            assert writer.put(0, weights[0]) is False
            with pytest.raises(SpillError, match=r"m\.spill is in use .*stream_dir"):
                writer.put(1, case.weights(1)[1])
        case.assert_holds(used, weights)
    case.open().close()


def test_finish_hands_over_a_shared_lock(case: Any) -> None:
    weights = case.weights(0)
    with case.writer() as writer:
        for layer in range(3):
            writer.put(layer, weights[layer])
        for use in (case.open, case.writer):
            with pytest.raises(SpillError, match="in use"):
                use()
        spill = writer.finish()
    with spill:
        case.open().close()
        with pytest.raises(SpillError, match="in use"):
            case.writer("b")


def test_a_writer_that_slips_in_while_the_lock_changes_is_noticed(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = case.weights(0)
    case.write(weights)
    real = BlockFile.lock

    def lock(self: BlockFile, *, exclusive: bool) -> bool:
        if exclusive:
            monkeypatch.setattr(BlockFile, "lock", real)
            self.lock(exclusive=False)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            case.write(case.weights(1), "other")
        return real(self, exclusive=exclusive)

    with case.writer() as writer:
        writer.put(0, weights[0])
        monkeypatch.setattr(BlockFile, "lock", lock)
        with pytest.raises(SpillError, match="in use"):
            writer.put(1, case.weights(2)[1])
    with case.open("other") as spill:
        case.assert_holds(spill, case.weights(1))


@pytest.fixture
def both_try_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet at their first tries for the exclusive lock, before and after them."""
    real = BlockFile.lock
    both = threading.Barrier(2, timeout=30)
    met = {threading.get_ident()}  # this one prepares the case

    def lock(self: BlockFile, *, exclusive: bool) -> bool:
        if not exclusive or threading.get_ident() in met:
            return real(self, exclusive=exclusive)
        met.add(threading.get_ident())
        both.wait()
        locked = real(self, exclusive=exclusive)
        both.wait()
        return locked

    monkeypatch.setattr(BlockFile, "lock", lock)


@pytest.mark.usefixtures("both_try_at_once")
@pytest.mark.parametrize("rewritten", [False, True], ids=["no-spill", "of-other-weights"])
def test_of_two_first_runs_one_writes_and_both_go_on(case: Any, rewritten: bool) -> None:
    weights = case.weights(0)
    if rewritten:
        case.write(weights, "other")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(case.write, weights, patience_s=60.0) for _ in range(2)]
        written = [run.result() for run in runs]
    # Of other weights are the name and the manifest only: the bytes are kept.
    assert sorted(written) == [[False] * 3, [not rewritten] * 3]
    with case.open() as spill:
        case.assert_holds(spill, weights)


@pytest.mark.usefixtures("both_try_at_once")
def test_of_two_that_find_a_changed_layer_one_writes_it(case: Any) -> None:
    changed = case.weights(0)
    with case.writer() as writer:
        for layer in range(3):
            writer.put(layer, changed[layer])
        writer.finish().close()
    changed[1] = case.weights(1)[1]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(case.write, changed, patience_s=60.0) for _ in range(2)]
        written = sorted(run.result() for run in runs)
    assert written == [[False, False, False], [False, False, True]]  # in the order 2, 0, 1
    with case.open() as spill:
        case.assert_holds(spill, changed)


def test_a_file_removed_between_open_and_lock_is_opened_anew(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlockFile.lock

    def lock(self: BlockFile, *, exclusive: bool) -> bool:
        monkeypatch.setattr(BlockFile, "lock", real)
        self.path.unlink()
        return real(self, exclusive=exclusive)

    monkeypatch.setattr(BlockFile, "lock", lock)
    case.write(case.weights(0))
    case.open().close()


def _python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)


REPLICA = (
    CHILD
    + """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO, force=True)
with SpillWriter(directory, "m", layout, "a", patience_s=120.0) as writer:
    print("open", flush=True)
    sys.stdin.readline()
    written = sum(writer.put(n, {"w": torch.full((64, 64), 1.0 + n)}) for n in range(num_layers))
    spill = writer.finish()
print("written", written, flush=True)
spill.verify()
sys.stdin.readline()
"""
)


@contextlib.contextmanager
def _replicas(case: Any, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_python(REPLICA, str(case.directory), "3")) for _ in range(count)
        ]


def _lines(child: subprocess.Popen[str], until: str) -> list[str]:
    """What it prints up to the line that begins so."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(until):
            return lines
    raise AssertionError(f"no line begins with {until!r}: {lines}")


def _go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()


def test_a_second_process_waits_for_the_writer_and_shares_its_spill(case: Any) -> None:
    with _replicas(case, 1) as (first,):
        assert _lines(first, "open") == ["open"]
        with _replicas(case, 1) as (second,):
            waiting = f"waiting up to 120 s for the process that writes {case.spill}"
            assert _lines(second, "waiting") == [waiting]
            _go(first)
            assert _lines(first, "written")[-1] == "written 3"
            assert _lines(second, "open") == ["open"]
            _go(second)
            assert _lines(second, "written")[-1] == "written 0"
            _go(second)
            _go(first)
    assert (first.returncode, second.returncode) == (0, 0)


def test_three_processes_that_begin_at_once_share_what_one_of_them_writes(case: Any) -> None:
    with _replicas(case, 3) as children:
        for child in children:
            _go(child)
        written = [_lines(child, "written")[-1] for child in children]
        for child in children:
            _go(child)
    assert sorted(written) == ["written 0", "written 0", "written 3"]
    assert [child.returncode for child in children] == [0, 0, 0]


def test_who_waits_for_a_writer_that_dies_writes_itself(case: Any) -> None:
    with _replicas(case, 1) as (first,):
        _lines(first, "open")
        with _replicas(case, 1) as (second,):
            _lines(second, "waiting")
            first.send_signal(signal.SIGKILL)
            _lines(second, "open")
            _go(second)
            assert _lines(second, "written")[-1] == "written 3"
            _go(second)
    assert second.returncode == 0


def test_waiting_for_a_writer_has_an_end(case: Any) -> None:
    with case.writer(), pytest.raises(SpillError, match=r"m\.spill is in use .*stream_dir"):
        case.writer(patience_s=0.3)


def test_a_full_disk_is_found_before_anything_is_written(case: Any) -> None:
    code = CHILD + (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    SpillWriter(directory, 'm', layout, 'a')\n"
        "except SpillError as error:\n    print(error)\n"
    )
    with _python(code, str(case.directory), "20") as child:
        message = child.communicate(timeout=60)[0]
    assert "File too large" in message
    assert f"needs {20 * 16384} bytes" in message
    assert "stream_dir" in message
    assert list(case.directory.iterdir()) == []


def test_a_killed_writer_leaves_no_false_manifest(case: Any) -> None:
    layout = SpillLayout.of([[TensorSpec("w", (64, 64), torch.float32)]] * 3)
    old, new = torch.zeros(64, 64), torch.ones(64, 64)
    with SpillWriter(case.directory, "m", layout, "old") as writer:
        for layer in range(3):
            writer.put(layer, {"w": old})
        writer.finish().close()
    code = CHILD + (
        "writer = SpillWriter(directory, 'm', layout, 'new')\n"
        "writer.put(1, {'w': torch.ones(64, 64)})\n"
        "print('written', flush=True)\ntime.sleep(30)\n"
    )
    with _python(code, str(case.directory), "3") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        for identity in ("old", "new"):
            with pytest.raises(SpillError, match="in use by another process"):
                SpillWriter(case.directory, "m", layout, identity, patience_s=0.2)
        child.send_signal(signal.SIGKILL)
    for identity in ("old", "new"):
        with pytest.raises(SpillDamagedError, match="no manifest"):
            Spill.open(case.directory, "m", layout, identity)
    with SpillWriter(case.directory, "m", layout, "new") as writer:
        assert [writer.put(layer, {"w": new}) for layer in range(3)] == [True, False, True]
        writer.finish().close()
    Spill.open(case.directory, "m", layout, "new").close()
