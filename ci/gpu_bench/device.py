"""What the script needs of a GPU, and a stand-in for a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from vllm_subspec.stream import CopyDevice, CudaDevice, Event

Call = Callable[[], object]


class Mark(Protocol):
    """A point in the device's work, with its time."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to ``end``."""


class Device(Protocol):
    """Where things are run and timed.

    Attributes:
        is_dry: there is no GPU: everything runs once, and no time means anything.
        torch_device: what tensors are made on.
    """

    is_dry: bool
    torch_device: torch.device

    def synchronize(self) -> None:
        """Return when all work that was issued is over."""

    def mark(self) -> Mark:
        """A mark behind what was issued so far; its time is known once the device is there."""

    def capture(self, steps: Sequence[Call]) -> list[Call]:
        """Graphs of the steps, one each. They share memory: replay them in the order given.

        Whatever is compiled on first use must have been used before. What a step returns or
        stores is filled by its replay.
        """

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function by torch.compile."""

    def time_ms(self, call: Call, captured: bool = True) -> float:
        """The median time of a call whose inputs are not in the GPU's caches.

        captured: replay a graph of it, so that the host's launches do not count.
        """

    def copies(self) -> CopyDevice:
        """Copies from pinned RAM on a stream of their own: those of the engine."""


class Gpu:
    """The first CUDA device."""

    is_dry = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def capture(self, steps: Sequence[Call]) -> list[Call]:
        self.synchronize()
        pool = torch.cuda.graph_pool_handle()
        replays: list[Call] = []
        for step in steps:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step()
            replays.append(graph.replay)
        return replays

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return compiled

    def time_ms(self, call: Call, captured: bool = True) -> float:
        from triton.testing import do_bench  # type: ignore[import-untyped]

        call()
        if captured:
            [call] = self.capture([call])
        return float(do_bench(call, warmup=10, rep=50, return_mode="median"))

    def copies(self) -> CopyDevice:
        return CudaDevice(self.torch_device, torch.cuda.current_stream())


class NoGpu:
    """A dry run's device: the CPU, with every time 1 ms. The report shows none of them."""

    is_dry = True
    torch_device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark:
        return _Point()

    def capture(self, steps: Sequence[Call]) -> list[Call]:
        for step in steps:
            step()
        return [_nothing] * len(steps)

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def time_ms(self, call: Call, captured: bool = True) -> float:
        call()
        return 1.0

    def copies(self) -> CopyDevice:
        return _Copies()


def _nothing() -> None:
    """The replay of a graph that was not captured."""


class _Point:
    """An event and a mark of a device whose work ends when it is issued."""

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 1.0


class _Copies:
    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    allocate_host = allocate

    def compute_event(self) -> Event:
        return _Point()

    def copy_after(
        self, event: Event, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Event:
        event.synchronize()
        for target, source in pieces:
            target.copy_(source)
        return _Point()
