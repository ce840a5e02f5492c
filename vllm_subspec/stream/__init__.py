"""Layers' weights rest on disk and flow through a ring of slots around the layer cycle.

1. ``SpillWriter`` takes each layer as the model loads and leaves a ``Spill`` (one file).
2. ``DiskStore`` reads a spill's layers in chunks with a few threads.
3. ``LayerStreamer`` runs ``StreamSchedule``: it reads ahead into slots, hands a layer's weights
   to compute, and refills the slot once compute has released it.
"""

from __future__ import annotations

from vllm_subspec.stream.layout import SpillLayout, TensorSpec
from vllm_subspec.stream.schedule import Read, StreamSchedule
from vllm_subspec.stream.spill import Spill
from vllm_subspec.stream.store import DiskStore, WeightStore
from vllm_subspec.stream.streamer import LayerStreamer, StreamStatistics
from vllm_subspec.stream.writer import SpillWriter

__all__ = [
    "DiskStore",
    "LayerStreamer",
    "Read",
    "Spill",
    "SpillLayout",
    "SpillWriter",
    "StreamSchedule",
    "StreamStatistics",
    "TensorSpec",
    "WeightStore",
]
