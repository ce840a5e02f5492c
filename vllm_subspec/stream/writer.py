"""Writes the spill layer by layer while the model loads; keeps what is proven to be there."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from vllm_subspec.errors import SpillDamagedError, SpillError
from vllm_subspec.files import atomic_replace, private_directory, tensor_digest
from vllm_subspec.stream.blockfile import IO_BYTES, BlockFile, aligned_buffer, split
from vllm_subspec.stream.layout import ALIGNMENT, SpillLayout, round_up
from vllm_subspec.stream.spill import Manifest, Spill, SpillPaths, in_use, open_locked

logger = logging.getLogger(__name__)

PATIENCE_S = 1800.0
"""For another process that writes the spill just now, as a replica that started as we did."""

_TRIES, _PAUSE_S = 20, (0.01, 0.1)
"""For a lock that others hold: those that begin together give it up in turn, users do not."""

MISSING, OTHER, DAMAGED = "missing", "of other weights", "damaged"


class SpillWriter:
    """Takes each layer once, in any order, then hands over the open ``Spill``.

    A layer whose bytes a former run left on the disk is read back and kept if they are the same.
    That needs a shared lock only, so processes with the same weights share one spill; the lock
    becomes exclusive before the first byte changes. Of processes that find no spill, one writes it
    and the others wait for it. Holds one layer in memory besides the
    caller's, of a mapped tensor a few MB. Use it as a context manager: left before ``finish``, it
    removes what it wrote.

    Args:
        directory: made private (0700) where it is missing.
        name: file name without ``.spill``; processes with different weights need different names.
        layout: what the layers hold.
        identity: the caller's name for the weights, e.g. a digest of model, revision and placement.
        patience_s: how long to wait for a process that is writing the file.

    Raises:
        SpillError: no directory, no file, no space, or another process uses the file for other
            weights, or is still writing it.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        layout: SpillLayout,
        identity: str,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._patience_s = patience_s
        self._digests: dict[int, str] = {}
        self._rewritten: dict[int, str] = {}
        self._exclusive = self._closed = False
        paths = SpillPaths(directory, name)
        with paths.reporting("create", layout.total_bytes):
            self._paths = SpillPaths(private_directory(directory), name)
            self._file = self._open()
        with self._discarding_on_failure("create"):
            self._former, self._reason = self._look()
            if not self._is_whole():
                self._begin_rewrite()
            self._file.use_direct()
            self._staging = aligned_buffer(max(layout.slot_bytes, IO_BYTES if layout.mapped else 0))
            self._readback = aligned_buffer(min(IO_BYTES, len(self._staging)))

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Bring one layer to the disk; returns True if it was written, False if kept.

        Args:
            layer: index in the layout.
            tensors: exactly the layout's names, shapes and dtypes; any device and strides.

        Raises:
            SpillError: the tensors are not the layout's; the disk is full or failing; the layer
                must be rewritten while another process uses the spill.
        """
        if layer not in range(self._layout.num_layers):
            raise SpillError(f"layer {layer} is not among the {self._layout.num_layers} streamed")
        staged = self._layout.layers[layer].stage(self._staging, tensors, f"layer {layer}")
        return self._bring(layer, lambda: split(staged, IO_BYTES), tensor_digest(staged))

    def put_mapped(self, name: str, tensor: torch.Tensor) -> bool:
        """Bring one mapped tensor to the disk, a few MB at a time; returns True if written.

        Args:
            name: a name among the layout's ``mapped``.
            tensor: of the shape and dtype given there; one that is not contiguous, or not on the
                CPU, is copied whole.

        Raises:
            SpillError: as for ``put``, or no mapped tensor has that name.
        """
        index = self._layout.mapped_index(name)
        unit = self._layout.units[index]
        unit.check_tensors({name: tensor}, f"mapped tensor {name!r}")
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        padding = torch.zeros(unit.nbytes - len(data), dtype=torch.uint8)
        return self._bring(index, lambda: self._staged_parts(data), tensor_digest(data, padding))

    def _staged_parts(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """``data`` (uint8 [n]) in aligned pieces, the last one padded with zeros."""
        for part in split(data, IO_BYTES):
            staged = self._staging[: round_up(len(part), ALIGNMENT)].zero_()
            staged[: len(part)].copy_(part)
            yield staged

    def _bring(self, index: int, parts: Callable[[], Iterable[torch.Tensor]], digest: str) -> bool:
        """Make unit ``index`` on the disk equal to ``parts`` in a row; True if it was not."""
        with self._discarding_on_failure("write"):
            keep = self._is_on_disk(index, parts()) or not self._begin_rewrite(
                lambda: self._is_on_disk(index, parts())
            )
            if not keep:
                offset = self._layout.units[index].offset
                for part in parts():
                    self._file.write_from(part, offset)
                    offset += len(part)
        if not keep:
            self._rewritten[index] = self._why(index, digest)
        self._digests[index] = digest
        return not keep

    def finish(self) -> Spill:
        """Sync the file, write the manifest, and return the spill under its shared lock.

        Raises:
            SpillError: a unit was never put (the writer stays usable), or the disk fails.
        """
        units = range(len(self._layout.units))
        if missing := sorted(set(units) - self._digests.keys()):
            raise SpillError(
                f"{self._paths.spill} is incomplete: layers {missing} were never put (mapped "
                f"tensors count from {self._layout.num_layers})"
            )
        digests = tuple(self._digests[index] for index in units)
        manifest = Manifest(self._identity, self._layout.describe(), digests)
        with self._discarding_on_failure("finish"):
            if (self._exclusive or manifest != self._former) and self._begin_rewrite():
                self._file.sync()
                with atomic_replace(self._paths.manifest) as temporary:
                    temporary.write_text(manifest.dump(), encoding="utf-8")
                self._exclusive = False
                if not self._change_lock(exclusive=False, expected=manifest):
                    raise in_use(self._paths)
        self._report()
        self._closed = True  # the file and its lock are the Spill's now
        self._staging = self._readback = torch.empty(0)
        return Spill(self._file, self._layout, digests)

    def close(self) -> None:
        """Give up: remove an unfinished spill and free the lock. No effect after ``finish``."""
        if self._closed:
            return
        self._closed = True
        if self._exclusive:
            self._paths.manifest.unlink(missing_ok=True)
            self._paths.spill.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> SpillWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _look(self) -> tuple[Manifest | None, str]:
        """The manifest on disk if it is of these weights; why a layer would not be reused."""
        try:
            manifest = Manifest.load(self._paths.manifest)
        except SpillDamagedError:
            return None, DAMAGED
        if manifest is None:
            return None, MISSING
        fits = manifest.mismatch(self._layout, self._identity) is None
        return (manifest if fits else None), OTHER

    def _is_whole(self) -> bool:
        return self._former is not None and self._bytes_found == self._layout.total_bytes

    def _open(self) -> BlockFile:
        file = open_locked(self._paths, create=True, patience_s=self._patience_s)
        self._bytes_found = file.size
        return file

    def _begin_rewrite(self, suffices: Callable[[], bool] = lambda: True) -> bool:
        """Make this process the only user, and void the manifest before any byte changes.

        Args:
            suffices: whether a whole spill that another process left is what is needed.

        Returns:
            False if another process wrote the spill of these weights meanwhile, which is shared.

        Raises:
            SpillError: others use the file for other weights.
        """
        if self._exclusive:
            return True
        for _ in range(_TRIES):
            if self._change_lock(exclusive=True, expected=self._former):
                self._exclusive = True
                self._paths.manifest.unlink(missing_ok=True)
                _sync_directory(self._paths.directory)
                self._file.allocate(self._layout.total_bytes)
                return True
            if self._share_anew() and suffices():
                return False
        raise in_use(self._paths)

    def _share_anew(self) -> bool:
        """After a try for the lock, which costs the one we had: whether a whole spill is there.

        Raises:
            SpillError: it does not vouch for what was put so far, or is still being written.
        """
        was_direct = self._file.direct
        self._file.close()
        time.sleep(random.uniform(*_PAUSE_S))
        self._file = self._open()
        self._former, self._reason = self._look()
        digests = self._former.digests if self._former is not None and self._is_whole() else None
        if any(digests is None or digests[i] != put for i, put in self._digests.items()):
            raise in_use(self._paths)
        if was_direct:
            self._file.use_direct()
        return digests is not None

    def _change_lock(self, *, exclusive: bool, expected: Manifest | None) -> bool:
        # flock drops the old lock before it takes the new one. Whoever wrote in between had to
        # void the manifest, so an unchanged one proves that nobody did.
        locked = self._file.lock(exclusive=exclusive)
        return locked and self._file.is_linked and self._look()[0] == expected

    def _is_on_disk(self, index: int, parts: Iterable[torch.Tensor]) -> bool:
        unit = self._layout.units[index]
        if unit.offset + unit.nbytes > self._bytes_found:
            return False
        offset = unit.offset
        for part in parts:
            there = self._readback[: len(part)]
            self._file.read_into(there, offset)
            if not torch.equal(there, part):
                return False
            offset += len(part)
        return True

    def _why(self, layer: int, digest: str) -> str:
        if self._former is None:
            return self._reason
        return DAMAGED if self._former.digests[layer] == digest else OTHER

    def _report(self) -> None:
        reasons = Counter(self._rewritten.values())
        written = sum(index < self._layout.num_layers for index in self._rewritten)
        logger.log(
            logging.WARNING if DAMAGED in reasons else logging.INFO,
            "spill %s: %d layers reused, %d written (%s)",
            self._paths.spill,
            self._layout.num_layers - written,
            written,
            ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none",
        )

    @contextmanager
    def _discarding_on_failure(self, action: str) -> Iterator[None]:
        try:
            with self._paths.reporting(action, self._layout.total_bytes):
                yield
        except SpillError:
            self.close()
            raise


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
