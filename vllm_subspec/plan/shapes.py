"""The sizes of a model, read from its configuration and file headers without any weight."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.errors import ConfigError

_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CONFIG_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class Unit:
    """What is streamed as one: a decoder layer's linears, or the language model head.

    Attributes:
        name: for people.
        weight_bytes: in full precision, as served.
        num_weights: how many; a shadow's size follows from it.

    Raises:
        ConfigError: a size is below 1.
    """

    name: str
    weight_bytes: int
    num_weights: int

    def __post_init__(self) -> None:
        if min(self.weight_bytes, self.num_weights) < 1:
            raise ConfigError(
                f"unit {self.name!r} has {self.num_weights} weights of {self.weight_bytes} bytes: "
                "leave a layer without linears out of the stream"
            )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Attributes:
        layers: the decoder layers' linears, in order.
        head: the language model head; where it is tied, a matrix of the embedding's size.
        embedding_bytes: the token embedding table.
        tied: head and embedding are one tensor.
        other_bytes: norms, biases and all else; always resident.
        kv_bytes_per_token: KV cache of one token over all layers.
        hidden_size: width of the residual stream.
    """

    layers: tuple[Unit, ...]
    head: Unit | None
    embedding_bytes: int
    tied: bool
    other_bytes: int
    kv_bytes_per_token: int
    hidden_size: int

    @property
    def vocab_size(self) -> int:
        """Rows of the head, 0 where there is none."""
        return 0 if self.head is None else self.head.num_weights // self.hidden_size

    @property
    def total_bytes(self) -> int:
        """The whole model, a tied table counted once."""
        units = [*self.layers, *([self.head] if self.head and not self.tied else [])]
        return sum(u.weight_bytes for u in units) + self.embedding_bytes + self.other_bytes

    @classmethod
    def read(cls, directory: Path | str, itemsize: int | None = None) -> ModelShape:
        """The shape of a Hugging Face folder: config.json and the headers of *.safetensors.

        Two-dimensional tensors of ``layers.<n>`` are layer n's linears. The embedding is the
        largest other matrix of at least vocab_size rows and hidden_size columns.

        Args:
            directory: one file or shards, with or without an index.
            itemsize: bytes per weight as served; None takes the configuration's dtype.

        Raises:
            ConfigError: the folder holds no such model, or a file is damaged.
        """
        folder = Path(directory)
        config = _read_json(folder / "config.json")
        itemsize = _served_itemsize(config, folder) if itemsize is None else itemsize
        shapes = _tensor_shapes(folder)
        hidden = _integer(config, "hidden_size", folder)
        layers, linears = _layers(shapes, _integer(config, "num_hidden_layers", folder), itemsize)
        rest = {name: shape for name, shape in shapes.items() if name not in linears}
        heads = [name for name in rest if name.split(".")[-2:] == ["lm_head", "weight"]]
        embedding = _embedding(rest, heads, _integer(config, "vocab_size", folder), hidden, folder)
        tied = not heads or config.get("tie_word_embeddings") is True
        matrix = rest[embedding if tied else heads[0]]
        if len(matrix) != 2 or matrix[1] != hidden:
            raise ConfigError(
                f"lm_head.weight of {folder} has shape {list(matrix)}, not [vocabulary, {hidden}]: "
                "give a decoder-only text model"
            )
        other = sum(math.prod(s) for n, s in rest.items() if n not in (embedding, *heads))
        return cls(
            layers=layers,
            head=Unit("head", math.prod(matrix) * itemsize, math.prod(matrix)),
            embedding_bytes=math.prod(rest[embedding]) * itemsize,
            tied=tied,
            other_bytes=other * itemsize,
            kv_bytes_per_token=_kv_values_per_token(config, folder) * itemsize,
            hidden_size=hidden,
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): give a Hugging Face folder with config.json and "
            "*.safetensors"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object: give a Hugging Face folder")
    return value


