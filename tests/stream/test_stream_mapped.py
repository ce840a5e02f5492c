"""A tensor mapped from the spill: the bytes that were put, checked, and no copy in memory."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from vllm_subspec.errors import ConfigError, SpillDamagedError, SpillError
from vllm_subspec.stream import DiskStore, LayerStreamer, Spill, SpillLayout, SpillWriter
from vllm_subspec.stream import TensorSpec as Spec

LAYERS = [[Spec("w", (33, 17), torch.bfloat16)], [Spec("w", (5, 7), torch.float32)]]
EMBEDDING = Spec("embed", (3001, 129), torch.bfloat16)  # 774,258 bytes: not a multiple of a page
SCALE = Spec("scale", (3,), torch.float32)
LAYOUT = SpillLayout.of(LAYERS, [EMBEDDING, SCALE])


def tensors(specs: list[Spec], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(s.dtype) for s in specs}


LAYER_WEIGHTS = [tensors(specs, index) for index, specs in enumerate(LAYERS)]


def write(directory: Path, seed: int = 9) -> tuple[Spill, list[bool]]:
    with SpillWriter(directory, "m", LAYOUT, "a") as writer:
        mapped = tensors([EMBEDDING, SCALE], seed)
        written = [writer.put(0, LAYER_WEIGHTS[0]), writer.put_mapped("embed", mapped["embed"])]
        written += [writer.put_mapped("scale", mapped["scale"]), writer.put(1, LAYER_WEIGHTS[1])]
        return writer.finish(), written


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spills"


@pytest.fixture(params=[1 << 20, 8192], ids=["one-part", "many-parts"])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("blockfile", "writer"):
        monkeypatch.setattr(f"vllm_subspec.stream.{module}.IO_BYTES", request.param)


def change(path: Path, offset: int, data: bytes) -> None:
    time.sleep(0.02)  # a tick of the file system's clock
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.usefixtures("_parts")
def test_what_was_put_is_mapped_and_kept_by_the_next_load(directory: Path) -> None:
    expected = tensors([EMBEDDING, SCALE], 9)
    for first in (True, False):
        spill, written = write(directory)
        assert written == [first] * 4
        with spill:
            for name, tensor in expected.items():
                there = spill.map(name)
                assert there.dtype == tensor.dtype
                assert torch.equal(there, tensor)
                del there
    spill, written = write(directory, seed=10)
    with spill:
        assert written == [False, True, True, False]
    Spill.open(directory, "m", LAYOUT, "a").close()


def test_the_layers_beside_it_stream(directory: Path) -> None:
    spill, _ = write(directory)
    rows = torch.tensor([3000, 0, 77])
    embedding = spill.map("embed")
    with LayerStreamer(DiskStore(spill), LAYOUT, 1) as streamer:
        for layer in [0, 1] * 2:
            assert torch.equal(streamer.acquire(layer)["w"], LAYER_WEIGHTS[layer]["w"])
            streamer.release(layer)
        found = torch.nn.functional.embedding(rows, embedding)
    assert torch.equal(found, tensors([EMBEDDING], 9)["embed"][rows])
    assert LAYOUT.streamed_bytes == 8192
    assert LAYOUT.total_bytes == 8192 + 778240 + 4096
    assert LAYOUT.slot_bytes == 4096


def test_a_tensor_with_strides_is_written_by_value(directory: Path) -> None:
    mapped = tensors([EMBEDDING, SCALE], 9)
    with SpillWriter(directory, "m", LAYOUT, "a") as writer:
        for layer, weights in enumerate(LAYER_WEIGHTS):
            writer.put(layer, weights)
        writer.put_mapped("embed", torch.nn.Parameter(mapped["embed"].T.contiguous().T))
        writer.put_mapped("scale", mapped["scale"].repeat_interleave(2)[::2])
        spill = writer.finish()
    with spill:
        assert torch.equal(spill.map("embed"), mapped["embed"])
        assert torch.equal(spill.map("scale"), mapped["scale"])


def test_it_outlives_spill_and_file_and_holds_the_lock(directory: Path) -> None:
    spill, _ = write(directory)
    embedding = spill.map("embed")[5:]
    spill.close()
    with pytest.raises(SpillError, match="in use"):
        SpillWriter(directory, "m", LAYOUT, "other")
    shutil.rmtree(directory)
    assert torch.equal(embedding, tensors([EMBEDDING], 9)["embed"][5:])


def test_writing_to_it_changes_no_file(directory: Path) -> None:
    spill, _ = write(directory)
    with spill:
        spill.map("embed").zero_()
        assert torch.equal(spill.map("embed"), tensors([EMBEDDING], 9)["embed"])


def test_its_pages_are_no_memory_of_this_process(directory: Path) -> None:
    """They belong to the page cache: none is anonymous, even after all were read."""
    spill, _ = write(directory)
    with spill:
        embedding = spill.map("embed")
        assert embedding.float().sum().isfinite()
        start = embedding.data_ptr() & ~4095
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        for line in lines:
            first, _, last = line.partition(" ")[0].partition("-")
            if last and int(first, 16) <= start < int(last, 16):
                break
        fields = {}
        for line in lines:
            name, _, value = line.partition(":")
            fields[name] = value
            if name == "Anonymous":
                break
        assert fields["Anonymous"].split() == ["0", "kB"]
        assert int(fields["Rss"].split()[0]) >= 700


@pytest.mark.parametrize("use", ["map", "verify", "open"])
def test_damage_is_found_before_use(directory: Path, use: str) -> None:
    spill, _ = write(directory)
    with spill:
        change(spill.path, LAYOUT.mapped[0].offset + 1000, b"\x01\x02\x03")
        uses = {
            "map": lambda: spill.map("embed"),
            "verify": spill.verify,
            "open": lambda: Spill.open(directory, "m", LAYOUT, "a"),
        }
        with pytest.raises(SpillDamagedError, match=r"mapped tensor 2 of .* digest"):
            uses[use]()


@pytest.mark.parametrize("truncate", [False, True])
def test_damage_in_use_ends_the_next_read_of_a_layer(directory: Path, truncate: bool) -> None:
    spill, _ = write(directory)
    place = LAYOUT.mapped[0]
    embedding = spill.map("embed")
    with LayerStreamer(DiskStore(spill), LAYOUT, 1) as streamer:
        for layer in (0, 1):
            streamer.acquire(layer)
            if layer == 1:
                content = spill.path.read_bytes()[place.offset :]
                if truncate:
                    time.sleep(0.02)
                    os.truncate(spill.path, place.offset)
                else:
                    change(spill.path, place.offset, b"\x01\x02\x03")
            streamer.release(layer)
        for _ in range(2):
            with pytest.raises(SpillDamagedError, match="mapped tensor 2"):
                streamer.acquire(0)
        change(spill.path, place.offset, content)
        assert torch.equal(streamer.acquire(0)["w"], LAYER_WEIGHTS[0]["w"])
        assert torch.equal(embedding, tensors([EMBEDDING], 9)["embed"])
        del embedding  # the errors' tracebacks hold this frame


def test_what_is_not_in_the_layout_is_refused(directory: Path) -> None:
    with SpillWriter(directory, "m", LAYOUT, "a") as writer:
        with pytest.raises(SpillError, match=r"no mapped tensor is named 'w'.*'embed', 'scale'"):
            writer.put_mapped("w", torch.zeros(1))
        with pytest.raises(SpillError, match=r"mapped tensor 'scale': weights \['scale'\]"):
            writer.put_mapped("scale", torch.zeros(4))
        with pytest.raises(SpillError, match="layer 2 is not among the 2 streamed"):
            writer.put(2, {})
        writer.put(0, LAYER_WEIGHTS[0])
        writer.put(1, LAYER_WEIGHTS[1])
        with pytest.raises(SpillError, match=r"layers \[2, 3\] were never put"):
            writer.finish()
    with pytest.raises(ConfigError, match="named twice"):
        SpillLayout.of(LAYERS, [SCALE, SCALE])
    with pytest.raises(ConfigError, match="mapped tensor 'nothing' has no bytes"):
        SpillLayout.of(LAYERS, [Spec("nothing", (0, 3), torch.float32)])


def test_without_mapped_tensors_the_manifest_is_as_it_was(directory: Path) -> None:
    with SpillWriter(directory, "m", SpillLayout.of(LAYERS), "a") as writer:
        for layer, weights in enumerate(LAYER_WEIGHTS):
            writer.put(layer, weights)
        writer.finish().close()
    manifest = json.loads((directory / "m.json").read_text())
    assert manifest["format"] == 1
    assert manifest["layout"] == [
        [["w", [33, 17], "bfloat16", 0]],
        [["w", [5, 7], "float32", 0]],
    ]
