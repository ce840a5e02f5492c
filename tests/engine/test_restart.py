"""What a former start left on the disk: used when it is true, rebuilt when it is not."""

from __future__ import annotations

import logging
import shutil

import pytest

pytestmark = pytest.mark.engine

DRAFT = {"width": 4, "depth": 8, "bits": 8, "stream": "disk"}


@pytest.fixture(scope="module")
def requests(prompts):
    return [(prompt, {"max_tokens": 20}) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, requests):
    with open_engine(lively_model_dir) as plain:
        return plain.batch(requests)


@pytest.fixture(scope="module")
def stream_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("spill")


@pytest.fixture
def start(open_engine, lively_model_dir, requests, stream_dir):
    """Start an engine on the module's spill, and return its answers."""

    def start(model=lively_model_dir, directory=stream_dir):
        with open_engine(model, DRAFT | {"stream_dir": str(directory)}) as engine:
            return engine.batch(requests)

    return start


@pytest.fixture
def spill(start, stream_dir):
    """The finished spill of a former start."""
    if not list(stream_dir.glob("*.spill")):
        start()
    (spill,) = stream_dir.glob("*.spill")
    return spill


def identity(path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_second_start_reuses_spill_and_shadows(start, spill, expected, subspec_cache):
    shadows = sorted((subspec_cache / "shadows").glob("*.safetensors"))
    files = [spill, spill.with_suffix(".json"), *shadows]
    before = [identity(path) for path in files]
    assert len(shadows) >= 4
    assert start() == expected
    assert [identity(path) for path in files] == before
    assert sorted((subspec_cache / "shadows").glob("*.safetensors")) == shadows


@pytest.mark.parametrize("damage", ["truncated", "flipped-byte"])
def test_damaged_spill_is_rebuilt(start, spill, expected, damage, caplog):
    content = spill.read_bytes()
    if damage == "truncated":
        with spill.open("r+b") as file:
            file.truncate(len(content) * 5 // 8)
    else:
        with spill.open("r+b") as file:
            file.seek(len(content) // 2)
            file.write(bytes([content[len(content) // 2] ^ 1]))
    assert start() == expected
    assert spill.read_bytes() == content
    (report,) = [r for r in caplog.records if "layers reused" in r.message]
    assert report.levelno == logging.WARNING


def test_damaged_shadow_is_made_anew(
    start, spill, expected, subspec_cache, tmp_path, monkeypatch, caplog
):
    shutil.copytree(subspec_cache / "shadows", tmp_path / "shadows")
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path))
    damaged = {}
    for path in (tmp_path / "shadows").glob("*.safetensors"):
        content = path.read_bytes()
        damaged[path] = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
        path.write_bytes(damaged[path])
    assert start() == expected
    made_anew = sum("made anew" in record.message for record in caplog.records)
    assert made_anew == 5  # four layers and the head
    assert sum(path.read_bytes() != content for path, content in damaged.items()) == 5


def test_checkpoint_that_changed_under_its_path(
    open_engine, lively_model_dir, start, expected, requests, tmp_path
):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(lively_model_dir, model)
    assert start(model, tmp_path / "spill") == expected
    for shard in sorted(model.glob("*.safetensors")):
        weights = load_file(shard)
        for name, weight in weights.items():
            if name.endswith("down_proj.weight"):
                weight *= 1.3
        save_file(weights, shard, metadata={"format": "pt"})
    with open_engine(model) as plain:
        changed = plain.batch(requests)
    assert changed != expected
    assert start(model, tmp_path / "spill") == changed
