"""A model's sizes come from headers alone, and a damaged folder is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import ModelShape, Unit

CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "dtype": "bfloat16",
}


def tensors(head: bool) -> dict[str, torch.Tensor]:
    result = {
        "model.embed_tokens.weight": torch.zeros(12, 8),  # padded vocabulary
        "model.norm.weight": torch.zeros(8),
        "model.positions.weight": torch.zeros(4, 8),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        result[prefix + "q_proj.weight"] = torch.zeros(8, 8)
        result[prefix + "up_proj.weight"] = torch.zeros(16 + layer, 8)
        result[prefix + "norm.weight"] = torch.zeros(8)
    if head:
        result["lm_head.weight"] = torch.zeros(12, 8)
    return {name: tensor.bfloat16() for name, tensor in result.items()}


def write(
    folder: Path, head: bool = True, shards: int = 1, index: bool = False, **config: Any
) -> Path:
    merged = {name: value for name, value in (CONFIG | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    named = tensors(head)
    where = {}
    for shard in range(shards):
        part = dict(list(named.items())[shard::shards])
        file = f"model-{shard}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        save_file({"copy": torch.zeros(1)}, folder / "not-in-the-index.safetensors")
    return folder


EXPECTED = ModelShape(
    layers=(Unit("layer 0", 384, 192), Unit("layer 1", 400, 200)),
    head=Unit("head", 192, 96),
    embedding_bytes=192,
    tied=False,
    other_bytes=2 * (8 * 3 + 4 * 8),
    kv_bytes_per_token=2 * 2 * 2 * 2 * 2,
    hidden_size=8,
)


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, False), (3, True)])
def test_an_untied_model(tmp_path: Path, shards: int, index: bool) -> None:
    shape = ModelShape.read(write(tmp_path, shards=shards, index=index))
    assert shape == EXPECTED
    assert shape.vocab_size == 12
    assert shape.total_bytes == sum(2 * t.numel() for t in tensors(True).values())


@pytest.mark.parametrize(("head", "tie"), [(False, True), (False, None), (True, True)])
def test_a_tied_model_has_a_head_of_the_embeddings_shape(
    tmp_path: Path, head: bool, tie: bool | None
) -> None:
    shape = ModelShape.read(write(tmp_path, head=head, tie_word_embeddings=tie))
    assert shape.tied
    assert shape.head == EXPECTED.head
    assert shape.total_bytes == EXPECTED.total_bytes - 192


def test_sizes_are_those_of_the_served_dtype(tmp_path: Path) -> None:
    folder = write(tmp_path, dtype=None, torch_dtype="float32")
    assert ModelShape.read(folder).layers[0] == Unit("layer 0", 768, 192)
    assert ModelShape.read(folder).kv_bytes_per_token == 64
    assert ModelShape.read(folder, itemsize=2) == EXPECTED


def test_kv_heads_and_head_size_may_be_explicit(tmp_path: Path) -> None:
    shape = ModelShape.read(write(tmp_path, num_key_value_heads=None, head_dim=5))
    assert shape.kv_bytes_per_token == 2 * 4 * 5 * 2 * 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_size": None}, "hidden_size .* None"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1"),
        ({"num_attention_heads": 0}, "num_attention_heads .* 0"),
        ({"vocab_size": 13}, "no embedding"),
        ({"hidden_size": 16}, "no embedding"),
        ({"dtype": "int8"}, "dtype .* 'int8'"),
    ],
)
def test_a_configuration_that_does_not_fit_the_files(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        ModelShape.read(write(tmp_path, **config))


def test_a_folder_without_configuration_or_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Hugging Face folder"):
        ModelShape.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match=r"holds no .*safetensors: convert"):
        ModelShape.read(tmp_path)


def test_a_tensor_held_twice(tmp_path: Path) -> None:
    write(tmp_path)
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' a second time"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize("away", ["../model-0.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_that_leads_elsewhere(tmp_path: Path, away: str) -> None:
    folder = write(tmp_path, index=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": away}}))
    with pytest.raises(ConfigError, match=f"{index} names '{away}', which is no file beside it"):
        ModelShape.read(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path, shards=3, index=True)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1.* is no sound safetensors file"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_truncated_file(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path) / "model-0.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ConfigError, match="download it again"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}, "needs 6 bytes"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]}, "lies at 2..6 of 4"),
        ({"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}, "unquantised"),
        ({"dtype": "BF16"}, "shape"),
        ([], "no sound safetensors"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: object, reason: str) -> None:
    write(tmp_path)
    header = json.dumps({"x": entry}).encode()
    blob = struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "model-0.safetensors").write_bytes(blob)
    with pytest.raises(ConfigError, match=reason) as refused:
        ModelShape.read(tmp_path)
    assert ("download it again" in str(refused.value)) == (reason != "unquantised")


def test_a_unit_without_weights() -> None:
    with pytest.raises(ConfigError, match="'layer 3' has 0 weights"):
        Unit("layer 3", 0, 0)
