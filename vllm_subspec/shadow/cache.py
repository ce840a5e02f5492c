"""Shadows on disk: one file a decoder layer, found by what went into it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_subspec.errors import ShadowCacheError
from vllm_subspec.files import atomic_replace, open_private, private_directory, tensor_digest
from vllm_subspec.shadow.formats import ShadowSettings, shadow_format
from vllm_subspec.shadow.linear import ShadowLinear

_FORMAT = 1


def weight_digest(weight: torch.Tensor) -> str:
    """Digest of a CPU tensor's dtype, shape and bytes."""
    return _digest([str(weight.dtype), list(weight.shape), tensor_digest(weight)])


def shadow_key(
    weights: Mapping[str, torch.Tensor | str],
    settings: ShadowSettings,
    dtype: torch.dtype,
    *,
    compensated: bool = False,
) -> str:
    """Name of the cache file for one layer: a digest of all that decides its content.

    Args:
        weights: linear name -> weight [out, in], or that weight's ``weight_digest``.
        settings: how the shadows are made.
        dtype: the activations' dtype.
        compensated: made by ``quantize_compensated``. On which text is left out: there is one
            calibration of a model, and the last one stays.

    Raises:
        DependencyError: the quantizer's package is missing, so its version is unknown.
    """
    digests = {
        name: weight if isinstance(weight, str) else weight_digest(weight)
        for name, weight in weights.items()
    }
    return _digest([_recipe(settings, dtype), digests, *(["compensated"] if compensated else [])])


class ShadowCache:
    """Cached shadows in one private directory, as safetensors files; nothing is ever unpickled.

    Safe for several processes at once: files are replaced whole.

    Args:
        directory: created where missing.

    Raises:
        ShadowCacheError: the directory cannot be made, or is not this user's.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self.directory = private_directory(directory)
        except OSError as error:
            raise ShadowCacheError(
                f"cannot keep shadows in {directory} ({error}); set SUBSPEC_CACHE to a "
                "directory of your own"
            ) from error

    def load(
        self, key: str, settings: ShadowSettings, dtype: torch.dtype
    ) -> dict[str, ShadowLinear] | None:
        """The layer's shadows by linear name, or None where no file has this key.

        Raises:
            ShadowCacheError: the file is damaged, or was made otherwise than settings and dtype
                say. Digests are checked over what is returned, names, shapes and dtypes included.
        """
        path = self._path(key)
        try:
            metadata, tensors = _read(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            raise ShadowCacheError(f"shadow cache file {path} cannot be read: {error}") from error
        if metadata != _metadata(key, settings, dtype, tensors):
            raise ShadowCacheError(
                f"shadow cache file {path} is damaged or was made for other weights or settings; "
                "delete it"
            )
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            linear, _, part = name.rpartition(".")
            parts.setdefault(linear, {})[part] = tensor
        return {name: ShadowLinear.from_tensors(part, settings) for name, part in parts.items()}

    def store(self, key: str, linears: Mapping[str, ShadowLinear]) -> None:
        """Write the layer's shadows, all made alike, in place of any before.

        Raises:
            OSError: no space, or no permission; what was there stays.
        """
        ((settings, dtype),) = {(made.settings, made.scales.dtype) for made in linears.values()}
        tensors = {
            f"{name}.{part}": tensor
            for name, linear in linears.items()
            for part, tensor in linear.tensors().items()
        }
        data = save(tensors, _metadata(key, settings, dtype, tensors))
        with atomic_replace(self._path(key)) as temporary:
            temporary.write_bytes(data)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, torch.Tensor]]:
    """What a file says of itself, and its tensors, all of them within the file."""
    handle = open_private(path)
    try:
        # By the descriptor: the file that was looked at, whatever the name leads to by now.
        with safe_open(f"/proc/self/fd/{handle}", framework="pt") as file:
            # Copies: the file's own mapping would follow later writes to it, and is unaligned.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    finally:
        os.close(handle)


def _metadata(
    key: str, settings: ShadowSettings, dtype: torch.dtype, tensors: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    return {
        "format": str(_FORMAT),
        "key": key,
        "recipe": _recipe(settings, dtype),
        "digest": _digest({name: weight_digest(tensor) for name, tensor in tensors.items()}),
    }


def _recipe(settings: ShadowSettings, dtype: torch.dtype) -> str:
    fmt = shadow_format(settings.bits)
    return f"{_FORMAT} {fmt.recipe(settings)} {fmt.scales_dtype(dtype)}"


def _digest(value: object) -> str:
    return str(blake3(json.dumps(value, sort_keys=True).encode()).hexdigest())
