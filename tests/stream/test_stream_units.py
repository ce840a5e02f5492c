"""Units that are no decoder layers: a head larger than any layer, whole or in row pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ConfigError
from vllm_subspec.stream import DiskStore, LayerStreamer, SpillLayout, SpillWriter, split_rows
from vllm_subspec.stream import TensorSpec as Spec


@given(
    rows=st.integers(1, 3000),
    columns=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
    max_bytes=st.integers(1, 200_000),
)
@settings(max_examples=150, deadline=None)
def test_pieces_cover_every_row_once_within_the_limit(
    rows: int, columns: int, dtype: torch.dtype, max_bytes: int
) -> None:
    spec = Spec("head", (rows, columns), dtype)
    allowed = max_bytes // 4096 * 4096
    if allowed < columns * dtype.itemsize:
        with pytest.raises(ConfigError, match=rf"max_bytes={max_bytes}: one row of head"):
            split_rows(spec, max_bytes)
        return
    pieces = split_rows(spec, max_bytes)
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    assert all(piece.spec.shape == (piece.stop - piece.start, columns) for piece in pieces)
    assert len({piece.spec.name for piece in pieces}) == len(pieces)
    layout = SpillLayout.of([[piece.spec] for piece in pieces])
    assert layout.slot_bytes <= max_bytes
    fewest = -(-rows // (allowed // (columns * dtype.itemsize)))
    assert len(pieces) <= fewest
    sizes = [piece.stop - piece.start for piece in pieces]
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) == 0
    assert sizes[-1] <= sizes[0]


def test_pieces_are_multiples_of_a_kernels_block() -> None:
    pieces = split_rows(Spec("head", (49152, 576), torch.bfloat16), 7_000_000)
    assert {piece.stop - piece.start for piece in pieces[:-1]} == {5504}
    assert pieces[0].spec.name == "head[0:5504]"
    assert pieces[-1].stop == 49152
    assert len(pieces) == 9


def test_a_weight_without_rows_is_refused() -> None:
    for shape in [(), (0, 5), (5, 0)]:
        with pytest.raises(ConfigError, match="no rows to split"):
            split_rows(Spec("head", shape, torch.float32), 4096)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "pieces"])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_head_streams_behind_the_layers(tmp_path: Path, in_pieces: bool, num_slots: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(40, 64, generator=generator) for _ in range(3)]
    head = torch.randn(700, 64, generator=generator)
    state = torch.randn(2, 64, generator=generator)
    layer_units = [[Spec("w", (40, 64), torch.float32)]] * 3
    spec = Spec("head", (700, 64), torch.float32)
    pieces = split_rows(
        spec, SpillLayout.of(layer_units).slot_bytes if in_pieces else spec.nbytes * 2
    )
    layout = SpillLayout.of([*layer_units, *([piece.spec] for piece in pieces)])
    assert layout.slot_bytes == (12288 if in_pieces else 180224)
    assert len(pieces) == (15 if in_pieces else 1)
    with SpillWriter(tmp_path / "spills", "m", layout, "a") as writer:
        for unit, weight in enumerate(layers):
            writer.put(unit, {"w": weight})
        for unit, piece in enumerate(pieces, start=3):
            writer.put(unit, {piece.spec.name: head[piece.start : piece.stop]})
        spill = writer.finish()
    with LayerStreamer(DiskStore(spill), layout, num_slots) as streamer:
        for _ in range(3):
            for unit, weight in enumerate(layers):
                assert torch.equal(streamer.acquire(unit)["w"], weight)
                streamer.release(unit)
            logits = []
            for unit, piece in enumerate(pieces, start=3):
                rows = streamer.acquire(unit)[piece.spec.name]
                assert torch.equal(rows, head[piece.start : piece.stop])
                logits.append(state @ rows.T)
                streamer.release(unit)
            assert torch.allclose(torch.cat(logits, -1), state @ head.T, atol=1e-5)
