"""Layers rest on disk or in host RAM and flow through a ring of slots around the layer cycle.

1. ``SpillWriter`` takes each layer as the model loads and leaves a ``Spill`` (one file), which
   checks what is read from it and maps what is only looked up (an embedding table).
2. ``DiskStore`` reads a spill's layers in chunks with a few threads. For a GPU, ``HostStore``
   keeps the layers in pinned RAM instead.
3. ``LayerStreamer`` runs ``StreamSchedule``: it reads ahead into slots, hands a layer's weights
   to compute, and refills the slot once compute has released it.
"""

from __future__ import annotations

from vllm_subspec.stream.disk import DiskStore
from vllm_subspec.stream.host import CopyDevice, CudaDevice, Event, HostStore
from vllm_subspec.stream.layout import RowPiece, SpillLayout, TensorSpec, split_rows
from vllm_subspec.stream.schedule import Read, StreamSchedule
from vllm_subspec.stream.spill import Spill
from vllm_subspec.stream.store import WeightStore
from vllm_subspec.stream.streamer import LayerStreamer, StreamStatistics
from vllm_subspec.stream.writer import SpillWriter

__all__ = [
    "CopyDevice",
    "CudaDevice",
    "DiskStore",
    "Event",
    "HostStore",
    "LayerStreamer",
    "Read",
    "RowPiece",
    "Spill",
    "SpillLayout",
    "SpillWriter",
    "StreamSchedule",
    "StreamStatistics",
    "TensorSpec",
    "WeightStore",
    "split_rows",
]
