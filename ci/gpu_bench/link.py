"""The link: from pinned RAM to the device by the engine's own copies, alone and under compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch

from gpu_bench.device import Call, Device
from gpu_bench.report import Rows
from vllm_subspec.stream import CopyDevice

MIB = 1 << 20
CHUNKS_MIB = (4, 16, 64)
Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]


def measure_link(device: Device, small: bool) -> Rows:
    """A record for each chunk size and kind of compute beside it, and the copy within the device.

    ``compute_slowdown`` is how much longer that compute takes under the copies.
    """
    unit, total = (64, 1 << 12) if small else (MIB, 1 << 30)
    copies = device.copies()
    largest = CHUNKS_MIB[-1] * unit
    source = copies.allocate_host(largest)
    slots = [copies.allocate(largest) for _ in range(2)]
    rows: Rows = []
    for chunk in CHUNKS_MIB:
        size = chunk * unit
        starts = cycle(range(0, largest, size))
        pieces = [
            (slots[index % 2][:size], source[start : start + size])
            for index, start in zip(range(max(1, total // size)), starts, strict=False)
        ]
        alone_s = _copy_s(device, copies, pieces)
        moved = sum(len(piece) for piece, _ in pieces)
        rows.append(_row("H2D", chunk, "nothing", moved / alone_s))
        for name, call in _computes(device, small).items():
            each_ms = device.time_ms(call, captured=False)
            count = max(1, min(2000, int(2e3 * alone_s / each_ms)))
            free_s = _run_s(device, call, count)
            copied_s, busy_s = _overlapped(device, copies, pieces, call, count)
            row = _row("H2D", chunk, name, moved / copied_s)
            rows.append(row | {"compute_slowdown": busy_s / free_s})
    within_ms = device.time_ms(lambda: slots[0].copy_(slots[1]))
    rows.append(_row("D2D", CHUNKS_MIB[-1], "nothing", largest / within_ms * 1e3))
    return rows


def _row(way: str, chunk_mib: int, beside: str, bytes_per_s: float) -> dict[str, Any]:
    return {"way": way, "chunk_MiB": chunk_mib, "beside": beside, "GB_per_s": bytes_per_s / 1e9}


def _computes(device: Device, small: bool) -> dict[str, Call]:
    """What a target's pass does, and what a draft's does: arithmetic, and reading memory."""
    side, nbytes = (32, 1 << 10) if small else (4096, 256 * MIB)
    a, b = torch.randn(2, side, side, device=device.torch_device).bfloat16()
    memory = torch.zeros(2, nbytes, dtype=torch.uint8, device=device.torch_device)
    return {
        "matrix products": lambda: a @ b,
        "memory traffic": lambda: memory[0].copy_(memory[1]),
    }


def _run_s(device: Device, call: Call, count: int) -> float:
    device.synchronize()
    start = time.monotonic()
    for _ in range(count):
        call()
    device.synchronize()
    return time.monotonic() - start


def _copy_s(device: Device, copies: CopyDevice, pieces: Pieces) -> float:
    device.synchronize()
    start = time.monotonic()
    copies.copy_after(copies.compute_event(), pieces).synchronize()
    return time.monotonic() - start


def _overlapped(
    device: Device, copies: CopyDevice, pieces: Pieces, call: Call, count: int
) -> tuple[float, float]:
    """Seconds of the copies, and of the compute, both begun at once."""
    device.synchronize()
    before = copies.compute_event()
    start = time.monotonic()
    copied = copies.copy_after(before, pieces)
    for _ in range(count):
        call()
    copied.synchronize()
    copied_s = time.monotonic() - start
    device.synchronize()
    return copied_s, time.monotonic() - start
