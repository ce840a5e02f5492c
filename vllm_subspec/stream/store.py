"""Where streamed layers rest, and how their bytes get from there into a slot."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_subspec.errors import ConfigError, SpillError
from vllm_subspec.stream.blockfile import split
from vllm_subspec.stream.layout import ALIGNMENT
from vllm_subspec.stream.spill import Spill

CHUNK_BYTES = 4 << 20
"""Large enough that a disk at full speed needs only some hundred system calls a second, small
enough that one layer keeps all threads busy."""


class WeightStore(ABC):
    """The slow tier of a stream."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many layers are stored."""

    @abstractmethod
    def layer_bytes(self, layer: int) -> int:
        """Padded bytes of ``layer``: what a read of it moves."""

    @abstractmethod
    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        """Begin to fill ``buffer`` (uint8 [layer_bytes], page-aligned) and return at once.

        The future ends, with None or the error, only when nothing writes to ``buffer`` any more,
        and always ends: ``close`` fails what did not begin.
        """

    @abstractmethod
    def close(self) -> None:
        """End every read, join every thread, close every file. Idempotent."""


class DiskStore(WeightStore):
    """Reads a spill's layers with a few threads, each chunk straight into the slot.

    Args:
        spill: what to read; closed with the store.
        num_threads: reads in flight at the disk at once. Four keep one NVMe disk or cloud volume
            busy; they sleep in the kernel and cost next to no CPU time.
        chunk_bytes: bytes of one read, a multiple of 4096.
        emulate_bytes_per_s: for experiments, the speed of a slower link: chunks end one after
            another, no sooner than that link would have carried them.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        spill: Spill,
        num_threads: int = 4,
        chunk_bytes: int = CHUNK_BYTES,
        emulate_bytes_per_s: float | None = None,
    ) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads}: at least 1 is needed to read")
        if chunk_bytes < ALIGNMENT or chunk_bytes % ALIGNMENT:
            raise ConfigError(
                f"chunk_bytes={chunk_bytes}: O_DIRECT needs a positive multiple of {ALIGNMENT}"
            )
        if emulate_bytes_per_s is not None and not emulate_bytes_per_s > 0:
            raise ConfigError(f"emulate_bytes_per_s={emulate_bytes_per_s}: it must be above 0")
        self._spill = spill
        self._chunk_bytes = chunk_bytes
        self._link = None if emulate_bytes_per_s is None else _Link(emulate_bytes_per_s)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="subspec-read")

    @property
    def num_layers(self) -> int:
        return self._spill.layout.num_layers

    def layer_bytes(self, layer: int) -> int:
        return self._spill.layout.layers[layer].nbytes

    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        """See ``WeightStore``; a failed read ends with a ``SpillError``."""
        chunks = split(buffer, self._chunk_bytes)
        whole = _LayerRead(len(chunks))
        offset = self._spill.layout.layers[layer].offset
        for chunk in chunks:
            part = self._pool.submit(self._read_chunk, layer, chunk, offset)
            part.add_done_callback(whole.end_chunk)
            offset += len(chunk)
        return whole.future

    def close(self) -> None:
        if self._link is not None:
            self._link.open_wide()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._spill.close()

    def _read_chunk(self, layer: int, chunk: torch.Tensor, offset: int) -> None:
        arrival = None if self._link is None else self._link.send(len(chunk))
        try:
            self._spill.read_into(chunk, offset)
        except OSError as error:
            raise SpillError(
                f"cannot read layer {layer} from {self._spill.path}: {len(chunk)} bytes at "
                f"{offset} failed with errno {error.errno} ({error.strerror})"
            ) from error
        if self._link is not None and arrival is not None:
            self._link.wait_until(arrival)


class _LayerRead:
    """The future of a layer: it ends when all its chunks have, with the first error of any."""

    def __init__(self, num_chunks: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # what writes to a slot cannot be cancelled
        self._lock = threading.Lock()
        self._num_open = num_chunks
        self._error: BaseException | None = None

    def end_chunk(self, chunk: Future[None]) -> None:
        closed = SpillError("the stream was closed before this read began")
        with self._lock:
            self._error = self._error or (closed if chunk.cancelled() else chunk.exception())
            self._num_open -= 1
            if self._num_open:
                return
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)


class _Link:
    """An emulated link that carries one chunk after another at a fixed speed."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._open = threading.Event()

    def send(self, nbytes: int) -> float:
        """Queue ``nbytes`` and return when (``time.monotonic``) their last one arrives."""
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + nbytes / self._bytes_per_s
            return self._free_at

    def wait_until(self, arrival: float) -> None:
        self._open.wait(arrival - time.monotonic())

    def open_wide(self) -> None:
        """Let everything through, so that ``close`` need not wait for a slow link."""
        self._open.set()
