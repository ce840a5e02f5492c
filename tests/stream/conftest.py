"""A small spill of odd shapes, and the rule that no test leaves a file or a thread open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_subspec.stream import Spill, SpillLayout, SpillWriter, TensorSpec
from vllm_subspec.stream.blockfile import aligned_buffer

Weights = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert set(threading.enumerate()) <= threads


class SpillCase:
    """The spill ``m`` in a directory that does not exist yet; three layers, 49152 bytes."""

    specs = (
        [TensorSpec("w", (37, 61), torch.bfloat16), TensorSpec("b", (61,), torch.float32)],
        [TensorSpec("w", (3, 5, 7), torch.float32), TensorSpec("scale", (), torch.float32)],
        [TensorSpec("w", (129, 65), torch.float32), TensorSpec("empty", (0, 4), torch.bfloat16)],
    )
    layout = SpillLayout.of(specs)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spill = directory / "m.spill"
        self.manifest = directory / "m.json"

    def weights(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return [
            {s.name: torch.randn(s.shape, generator=generator).to(s.dtype) for s in layer}
            for layer in self.specs
        ]

    def writer(self, identity: str = "a") -> SpillWriter:
        return SpillWriter(self.directory, "m", self.layout, identity)

    def open(self, identity: str = "a", *, verify: bool = True) -> Spill:
        return Spill.open(self.directory, "m", self.layout, identity, verify=verify)

    def write(
        self, weights: Weights, identity: str = "a", order: tuple[int, ...] = (2, 0, 1)
    ) -> list[bool]:
        """Put all layers; per layer, in ``order``, whether it was written and not kept."""
        with self.writer(identity) as writer:
            written = [writer.put(layer, weights[layer]) for layer in order]
            writer.finish().close()
        return written

    def assert_holds(self, spill: Spill, weights: Weights) -> None:
        buffer = aligned_buffer(self.layout.slot_bytes)
        for layer, tensors in zip(self.layout.layers, weights, strict=True):
            spill.read_into(buffer[: layer.nbytes], layer.offset)
            views = layer.views(buffer)
            assert views.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert views[name].dtype == tensor.dtype
                assert torch.equal(views[name], tensor), name


@pytest.fixture
def case(tmp_path: Path) -> SpillCase:
    return SpillCase(tmp_path / "spills")
