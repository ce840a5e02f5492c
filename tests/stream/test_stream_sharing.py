"""A spill that several processes want, and writers that die: no one ever reads wrong bytes."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
import threading
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


def test_of_two_first_runs_one_goes_on(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockFile.lock
    both_tried = threading.Barrier(2, timeout=30)

    def lock(self: BlockFile, *, exclusive: bool) -> bool:
        locked = real(self, exclusive=exclusive)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_tried.wait()
        both_tried.abort()
        return locked

    def run(seed: int) -> bool:
        try:
            case.write(case.weights(seed), str(seed))
        except SpillError:
            return False
        return True

    monkeypatch.setattr(BlockFile, "lock", lock)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(run, range(2))) == [False, True]


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
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


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
                SpillWriter(case.directory, "m", layout, identity)
        child.send_signal(signal.SIGKILL)
    for identity in ("old", "new"):
        with pytest.raises(SpillDamagedError, match="no manifest"):
            Spill.open(case.directory, "m", layout, identity)
    with SpillWriter(case.directory, "m", layout, "new") as writer:
        assert [writer.put(layer, {"w": new}) for layer in range(3)] == [True, False, True]
        writer.finish().close()
    Spill.open(case.directory, "m", layout, "new").close()
