"""The slow tier while a model loads: layers go in one by one, a store comes out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from vllm.config import VllmConfig

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.integration.placing import ranks_of, spill_directory
from vllm_subspec.stream import (
    CopyDevice,
    DiskStore,
    HostStore,
    Spill,
    SpillLayout,
    SpillWriter,
    WeightStore,
)


class SlowTier(ABC):
    """Takes each layer once, in any order.

    Attributes:
        name: for the log.
    """

    name: str

    @abstractmethod
    def put(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a layer's weights, exactly the layout's, on any device.

        Raises:
            SpillError: they are not, or the disk fails.
        """

    @abstractmethod
    def put_mapped(self, name: str, tensor: torch.Tensor) -> None:
        """Take a table that is only looked up. Errors are those of ``put``."""

    @abstractmethod
    def finish(self) -> WeightStore:
        """Everything was put: what the streamer reads from; the tier is its from now on."""

    @abstractmethod
    def mapped(self, name: str) -> torch.Tensor:
        """A table that was put, after ``finish``."""

    @abstractmethod
    def close(self) -> None:
        """Loading failed: leave nothing half-written. Idempotent, and nothing after ``finish``."""


class DiskTier(SlowTier):
    """A spill, shared by processes that serve the same weights.

    Raises:
        SpillError: it cannot be created.
    """

    name = "disk"

    def __init__(self, config: SubSpecConfig, vllm_config: VllmConfig, layout: SpillLayout) -> None:
        self._emulate_link = config.emulate_link
        self._spill: Spill | None = None
        model, ranks = vllm_config.model_config, ranks_of(vllm_config)
        identity = f"{model.model}@{model.revision or ''}, {model.dtype}"
        if ranks > 1:
            identity += f", rank {vllm_config.parallel_config.rank} of {ranks}"
        slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(model.model).name).strip("-")
        name = f"{slug}-{blake3(identity.encode()).hexdigest()[:12]}"
        self._writer = SpillWriter(spill_directory(config), name, layout, identity)

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._writer.put(layer, tensors)

    def put_mapped(self, name: str, tensor: torch.Tensor) -> None:
        self._writer.put_mapped(name, tensor)

    def finish(self) -> WeightStore:
        self._spill = self._writer.finish()
        return DiskStore(self._spill, emulate_bytes_per_s=self._emulate_link)

    def mapped(self, name: str) -> torch.Tensor:
        assert self._spill is not None
        return self._spill.map(name)

    def close(self) -> None:
        self._writer.close()


class HostTier(SlowTier):
    """Host RAM of a machine with a GPU.

    Args:
        config: tells of an emulated link.
        layout: of the layers; no tables.
        copies: the GPU's copy stream.

    Raises:
        BudgetError: host RAM does not hold the layers.
    """

    name = "host RAM"

    def __init__(self, config: SubSpecConfig, layout: SpillLayout, copies: CopyDevice) -> None:
        self._store = HostStore(layout, copies, emulate_bytes_per_s=config.emulate_link)
        self._is_loading = True

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._store.put(layer, tensors)

    def put_mapped(self, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError  # no layout of this tier has any

    def finish(self) -> WeightStore:
        self._is_loading = False
        return self._store

    def mapped(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        if self._is_loading:
            self._store.close()
