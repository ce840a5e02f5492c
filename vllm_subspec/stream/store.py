"""The slow tier as the streamer sees it, and the future of one layer's read."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future

import torch

from vllm_subspec.errors import SpillError
from vllm_subspec.stream.blockfile import aligned_buffer


class WeightStore(ABC):
    """The slow tier of a stream. ``DiskStore`` and ``HostStore`` are the two there are."""

    retries: int = 0
    """Reads that failed and were tried again."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many layers are stored."""

    @abstractmethod
    def layer_bytes(self, layer: int) -> int:
        """Padded bytes of ``layer``: what a read of it moves."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A slot: uint8 [nbytes] on the fast tier, as ``start_read`` wants it.

        Raises:
            OSError: the machine refuses that much memory.
        """
        return aligned_buffer(nbytes)

    @abstractmethod
    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        """Begin to fill ``buffer`` (uint8 [layer_bytes], from ``allocate``) and return at once.

        Compute that was issued on the buffer before this call may still run on a device: the
        store must order the read behind it. The future ends, with None or the error, only when
        nothing writes to ``buffer`` any more and compute issued then sees the new bytes. It
        always ends: ``close`` fails what did not begin.
        """

    @abstractmethod
    def close(self) -> None:
        """End every read, join every thread, close every file. Idempotent.

        A read that hangs in the kernel or in a driver is waited for: its buffer is in use.
        """


class LayerRead:
    """The future of a layer: it ends when all its parts have, with the first error of any."""

    def __init__(self, num_parts: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # what writes to a slot cannot be cancelled
        self._lock = threading.Lock()
        self._num_open = num_parts
        self._error: BaseException | None = None

    def end_part(self, part: Future[None]) -> None:
        """``part`` ended: the done callback of each of them."""
        closed = SpillError("the stream was closed before this read began")
        with self._lock:
            self._error = self._error or (closed if part.cancelled() else part.exception())
            self._num_open -= 1
            if self._num_open:
                return
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)
