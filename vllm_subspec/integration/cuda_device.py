"""A GPU: its memory is the fast tier, pinned host RAM the slow one. Unmeasured: see the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.offloader.base import should_pin_memory
from vllm.utils.torch_utils import current_stream

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.draft.graphs import CudaGraphs, GraphDevice
from vllm_subspec.draft.scratch import DraftScratch
from vllm_subspec.draft.static_scratch import StaticScratch
from vllm_subspec.integration import cuda_attention
from vllm_subspec.integration.attention import TreeRows
from vllm_subspec.integration.compat import CUDA_SEAMS, check_seams
from vllm_subspec.integration.device import Device
from vllm_subspec.integration.linear import View
from vllm_subspec.integration.tier import HostTier, SlowTier
from vllm_subspec.stream import CudaDevice as CudaCopies
from vllm_subspec.stream import SpillLayout

logger = init_logger("vllm.subspec")


class CudaDevice(Device):
    """One GPU, computing on the stream that vLLM gives the thread of this call.

    Raises:
        VersionError: vLLM's GPU seams differ from what we override.
    """

    maps_tables = False
    captures_drafts = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        check_seams(CUDA_SEAMS)
        logger.warning(
            "SubSpec's CUDA path has NEVER RUN ON A GPU (you set unmeasured_cuda): neither its "
            "speed nor its output is proven there. Compare its answers with plain vLLM's before "
            "you use any"
        )
        self._stream = current_stream()

    def override_attention(self, active: bool) -> None:
        cuda_attention.override_cuda_attention(active)

    def with_trees(self, metadata: Mapping[str, Any], trees: Sequence[TreeRows]) -> dict[str, Any]:
        return cuda_attention.with_trees(metadata, trees)

    def memory_bytes(self, ranks: int) -> int:
        """Each rank has a GPU of its own."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def open_tier(
        self, config: SubSpecConfig, vllm_config: VllmConfig, layout: SpillLayout
    ) -> SlowTier:
        copies = CudaCopies(self.torch_device, self._stream, pin=should_pin_memory())
        return HostTier(config, layout, copies)

    def scratch(self, dtype: torch.dtype) -> DraftScratch:
        return StaticScratch(dtype, self.torch_device)

    def graphs(self) -> GraphDevice:
        return CudaGraphs(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def fuse_drafts(self, model: nn.Module, view: View) -> None:
        """Nothing: vLLM's own layers are fused on a GPU, and a graph is one launch."""
