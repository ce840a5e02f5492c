"""The speed of the link, measured by the code that streams weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from subspec_kernels.temporary import temporary_directory

from vllm_subspec.stream.disk import DiskStore
from vllm_subspec.stream.layout import SpillLayout, TensorSpec
from vllm_subspec.stream.writer import SpillWriter

PROBE_LAYERS, PROBE_LAYER_BYTES = 8, 64 << 20
_PASSES = 3


def link_bytes_per_s(
    folder: Path, num_layers: int = PROBE_LAYERS, layer_bytes: int = PROBE_LAYER_BYTES
) -> float:
    """Bytes a second of streaming from ``folder``, median of three passes. See ``streaming``."""
    with _spilled(folder, num_layers, layer_bytes) as (store, slots):
        return median(_read_all(store, slots) for _ in range(_PASSES))


@contextmanager
def streaming(
    folder: Path, num_layers: int = PROBE_LAYERS, layer_bytes: int = PROBE_LAYER_BYTES
) -> Iterator[float]:
    """Measure the link, then stream on in the background for as long as the block runs.

    Writes a spill of ``num_layers`` times ``layer_bytes``, and removes it.

    Args:
        folder: a private directory on the disk in question.
        num_layers: at least 1.
        layer_bytes: of each.

    Yields:
        What ``link_bytes_per_s`` returns.

    Raises:
        SpillError: the spill cannot be written or read.
    """
    with _spilled(folder, num_layers, layer_bytes) as (store, slots):
        speed = median(_read_all(store, slots) for _ in range(_PASSES))
        over = threading.Event()

        def read_on() -> None:
            while not over.is_set():
                _read_all(store, slots)

        with ThreadPoolExecutor(1, thread_name_prefix="subspec-probe") as pool:
            reader = pool.submit(read_on)
            try:
                yield speed
            finally:
                over.set()
            reader.result()


@contextmanager
def _spilled(
    folder: Path, num_layers: int, layer_bytes: int
) -> Iterator[tuple[DiskStore, Sequence[torch.Tensor]]]:
    """A store of random layers in ``folder``, and two slots."""
    layout = SpillLayout.of([[TensorSpec("probe", (layer_bytes,), torch.uint8)]] * num_layers)
    weight = torch.randint(256, (layer_bytes,), dtype=torch.uint8)
    with temporary_directory(folder) as private:
        with SpillWriter(private, "probe", layout, "probe") as writer:
            for layer in range(num_layers):
                writer.put(layer, {"probe": weight})
            store = DiskStore(writer.finish())
        try:
            yield store, [store.allocate(layout.slot_bytes) for _ in range(2)]
        finally:
            store.close()


def _read_all(store: DiskStore, slots: Sequence[torch.Tensor]) -> float:
    """Bytes a second of one pass, the next layer's read queued behind the one that runs."""
    began = time.monotonic()
    reads = [store.start_read(0, slots[0])]
    for layer in range(1, store.num_layers):
        reads.append(store.start_read(layer, slots[layer % 2]))
        reads[layer - 1].result()
    reads[-1].result()
    moved = sum(store.layer_bytes(layer) for layer in range(store.num_layers))
    return moved / (time.monotonic() - began)
