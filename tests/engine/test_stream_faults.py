"""A disk that fails under generation: right tokens or an error, and right again afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable

import pytest

from vllm_subspec.errors import SpillDamagedError, SpillError

pytestmark = pytest.mark.engine

DRAFT = {"width": 4, "depth": 8, "bits": 8, "stream": "disk", "slots": 1}


@pytest.fixture(scope="module")
def requests(prompts):
    return [(prompt, {"max_tokens": 20}) for prompt in prompts[:4]]


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, requests):
    with open_engine(lively_model_dir) as plain:
        return plain.batch(requests)


@pytest.fixture(scope="module")
def stream_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("spill") / "below"


@pytest.fixture(scope="module")
def engine(expected, open_engine, lively_model_dir, stream_dir):
    with open_engine(lively_model_dir, DRAFT | {"stream_dir": str(stream_dir)}) as engine:
        yield engine


@pytest.fixture
def spill(engine, stream_dir):
    (spill,) = stream_dir.glob("*.spill")
    return spill


@pytest.fixture
def inject(monkeypatch):
    """``inject(fault)``: run before every system call that reads, with its number."""
    real, lock, number = os.preadv, threading.Lock(), 0

    def inject(fault: Callable[[int], None]) -> None:
        def preadv(*arguments):
            nonlocal number
            with lock:
                number += 1
                mine = number
            fault(mine)
            return real(*arguments)

        monkeypatch.setattr(os, "preadv", preadv)

    return inject


def fails(engine, requests, kind, message) -> None:
    """The requests end with that error, and the caller gives them up."""
    with pytest.raises(kind, match=message):
        engine.batch(requests)
    llm_engine = engine.llm.llm_engine
    llm_engine.abort_request(list(llm_engine.output_processor.request_states), internal=True)
    assert not llm_engine.has_unfinished_requests()
    # A pass that failed left blocks that vLLM had marked as computed before it ran.
    assert llm_engine.reset_prefix_cache()


def test_errors_that_pass_are_survived(engine, requests, expected, inject):
    before = engine.statistics()["stream_retries"]

    def fault(number: int) -> None:
        if number % 7 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    inject(fault)
    assert engine.batch(requests) == expected
    assert engine.statistics()["stream_retries"] > before


def test_a_slow_disk_only_takes_longer(engine, requests, expected, inject):
    inject(lambda number: time.sleep(0.01))
    assert engine.batch(requests) == expected


def test_errors_that_stay_end_the_requests(engine, requests, expected, inject):
    broken = threading.Event()
    broken.set()

    def fault(number: int) -> None:
        if broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    inject(fault)
    fails(engine, requests, SpillError, r"cannot read layer \d from .* errno 5 ")
    broken.clear()
    assert engine.batch(requests) == expected


def test_a_disk_that_hangs_ends_the_requests(engine, requests, expected, inject, monkeypatch):
    hung = threading.Event()
    inject(lambda number: hung.wait(60))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.offloader.streamer, "_timeout_s", 0.2)
        fails(engine, requests, SpillError, r"layer \d was not read within 0\.2 s")
    hung.set()
    assert engine.batch(requests) == expected


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_spill_that_is_damaged_ends_the_requests(engine, requests, expected, spill, damage):
    content = spill.read_bytes()
    time.sleep(0.02)  # a tick of the file system's clock
    if damage == "truncated":
        os.truncate(spill, len(content) // 2)
    else:
        middle = len(content) // 2
        with spill.open("r+b") as file:
            file.seek(middle)
            file.write(bytes([content[middle] ^ 1]))
    fails(engine, requests, SpillDamagedError, "the file ends at byte|digest in the manifest")
    with spill.open("r+b") as file:
        file.write(content)
    assert engine.batch(requests) == expected


def test_a_removed_spill_is_read_on(engine, requests, expected, spill):
    engine.add(requests)
    outputs = []
    for _ in range(3):
        outputs += engine.step()
    spill.unlink()
    for _ in range(2):
        outputs += engine.step()
    shutil.rmtree(spill.parent)
    assert engine.finish(outputs) == expected
    assert engine.batch(requests) == expected
