"""Layers from a real disk: right bytes in every pass; a failing disk is an error, not a hang."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from vllm_subspec.errors import ConfigError, SpillDamagedError, SpillError
from vllm_subspec.stream import DiskStore, LayerStreamer, Spill
from vllm_subspec.stream.blockfile import aligned_buffer
from vllm_subspec.stream.link import EmulatedLink


@pytest.fixture
def spill(case: Any) -> Spill:
    case.write(case.weights(0))
    return case.open()


def assert_same(views: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    assert views.keys() == weights.keys()
    for name, tensor in weights.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor), name


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize(("num_threads", "chunk_bytes"), [(1, 4096), (4, 8192), (2, 4 << 20)])
def test_each_pass_reads_exactly_the_stored_weights(
    case: Any, spill: Spill, num_slots: int, num_threads: int, chunk_bytes: int
) -> None:
    store = DiskStore(spill, num_threads, chunk_bytes)
    weights = case.weights(0)
    with LayerStreamer(store, case.layout, num_slots) as streamer:
        streamer.start()
        for layer in [0, 1, 2] * 4:
            views = streamer.acquire(layer)
            assert_same(views, weights[layer])
            for view in views.values():
                view.zero_()  # what is not read again would be found wrong
            streamer.release(layer)
        assert streamer.statistics().reads >= 12
        assert streamer.statistics().bytes_read >= 4 * case.layout.total_bytes


@pytest.mark.parametrize("num_slots", [3, 8])
def test_as_many_slots_as_layers_read_once(case: Any, spill: Spill, num_slots: int) -> None:
    weights = case.weights(0)
    with LayerStreamer(DiskStore(spill), case.layout, num_slots) as streamer:
        for layer in [0, 1, 2] * 4:
            assert_same(streamer.acquire(layer), weights[layer])
            streamer.release(layer)
        assert streamer.statistics().reads == 3
        assert streamer.statistics().bytes_read == case.layout.total_bytes


def test_a_truncated_spill_is_an_error_not_a_hang(case: Any, spill: Spill) -> None:
    weights = case.weights(0)
    end = case.layout.total_bytes - 4096
    tail = case.spill.read_bytes()[end:]
    os.truncate(case.spill, end)
    with LayerStreamer(DiskStore(spill, chunk_bytes=4096), case.layout, 1) as streamer:
        for layer in (0, 1):
            assert_same(streamer.acquire(layer), weights[layer])
            streamer.release(layer)
        ended = rf"layer 2 from .* at {end} failed .* \(the file ends at byte {end}\)"
        with pytest.raises(SpillDamagedError, match=ended):
            streamer.acquire(2)
        assert streamer.statistics().retries == 0
        with case.spill.open("r+b") as file:
            file.seek(end)
            file.write(tail)
        assert_same(streamer.acquire(2), weights[2])


def test_a_read_error_names_its_errno(case: Any, spill: Spill) -> None:
    with LayerStreamer(DiskStore(spill), case.layout, 2) as streamer:
        spill.close()
        with pytest.raises(SpillError, match=r"layer 0 .* errno 9"):
            streamer.acquire(0)


def test_close_is_idempotent_and_ends_reads_of_a_slow_link(case: Any, spill: Spill) -> None:
    store = DiskStore(spill, num_threads=2, chunk_bytes=4096, emulate_bytes_per_s=1)
    streamer = LayerStreamer(store, case.layout, 3, timeout_s=0.02)
    with pytest.raises(SpillError, match="not read within"):
        streamer.acquire(0)
    streamer.close()
    streamer.close()
    with pytest.raises(SpillError, match="the stream is closed"):
        streamer.acquire(0)


def test_a_store_that_closes_ends_every_read(case: Any, spill: Spill) -> None:
    store = DiskStore(spill, num_threads=1, chunk_bytes=4096, emulate_bytes_per_s=1)
    buffers = [aligned_buffer(layer.nbytes) for layer in case.layout.layers]
    futures = [store.start_read(layer, buffer) for layer, buffer in enumerate(buffers)]
    store.close()
    assert all(future.done() for future in futures)
    with pytest.raises(SpillError, match="closed before this read began"):
        futures[-1].result()


def test_an_emulated_link_carries_one_chunk_after_another() -> None:
    link = EmulatedLink(10.0, threading.Event())
    first, second, third = link.send(1000), link.send(50), link.send(1)
    assert second - first == pytest.approx(5.0)
    assert third - second == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_threads": 0}, "num_threads=0"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"chunk_bytes": 5000}, "multiple of 4096"),
        ({"emulate_bytes_per_s": 0.0}, "emulate_bytes_per_s"),
    ],
)
def test_settings_out_of_range(spill: Spill, setting: dict, message: str) -> None:
    with spill, pytest.raises(ConfigError, match=message):
        DiskStore(spill, **setting)
