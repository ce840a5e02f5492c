"""What differs between a CPU and a GPU, in one place; all else of SubSpec is one path for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.draft.graphs import GraphDevice
from vllm_subspec.draft.scratch import DraftScratch
from vllm_subspec.integration import attention
from vllm_subspec.integration.attention import TreeRows
from vllm_subspec.integration.draft_view import fuse_when_drafting
from vllm_subspec.integration.linear import View
from vllm_subspec.integration.tier import DiskTier, SlowTier
from vllm_subspec.plan import device_memory_bytes
from vllm_subspec.stream import SpillLayout


class Device(ABC):
    """The fast tier and what computes there.

    Args:
        torch_device: of the model's tensors.

    Attributes:
        maps_tables: whether a table that is only looked up may stay on the slow tier, mapped.
        captures_drafts: whether draft steps run by graph.
    """

    maps_tables: bool
    captures_drafts: bool

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @abstractmethod
    def override_attention(self, active: bool) -> None:
        """Let models built from now on in this process use our backends, or vLLM's own again."""

    @abstractmethod
    def with_trees(self, metadata: Mapping[str, Any], trees: Sequence[TreeRows]) -> dict[str, Any]:
        """A batch's attention metadata by layer, marked with its trees (at least one)."""

    @abstractmethod
    def memory_bytes(self, ranks: int) -> int:
        """Fast memory of one of this machine's ranks."""

    @abstractmethod
    def open_tier(
        self, config: SubSpecConfig, vllm_config: VllmConfig, layout: SpillLayout
    ) -> SlowTier:
        """The slow tier, ready to take the layers while they load.

        Raises:
            SpillError: the spill cannot be created.
            BudgetError: host memory does not hold the layers.
        """

    @abstractmethod
    def scratch(self, dtype: torch.dtype) -> DraftScratch:
        """Room for the draft's own keys and values."""

    @abstractmethod
    def graphs(self) -> GraphDevice:
        """What captures draft steps; asked for only where ``captures_drafts``."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all that compute was given is done."""

    @abstractmethod
    def fuse_drafts(self, model: nn.Module, view: View) -> None:
        """Let modules run as fewer launches in draft view, where vLLM's own are many."""


class CpuDevice(Device):
    """RAM is the fast tier, a disk the slow one; a call has computed when it returns."""

    maps_tables = True
    captures_drafts = False

    def override_attention(self, active: bool) -> None:
        attention.override_cpu_attention(active)

    def with_trees(self, metadata: Mapping[str, Any], trees: Sequence[TreeRows]) -> dict[str, Any]:
        return attention.with_trees(metadata, trees)

    def memory_bytes(self, ranks: int) -> int:
        return device_memory_bytes() // ranks

    def open_tier(
        self, config: SubSpecConfig, vllm_config: VllmConfig, layout: SpillLayout
    ) -> SlowTier:
        return DiskTier(config, vllm_config, layout)

    def scratch(self, dtype: torch.dtype) -> DraftScratch:
        return DraftScratch(dtype, self.torch_device)

    def graphs(self) -> GraphDevice:
        raise NotImplementedError

    def finish(self) -> None:
        pass

    def fuse_drafts(self, model: nn.Module, view: View) -> None:
        fuse_when_drafting(model, view)


def device_for(torch_device: torch.device) -> Device:
    """The device of a runner."""
    if torch_device.type == "cpu":
        return CpuDevice(torch_device)
    # Late: a CPU's start has no use for the GPUs' attention backends.
    from vllm_subspec.integration.cuda_device import CudaDevice

    return CudaDevice(torch_device)
