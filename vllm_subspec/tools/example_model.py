"""A real model without a hub: SmolLM2-135M-Instruct as a Hugging Face folder, at any width."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from subspec_kernels.temporary import temporary_directory
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig

from vllm_subspec.errors import ConfigError
from vllm_subspec.tools.gguf_source import GgufModel, open_gguf, packaged_gguf
from vllm_subspec.tools.widen import (
    widen_embedding,
    widen_final_norm,
    widen_linear,
    widen_norm,
)

MAX_WIDEN = 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What a folder was written from, and the size of each file: only a whole one is taken as there.
_MANIFEST = "example_model.json"
# Raise when the same settings begin to yield other weights.
_RECIPE = 1


@dataclass(frozen=True)
class ExampleModel:
    """Which variant of SmolLM2-135M-Instruct to write.

    Attributes:
        widen: width factor R, 1 to 4; the linears' bytes grow with R^2 (see `widen`).
        dtype: of the weights: float32, bfloat16 or float16.
        num_layers: keep the first so many of the 30 layers; None keeps all. A truncated model
            is a cheap real one for tests; its text makes no sense.

    Raises:
        ConfigError: ``widen`` or ``dtype`` is not one of these.
    """

    widen: int = 1
    dtype: str = "bfloat16"
    num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.widen not in range(1, MAX_WIDEN + 1):
            raise ConfigError(f"widen is {self.widen}: set it to a whole number 1..{MAX_WIDEN}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}, which is unknown: {', '.join(DTYPES)}")

    def __str__(self) -> str:
        layers = "all" if self.num_layers is None else f"the first {self.num_layers}"
        return f"SmolLM2-135M-Instruct, width x{self.widen}, {self.dtype}, {layers} layers"


def write_example_model(directory: Path, model: ExampleModel) -> bool:
    """Write ``model`` to ``directory``; the folder appears whole or not at all.

    One shard per decoder layer is converted and written at a time, so that memory stays near
    the largest single tensor, the embedding. Measured peak resident memory: 0.98 GB for the
    original in float32 (0.5 GB of weights), 1.09 GB for x4 in bfloat16 (3.5 GB of weights); 0.64 GB
    of it are imports and the index of the GGUF file.

    Returns:
        True when it was written, False when the same model was already there.

    Raises:
        ConfigError: ``directory`` holds anything else or cannot be written (a full disk included);
            ``num_layers`` exceeds the model.
        DependencyError: the package that ships the weights is missing.
    """
    directory = directory.absolute()
    identity = {**asdict(model), "recipe": _RECIPE}
    try:
        if _is_already_there(directory, identity):
            return False
        source = open_gguf(packaged_gguf())
        config = _config(source.config(), model)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(directory.parent) as temporary:
            staging = temporary / directory.name
            staging.mkdir()
            _write_weights(staging, source, config, model)
            _write_settings(staging, source, config)
            _write_manifest(staging, identity)
            staging.rename(directory)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{directory} cannot be written ({error}): choose a folder that you may write to, "
            "with enough free space; nothing was left behind"
        ) from error
    return True


def _is_already_there(directory: Path, identity: dict[str, object]) -> bool:
    """True: the same model, whole. False: a free place. Anything else is an error."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigError(f"{directory} is a file: choose a new folder")
    manifest = directory / _MANIFEST
    if not manifest.is_file():
        if any(directory.iterdir()):
            raise ConfigError(
                f"{directory} is not empty and is no example model: choose a new folder"
            )
        return False
    try:
        found = json.loads(manifest.read_text())
        sizes = found.pop("files")
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{manifest} is damaged: remove {directory} and run again") from error
    if found != identity:
        raise ConfigError(
            f"{directory} holds another example model ({found}): choose a new folder, or remove "
            "this one"
        )
    damaged = sorted(
        name
        for name, size in sizes.items()
        if not (directory / name).is_file() or (directory / name).stat().st_size != size
    )
    if damaged:
        raise ConfigError(
            f"{directory} is damaged (missing or of another size: {', '.join(damaged)}): remove "
            "it and run again"
        )
    return True


def _config(original: LlamaConfig, model: ExampleModel) -> LlamaConfig:
    num_layers = model.num_layers
    if num_layers is not None and num_layers not in range(1, original.num_hidden_layers + 1):
        raise ConfigError(
            f"layers is {num_layers}: set it to a whole number 1..{original.num_hidden_layers}"
        )
    wide = original.to_dict()
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ):
        wide[key] *= model.widen
    wide["num_hidden_layers"] = num_layers or original.num_hidden_layers
    wide |= {"architectures": ["LlamaForCausalLM"], "dtype": model.dtype}
    return LlamaConfig.from_dict(wide)


def _shards(
    source: GgufModel, config: LlamaConfig, model: ExampleModel
) -> Iterator[dict[str, torch.Tensor]]:
    factor, dtype = model.widen, DTYPES[model.dtype]
    yield {
        "model.embed_tokens.weight": widen_embedding(source.embedding(), factor, dtype),
        "model.norm.weight": widen_final_norm(source.final_norm(), factor, dtype),
    }
    for layer in range(config.num_hidden_layers):
        shard = {}
        for name, gguf_name in source.layer_names(layer).items():
            weight = source.layer_weight(gguf_name)
            if weight.dim() == 1:
                shard[name] = widen_norm(weight, factor, dtype)
            else:
                shard[name] = widen_linear(weight, factor, dtype, name)
        yield shard


def _write_weights(
    folder: Path, source: GgufModel, config: LlamaConfig, model: ExampleModel
) -> None:
    num_shards = config.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total_size = 0
    shards = _shards(source, config, model)
    for number, shard in enumerate(
        tqdm(shards, total=num_shards, desc="writing weights", unit="shard", disable=None), 1
    ):
        file = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total_size += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_settings(folder: Path, source: GgufModel, config: LlamaConfig) -> None:
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    source.tokenizer().save_pretrained(folder)


def _write_manifest(folder: Path, identity: dict[str, object]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    text = json.dumps({**identity, "files": sizes}, indent=2)
    (folder / _MANIFEST).write_text(text + "\n")
