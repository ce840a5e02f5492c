"""Layers' weights on demand: the schedule's reads, run by a store into a ring of slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch

from vllm_subspec.errors import BudgetError, ConfigError, SpillError
from vllm_subspec.stream.layout import SpillLayout
from vllm_subspec.stream.schedule import Read, StreamSchedule
from vllm_subspec.stream.store import WeightStore
from vllm_subspec.timeline import Timeline


@dataclass(frozen=True)
class StreamStatistics:
    """What a streamer did since it was made.

    ``bytes_read`` and ``reads`` count finished reads, ``read_busy_s`` is the wall time during
    which at least one read was in flight, ``wait_s`` the time that ``acquire`` blocked,
    ``retries`` the reads that failed and were tried again.
    """

    bytes_read: int
    reads: int
    read_busy_s: float
    wait_s: float
    retries: int = 0


class LayerStreamer:
    """Streams layers from a store through ``num_slots`` buffers, reading ahead of the target.

    A read starts as soon as its slot is free, also between passes: prefetch while the draft runs
    (arXiv 2509.18344) is simply that. Compute on a layer must be over when it is released.
    All methods may be called from any thread.

    Args:
        store: where the layers rest; closed with the streamer.
        layout: shapes and places of the layers' weights; it must be the store's.
        num_slots: buffers, each as large as the largest layer; clamped to the layers' number.
        timeout_s: seconds after which ``acquire`` gives up on a read.
        timeline: gets a "link" span for each read.

    Raises:
        ConfigError: a number is out of range, or store and layout differ.
        BudgetError: the machine refuses the slots' memory.
    """

    def __init__(
        self,
        store: WeightStore,
        layout: SpillLayout,
        num_slots: int,
        timeout_s: float = 60.0,
        timeline: Timeline | None = None,
    ) -> None:
        stored = [store.layer_bytes(layer) for layer in range(store.num_layers)]
        wanted = [layer.nbytes for layer in layout.layers]
        if stored != wanted:
            raise ConfigError(f"the store's layers have {stored} bytes, the layout's {wanted}")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: it must be above 0 seconds")
        self._store = store
        self._layout = layout
        self._timeout_s = timeout_s
        self._timeline = Timeline() if timeline is None else timeline
        self._schedule = StreamSchedule(layout.num_layers, num_slots)
        self._slots = _allocate(store, self._schedule.num_slots, layout.slot_bytes)
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        # Reentrant, since a store may end a read within start_read.
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._in_flight = 0
        self._busy_since = 0.0
        self._bytes_read = self._reads = 0
        self._read_busy_s = self._wait_s = 0.0

    def start(self) -> None:
        """Begin to prefetch before the first ``acquire``."""
        with self._changed:
            self._start_reads()

    def acquire(
        self, layer: int, while_waiting: Callable[[Callable[[], bool]], bool] | None = None
    ) -> dict[str, torch.Tensor]:
        """The weights of ``layer``, by name, as views into a slot; waits until they are there.

        Instead of waiting it calls ``while_waiting`` again and again, as long as that does a
        piece of work (which it says by True) and the weights are not there. It is given a function
        that says whether they are: once they are, all slots fill up, and the link idles.

        They are valid until ``release(layer)``. Any other than the layer after the one acquired
        last means that the former pass was abandoned: all that was held is given up then.

        Raises:
            SpillError: the read failed (the next ``acquire`` reads again), did not end in time, or
                the streamer was closed.
            RuntimeError: no such layer, or its slot is still held by an earlier layer.
        """
        with self._changed:
            if layer != self._schedule.next_layer:
                self._schedule.seek(layer)
            self._start_reads()
        deadline = time.monotonic() + self._timeout_s
        while while_waiting is not None and not self._is_there(layer):
            if not while_waiting(partial(self._is_there, layer)):
                break
            deadline = time.monotonic() + self._timeout_s  # that time was not spent waiting
        with self._changed:
            began = time.monotonic()
            try:
                slot = self._wait_for(layer, deadline)
            finally:
                self._wait_s += time.monotonic() - began
            views = self._views.get((slot, layer))
            if views is None:
                views = self._layout.layers[layer].views(self._slots[slot])
                self._views[slot, layer] = views
            return views

    def release(self, layer: int) -> None:
        """Compute on ``layer`` is over: its slot may be refilled at once.

        Raises:
            RuntimeError: ``layer`` is not held.
        """
        with self._changed:
            self._schedule.release(layer)
            self._start_reads()

    def statistics(self) -> StreamStatistics:
        """The counters now."""
        with self._changed:
            running = time.monotonic() - self._busy_since if self._in_flight else 0.0
            return StreamStatistics(
                self._bytes_read,
                self._reads,
                self._read_busy_s + running,
                self._wait_s,
                self._store.retries,
            )

    def close(self) -> None:
        """End all reads, join the store's threads, free the slots. Idempotent."""
        with self._changed:
            self._closed = True
        # Without the lock: the store waits for reads whose callbacks take it (and wake acquire).
        self._store.close()
        self._views.clear()
        self._slots.clear()

    def __enter__(self) -> LayerStreamer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _is_there(self, layer: int) -> bool:
        with self._changed:
            return self._closed or self._schedule.is_settled(layer)

    def _wait_for(self, layer: int, deadline: float) -> int:
        while not self._closed:
            slot = self._schedule.acquire(layer)
            if slot is not None:
                return slot
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise SpillError(
                    f"layer {layer} was not read within {self._timeout_s} s: the disk of "
                    "stream_dir hangs or is far too slow"
                )
            self._changed.wait(remaining)
        raise SpillError(f"layer {layer} cannot be read: the stream is closed")

    def _start_reads(self) -> None:
        while not self._closed and (read := self._schedule.next_read()) is not None:
            if self._in_flight == 0:
                self._busy_since = time.monotonic()
            self._in_flight += 1
            buffer = self._slots[read.slot][: self._layout.layers[read.layer].nbytes]
            future = self._store.start_read(read.layer, buffer)
            future.add_done_callback(partial(self._end_read, read, time.monotonic()))

    def _end_read(self, read: Read, began: float, ended: Future[None]) -> None:
        self._timeline.record("link", began, time.monotonic())
        with self._changed:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._read_busy_s += time.monotonic() - self._busy_since
            error = ended.exception()
            if error is None:
                self._reads += 1
                self._bytes_read += self._layout.layers[read.layer].nbytes
                self._schedule.finish_read(read)
            else:
                self._schedule.fail_read(read, error)
            self._start_reads()
            self._changed.notify_all()


def _allocate(store: WeightStore, num_slots: int, nbytes: int) -> list[torch.Tensor]:
    try:
        return [store.allocate(nbytes) for _ in range(num_slots)]
    except OSError as error:
        raise BudgetError(
            f"num_slots={num_slots} of {nbytes} bytes each cannot be allocated ({error.strerror}): "
            "stream with fewer slots or keep fewer layers streamed"
        ) from error
