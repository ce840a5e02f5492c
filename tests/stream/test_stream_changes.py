"""A file that changes under a running stream: read on, or a typed error; never wrong bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import SpillDamagedError
from vllm_subspec.stream import DiskStore, LayerStreamer, Spill, integrity
from vllm_subspec.stream.integrity import BLOCK_BYTES, block_sum


@pytest.fixture
def spill(case: Any) -> Spill:
    case.write(case.weights(0))
    return case.open()


def _unlink(case: Any) -> None:
    case.spill.unlink()


def _remove_directory(case: Any) -> None:
    shutil.rmtree(case.directory)


def _replace(case: Any) -> None:
    """Another file takes the name, as an upgrade or a careless copy would do it."""
    other = case.directory / "other"
    other.write_bytes(bytes(case.layout.total_bytes))
    other.replace(case.spill)


@pytest.mark.parametrize("remove", [_unlink, _remove_directory, _replace])
def test_a_removed_spill_is_read_on(
    case: Any, spill: Spill, remove: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, 2)
        case.next_tick()
        remove(case)
        case.run_passes(streamer, 3)
    assert [r.message.count("was removed while in use") for r in caplog.records] == [1]


def test_a_touched_spill_is_checked_once_and_read_on(
    case: Any, spill: Spill, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[int] = []
    real = integrity.tensor_digest
    monkeypatch.setattr(
        integrity, "tensor_digest", lambda *t: (digested.append(len(t[0])), real(*t))[1]
    )
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, 3)
        assert digested == [], "what open() proved is not proven again"
        case.next_tick()
        os.utime(case.spill)
        case.run_passes(streamer, 3)
    assert sorted(digested) == sorted(layer.nbytes for layer in case.layout.layers)
    assert [r.message.count("was changed while in use") for r in caplog.records] == [1]


@pytest.mark.parametrize("passes", [0, 2], ids=["before-any-pass", "after-two-passes"])
@pytest.mark.parametrize("position", [5, 4000], ids=["in-a-weight", "in-padding"])
def test_an_overwritten_layer_is_never_handed_out(
    case: Any, spill: Spill, passes: int, position: int
) -> None:
    bad = case.layout.layers[1].offset + position
    good = case.spill.read_bytes()[bad : bad + 1]
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, passes)
        case.run_passes(streamer, 1, num_layers=1)
        assert streamer.acquire(1)  # read ahead: still the old bytes
        case.overwrite(bad, bytes([good[0] ^ 1]))
        streamer.release(1)
        streamer.acquire(2)
        streamer.release(2)
        for _ in range(2):
            case.run_passes(streamer, 1, num_layers=1)
            with pytest.raises(SpillDamagedError, match=r"layer 1 of .*digest.*load the model"):
                streamer.acquire(1)
        case.overwrite(bad, good)
        case.run_passes(streamer, 2)


def test_a_change_under_a_read_is_noticed_by_the_next(case: Any, spill: Spill) -> None:
    """The write comes after the read's bytes and before its check, so both its stamps differ."""
    bad = case.layout.layers[1].offset + 100  # where no block sum looks
    real = spill.check
    done: list[int] = []

    def check(layer: int, content: torch.Tensor, before: tuple[int, int]) -> None:
        if layer == 1 and not done:
            done.append(layer)
            case.overwrite(bad, bytes(16))
        real(layer, content, before)

    spill.check = check  # type: ignore[method-assign]
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, 1)
        case.run_passes(streamer, 1, num_layers=1)
        with pytest.raises(SpillDamagedError, match=r"layer 1 of .* digest"):
            streamer.acquire(1)


def test_a_truncated_spill_recovers_when_it_is_whole_again(case: Any, spill: Spill) -> None:
    content = case.spill.read_bytes()
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, 1)
        case.run_passes(streamer, 1, num_layers=1)
        case.next_tick()
        os.truncate(case.spill, 0)
        streamer.acquire(1)  # read ahead before
        streamer.release(1)
        with pytest.raises(SpillDamagedError, match="the file ends at byte 0"):
            streamer.acquire(2)
        case.overwrite(0, content)
        case.run_passes(streamer, 2)


def test_a_disk_that_answers_with_other_blocks(
    case: Any, spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing went through the file system, so only the block sums can tell."""
    place = case.layout.layers[2]
    real = os.preadv
    lost: list[int] = []

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        for block in lost:
            at = place.offset + block * BLOCK_BYTES - offset
            if 0 <= at < count:
                memoryview(buffers[0])[at : at + BLOCK_BYTES] = bytes(BLOCK_BYTES)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with LayerStreamer(DiskStore(spill), case.layout, 1) as streamer:
        case.run_passes(streamer, 2)
        lost.append(3)
        case.run_passes(streamer, 1, num_layers=2)
        with pytest.raises(SpillDamagedError, match=r"layer 2 of .*other bytes than before"):
            streamer.acquire(2)
        lost.clear()
        case.run_passes(streamer, 1)


def test_a_spill_opened_unverified_is_proven_at_first_use(case: Any) -> None:
    case.write(case.weights(0))
    case.overwrite(case.layout.layers[0].offset + 100, b"\xff\x01")
    spill = case.open(verify=False)
    with (
        LayerStreamer(DiskStore(spill), case.layout, 1) as streamer,
        pytest.raises(SpillDamagedError, match="layer 0"),
    ):
        streamer.acquire(0)


@given(st.integers(0, 15), st.integers(0, 2**32), st.binary(min_size=8, max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_block_sum_changes_with_each_blocks_first_word(
    block: int, seed: int, word: bytes
) -> None:
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (16 * BLOCK_BYTES,), dtype=torch.uint8, generator=generator)
    changed = content.clone()
    place = changed[block * BLOCK_BYTES :][:8]
    place.copy_(torch.tensor(list(word), dtype=torch.uint8))
    assert (block_sum(changed) == block_sum(content)) == torch.equal(changed, content)
