"""A failing disk: what passes is retried, what stays is a typed error, wrong bytes never pass."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vllm_subspec.errors import SpillError
from vllm_subspec.stream import DiskStore, LayerStreamer, Spill, disk

Fault = Callable[[int, int], None]  # (number of the read, offset): raises, or waits, or returns
Inject = Callable[[Fault], None]


@pytest.fixture
def spill(case: Any) -> Spill:
    case.write(case.weights(0))
    return case.open()


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """``inject(fault)``: run before every system call that reads."""
    real, lock = os.preadv, threading.Lock()

    def inject(fault: Fault) -> None:
        number = 0

        def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
            nonlocal number
            with lock:
                number += 1
                mine = number
            fault(mine, offset)
            return real(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)

    return inject


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_WAITS_S", (0.001,) * 4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", sorted(disk.TRANSIENT))
def test_errors_that_pass_are_retried_counted_and_logged(
    case: Any, spill: Spill, inject: Inject, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    failures = iter(range(3))

    def fault(read: int, offset: int) -> None:
        if read % 4 == 0 and next(failures, None) is not None:
            raise OSError(number, os.strerror(number))

    inject(fault)
    with LayerStreamer(DiskStore(spill, 2, 4096), case.layout, 2) as streamer:
        case.run_passes(streamer, 2)
        assert streamer.statistics().retries == 3
    lines = [r.message for r in caplog.records if f"failed with errno {number}" in r.message]
    assert len(lines) == 3
    assert all(str(spill.path) in line and "again in 0.001 s" in line for line in lines)


@pytest.mark.usefixtures("quick")
def test_an_error_that_stays_ends_the_read_and_the_next_one_may_succeed(
    case: Any, spill: Spill, inject: Inject
) -> None:
    broken = threading.Event()
    broken.set()
    bad = case.layout.layers[1].offset

    def fault(read: int, offset: int) -> None:
        if offset == bad and broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    inject(fault)
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        for _ in range(2):
            case.run_passes(streamer, 1, num_layers=1)
            with pytest.raises(SpillError, match=rf"layer 1 from .* at {bad} .* errno 5 "):
                streamer.acquire(1)
        assert streamer.statistics().retries == 8
        broken.clear()
        case.run_passes(streamer, 2)


def test_other_errors_are_not_retried(case: Any, spill: Spill, inject: Inject) -> None:
    def fault(read: int, offset: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    inject(fault)
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        with pytest.raises(SpillError, match="errno 22"):
            streamer.acquire(0)
        assert streamer.statistics().retries == 0


def test_close_does_not_wait_for_further_tries(
    case: Any, spill: Spill, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "RETRY_WAITS_S", (10_000.0,) * 4)
    failed = threading.Event()

    def fault(read: int, offset: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    inject(fault)
    with ThreadPoolExecutor(1) as other:
        streamer = LayerStreamer(DiskStore(spill, 1), case.layout, 3)
        waiting = other.submit(streamer.acquire, 0)
        assert failed.wait(30)
        closing = threading.Thread(target=streamer.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        with pytest.raises(SpillError):
            waiting.result(timeout=30)


def test_a_slow_disk_only_takes_longer(case: Any, spill: Spill, inject: Inject) -> None:
    inject(lambda read, offset: time.sleep(0.005))
    with LayerStreamer(DiskStore(spill, chunk_bytes=4096), case.layout, 2) as streamer:
        case.run_passes(streamer, 2)


def test_a_read_that_hangs_is_an_error_that_names_layer_and_seconds(
    case: Any, spill: Spill, inject: Inject
) -> None:
    hung = threading.Event()
    inject(lambda read, offset: None if read < 2 else hung.wait(30) and None)
    with LayerStreamer(DiskStore(spill, 1), case.layout, 1, timeout_s=0.05) as streamer:
        case.run_passes(streamer, 1, num_layers=1)
        for _ in range(2):
            with pytest.raises(SpillError, match=r"layer 1 was not read within 0\.05 s"):
                streamer.acquire(1)
        hung.set()
        streamer._timeout_s = 30
        streamer.acquire(1)
        streamer.release(1)
        case.run_passes(streamer, 1)
