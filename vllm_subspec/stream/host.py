"""Host RAM as slow tier of a device: pinned chunks, a copy stream, refills ordered by events."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from vllm_subspec.errors import BudgetError, ConfigError, SpillError
from vllm_subspec.stream.blockfile import aligned_buffer
from vllm_subspec.stream.layout import SpillLayout
from vllm_subspec.stream.link import EmulatedLink
from vllm_subspec.stream.store import LayerRead, WeightStore

HOST_CHUNK_BYTES = 64 << 20
"""A power of two: torch rounds pinned memory up to one, which for a whole layer wastes up to half.
At 50 GB/s a chunk takes 1.3 ms, so that issuing it costs nothing."""


class Event(Protocol):
    """A point in a device stream's work."""

    def synchronize(self) -> None:
        """Return when the work before this point is over."""


class CopyDevice(Protocol):
    """What a host store needs of a device; all methods may be called from any thread."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 [nbytes] tensor on the device.

        Raises:
            BudgetError: it has no room.
        """

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """A uint8 [nbytes] tensor in host RAM that copies to the device run fastest from.

        Raises:
            BudgetError: the machine refuses it.
        """

    def compute_event(self) -> Event:
        """The point after everything that compute has been given so far."""

    def copy_after(
        self, event: Event, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Event:
        """Issue copies (target on the device, source in RAM) that begin after ``event``.

        Returns:
            The point after the last of them.
        """


class CudaDevice:
    """CUDA: copies run on a stream of their own.

    Args:
        device: the GPU.
        compute_stream: the stream the model runs on. Named, not taken from the calling thread:
            torch's current stream is a thread's own, and reads are also begun by others.
        pin: whether host memory is page-locked. Without it copies are slower and stall the
            thread that issues them (not compute); for machines whose GPU shares the RAM
            (vLLM's VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY).
    """

    def __init__(
        self, device: torch.device, compute_stream: torch.cuda.Stream, pin: bool = True
    ) -> None:
        self._device = device
        self._compute = compute_stream
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pin = pin

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"a slot of {nbytes} bytes does not fit {self._device}: stream with fewer slots or "
                "lower memory_budget"
            ) from error

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        except RuntimeError as error:
            raise BudgetError(
                f"{nbytes} more bytes of {'pinned ' if self._pin else ''}host RAM cannot be had "
                f"({error}): stream from disk, or raise the limit of locked memory"
            ) from error

    def compute_event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._compute.record_event()
        return event

    def copy_after(
        self, event: Event, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event:
        assert isinstance(event, torch.cuda.Event)
        self._copies.wait_event(event)
        with torch.cuda.stream(self._copies):
            for target, source in pieces:
                assert source.is_pinned() == self._pin
                target.copy_(source, non_blocking=True)
        copied: torch.cuda.Event = self._copies.record_event()
        return copied


class HostStore(WeightStore):
    """Layers in host RAM, copied into device slots by one thread.

    The danger is a slot that is refilled under compute: releasing a layer on the host says only
    that its compute was issued. So a read takes compute's event when it begins, and the copy
    stream waits for that event before the first byte moves (as vLLM does in
    model_executor/offloader/prefetch.py, ``start_onload_to_static``). A read ends when the device
    says that its copies have, so whatever compute is issued then sees the bytes, on any stream.
    While the link is the bottleneck that wait on the host costs nothing: with two or more slots
    the next copy is under way.

    Layers lie in the chunks as they would in a spill, one after another. ``put`` every layer
    before the first read.

    Args:
        layout: what the layers hold; mapped tensors have no place here.
        device: what the slots are on.
        chunk_bytes: bytes of one piece of host memory.
        emulate_bytes_per_s: for experiments, the speed of a slower link: a read ends no sooner
            than that link, free and past compute's event, would have carried it.

    Raises:
        ConfigError: an argument is out of range, or the layout has mapped tensors.
        BudgetError: the host's RAM does not hold the layers.
    """

    def __init__(
        self,
        layout: SpillLayout,
        device: CopyDevice,
        chunk_bytes: int = HOST_CHUNK_BYTES,
        emulate_bytes_per_s: float | None = None,
    ) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes={chunk_bytes}: at least 1 is needed")
        if layout.mapped:
            raise ConfigError("mapped tensors need a disk; keep them on the fast tier instead")
        self._layout = layout
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._closing = threading.Event()
        self._link = (
            None
            if emulate_bytes_per_s is None
            else EmulatedLink(emulate_bytes_per_s, self._closing)
        )
        starts = range(0, layout.streamed_bytes, chunk_bytes)
        self._chunks = [
            device.allocate_host(min(chunk_bytes, layout.streamed_bytes - start))
            for start in starts
        ]
        self._staging = aligned_buffer(layout.slot_bytes)
        self._missing = set(range(layout.num_layers))
        # One thread: the link carries one layer after another, in the order of the reads.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="subspec-copy")

    @property
    def num_layers(self) -> int:
        return self._layout.num_layers

    def layer_bytes(self, layer: int) -> int:
        return self._layout.layers[layer].nbytes

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a layer's weights: exactly the layout's names, shapes and dtypes, on any device.

        Raises:
            SpillError: they are not the layout's.
        """
        if layer not in range(self.num_layers):
            raise SpillError(f"layer {layer} is not among the {self.num_layers} streamed")
        staged = self._layout.layers[layer].stage(self._staging, tensors, f"layer {layer}")
        for source, part in self._pieces(layer, staged):
            part.copy_(source)
        self._missing.discard(layer)
        if not self._missing:
            self._staging = torch.empty(0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See ``CopyDevice.allocate``."""
        return self._device.allocate(nbytes)

    def start_read(self, layer: int, buffer: torch.Tensor) -> Future[None]:
        """See ``WeightStore``; what the device fails with ends the future."""
        whole = LayerRead(1)
        released = self._device.compute_event()
        copy = self._pool.submit(self._copy, layer, buffer, released)
        copy.add_done_callback(whole.end_part)
        return whole.future

    def close(self) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._chunks.clear()

    def _copy(self, layer: int, buffer: torch.Tensor, released: Event) -> None:
        if layer in self._missing:
            raise SpillError(f"layer {layer} cannot be read: it was never put")
        copied = self._device.copy_after(released, list(self._pieces(layer, buffer)))
        if self._link is not None:
            released.synchronize()
            self._link.wait_until(self._link.send(len(buffer)))
        copied.synchronize()

    def _pieces(
        self, layer: int, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The layer, cut at the chunks' borders: parts of ``whole``, and where they rest."""
        place = self._layout.layers[layer]
        done = 0
        while done < place.nbytes:
            index, start = divmod(place.offset + done, self._chunk_bytes)
            rest = self._chunks[index][start : start + place.nbytes - done]
            yield whole[done : done + len(rest)], rest
            done += len(rest)
