"""The disk as slow tier: a spill's layers, read by a few threads straight into the slots."""

from __future__ import annotations

import errno
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_subspec.errors import ConfigError, SpillDamagedError, SpillError
from vllm_subspec.stream.blockfile import split
from vllm_subspec.stream.integrity import Stamp
from vllm_subspec.stream.layout import ALIGNMENT
from vllm_subspec.stream.link import EmulatedLink
from vllm_subspec.stream.spill import Spill
from vllm_subspec.stream.store import LayerRead, WeightStore

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
"""Large enough that a disk at full speed needs only some hundred system calls a second, small
enough that one layer keeps all threads busy."""

NUM_THREADS = 4
"""Reads at the disk at once. Four of 4 MiB are 16 MiB in flight, split by the kernel into requests
deep enough for any NVMe disk; on a disk that seeks they are neighbours in the file, in order.
Measured on a 2-core machine with a virtual NVMe disk (GB/s, median of 5, 256 MiB each): 1 thread
1.73-1.83, 2 threads 1.81-1.94, 4 threads 1.81-2.00, 8 threads 1.85-2.00, 16 threads 1.90-2.02, for
any chunk of 1 to 16 MiB. The plateau starts at two threads and is flat, so nothing is tuned at run
time; only CPU time differs: 0.15 core at 1 MiB, 0.09 at 4 MiB, 0.07 at 16 MiB. (io_uring would
save some of it; there is no kept Python library for it.)"""

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOMEM,
        errno.EBUSY,
        errno.ENOBUFS,
        errno.ETIMEDOUT,
    }
)
"""Errors that the same read may not meet a moment later: busy paths, short memory, a bad cable."""

RETRY_WAITS_S = (0.01, 0.04, 0.16, 0.64)
"""Seconds before each further try: under a second in all, which a request survives."""


class DiskStore(WeightStore):
    """Reads a spill's layers with a few threads, each chunk straight into the slot.

    A read error that may pass is retried (``RETRY_WAITS_S``), counted and logged. What stays, or
    is of another kind, ends the layer's read with a ``SpillError``, a file that ends early or holds
    other bytes with a ``SpillDamagedError``; a later read of the layer begins anew.

    Args:
        spill: what to read; closed with the store.
        num_threads: reads in flight at the disk at once. They sleep in the kernel.
        chunk_bytes: bytes of one read, a multiple of 4096.
        emulate_bytes_per_s: for experiments, the speed of a slower link: chunks end one after
            another, no sooner than that link would have carried them.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        spill: Spill,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        emulate_bytes_per_s: float | None = None,
    ) -> None:
        if num_threads < 1:
            raise ConfigError(f"num_threads={num_threads}: at least 1 is needed to read")
        if chunk_bytes < ALIGNMENT or chunk_bytes % ALIGNMENT:
            raise ConfigError(
                f"chunk_bytes={chunk_bytes}: O_DIRECT needs a positive multiple of {ALIGNMENT}"
            )
        self._spill = spill
        self._chunk_bytes = chunk_bytes
        self._closing = threading.Event()
        self._link = (
            None
            if emulate_bytes_per_s is None
            else EmulatedLink(emulate_bytes_per_s, self._closing)
        )
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="subspec-read")

    @property
    def num_layers(self) -> int:
        return self._spill.layout.num_layers

    def layer_bytes(self, layer: int) -> int:
        return self._spill.layout.layers[layer].nbytes

    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        """See ``WeightStore``; a failed read ends with a ``SpillError``."""
        chunks = split(buffer, self._chunk_bytes)
        whole = LayerRead(len(chunks))
        check = _Check(self._spill, layer, buffer, len(chunks))
        offset = self._spill.layout.layers[layer].offset
        for chunk in chunks:
            part = self._pool.submit(self._read_chunk, check, chunk, offset)
            part.add_done_callback(whole.end_part)
            offset += len(chunk)
        return whole.future

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._spill.close()

    def _read_chunk(self, check: _Check, chunk: torch.Tensor, offset: int) -> None:
        arrival = None if self._link is None else self._link.send(len(chunk))
        try:
            check.begin_chunk()
            self._read(check.layer, chunk, offset)
            if self._link is not None and arrival is not None:
                self._link.wait_until(arrival)
            check.end_chunk()
        except OSError as error:
            kind = SpillDamagedError if error.errno == errno.ENODATA else SpillError
            raise kind(
                f"cannot read layer {check.layer} from {self._spill.path}: {len(chunk)} bytes at "
                f"{offset} failed with errno {error.errno} ({error.strerror})"
            ) from error

    def _read(self, layer: int, chunk: torch.Tensor, offset: int) -> None:
        for wait_s in RETRY_WAITS_S:
            try:
                return self._spill.read_into(chunk, offset)
            except OSError as error:
                if error.errno not in TRANSIENT or self._closing.is_set():
                    raise
                logger.warning(
                    "reading layer %d of %s at %d failed with errno %d (%s): again in %g s",
                    layer,
                    self._spill.path,
                    offset,
                    error.errno,
                    error.strerror,
                    wait_s,
                )
            with self._counting:
                self.retries += 1
            self._closing.wait(wait_s)
        return self._spill.read_into(chunk, offset)


class _Check:
    """Checks a layer's bytes once its last chunk is there, in the thread that brought it."""

    def __init__(self, spill: Spill, layer: int, buffer: torch.Tensor, num_chunks: int) -> None:
        self.layer = layer
        self._spill = spill
        self._buffer = buffer
        self._lock = threading.Lock()
        self._before: Stamp | None = None
        self._num_missing = num_chunks

    def begin_chunk(self) -> None:
        with self._lock:
            if self._before is None:
                self._before = self._spill.stamp()

    def end_chunk(self) -> None:
        with self._lock:
            self._num_missing -= 1
            if self._num_missing:
                return
        assert self._before is not None
        self._spill.check(self.layer, self._buffer, self._before)