def _integer(config: Mapping[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{name} in the config.json of {folder} is {value!r}: a decoder-only text model has a "
            "whole number of at least 1 there"
        )
    return value


def _served_itemsize(config: Mapping[str, Any], folder: Path) -> int:
    name = config.get("dtype", config.get("torch_dtype"))
    if name not in _CONFIG_ITEMSIZE:
        raise ConfigError(
            f"dtype in the config.json of {folder} is {name!r}: use a model in one of "
            f"{', '.join(_CONFIG_ITEMSIZE)}"
        )
    return _CONFIG_ITEMSIZE[name]


def _kv_values_per_token(config: Mapping[str, Any], folder: Path) -> int:
    heads = _integer(config, "num_attention_heads", folder)
    kv_heads = heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _integer(config, "num_key_value_heads", folder)
    if config.get("head_dim") is not None:
        head_dim = _integer(config, "head_dim", folder)
    else:
        head_dim = _integer(config, "hidden_size", folder) // heads
    return 2 * kv_heads * head_dim * _integer(config, "num_hidden_layers", folder)


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape; the index decides which files count, where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ConfigError(f"{index} has no weight_map: download the model again")
        files = sorted(set(map(str, names.values())))
        if away := [name for name in files if Path(name).name != name]:
            raise ConfigError(f"{index} names {away[0]!r}, which is no file beside it: remove it")
        paths = [folder / name for name in files]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no *.safetensors: convert the model to safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        for name, shape in _file_shapes(path).items():
            if name in shapes:
                raise ConfigError(f"{path} holds {name!r} a second time: remove one of the copies")
            shapes[name] = shape
    return shapes


def _file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes in one file's header, each checked against its bytes and the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _checked(name, entry, size - 8 - length) for name, entry in header.items()}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(
            f"{path} is no sound safetensors file ({error}): download it again"
        ) from error


def _checked(name: str, entry: Mapping[str, Any], data_bytes: int) -> tuple[int, ...]:
    shape = tuple(entry["shape"])
    if entry["dtype"] not in _ITEMSIZE:
        raise ConfigError(
            f"tensor {name!r} has dtype {entry['dtype']}: shadows are made from unquantised "
            f"weights, so use a model in {', '.join(_ITEMSIZE)}"
        )
    start, end = entry["data_offsets"]
    expected = math.prod(shape) * _ITEMSIZE[entry["dtype"]]
    if not 0 <= start <= end <= data_bytes or end - start != expected:
        raise ValueError(
            f"{name} of shape {list(shape)} needs {expected} bytes, but lies at {start}..{end} of "
            f"{data_bytes}"
        )
    return shape


def _layers(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, itemsize: int
) -> tuple[tuple[Unit, ...], set[str]]:
    """The layers' units, and the names of the linears in them."""
    weights: defaultdict[int, int] = defaultdict(int)
    linears = set()
    for name, shape in shapes.items():
        if (match := _LAYER.search(name)) and len(shape) == 2:
            weights[int(match[1])] += math.prod(shape)
            linears.add(name)
    if sorted(weights) != list(range(num_layers)):
        raise ConfigError(
            f"num_hidden_layers is {num_layers}, but the files hold linears for layers "
            f"{sorted(weights)}: give a complete decoder-only text model"
        )
    units = (
        Unit(f"layer {index}", weights[index] * itemsize, weights[index])
        for index in range(num_layers)
    )
    return tuple(units), linears


def _embedding(
    rest: Mapping[str, tuple[int, ...]], heads: list[str], vocab: int, hidden: int, folder: Path
) -> str:
    tables = [
        name
        for name, shape in rest.items()
        if name not in heads and len(shape) == 2 and shape[0] >= vocab and shape[1] == hidden
    ]
    if not tables:
        raise ConfigError(
            f"{folder} holds no embedding of [{vocab}, {hidden}]: give a decoder-only text model"
        )
    return max(tables, key=lambda name: rest[name][0])
