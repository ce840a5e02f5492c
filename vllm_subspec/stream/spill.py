"""The spill: streamed layers at rest in one file, and a manifest that vouches for its bytes.

``<name>.spill`` holds the layers, then the mapped tensors; ``<name>.json`` their layout, the
identity of the weights and a BLAKE3 digest of each. The manifest exists only while it is true: a
writer removes it before it changes a byte and writes it after the last byte is on the disk.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch

from vllm_subspec.errors import ConfigError, SpillDamagedError, SpillError
from vllm_subspec.files import private_directory, read_private
from vllm_subspec.stream.blockfile import BlockFile, aligned_buffer
from vllm_subspec.stream.integrity import Integrity, Stamp
from vllm_subspec.stream.layout import SpillLayout

logger = logging.getLogger(__name__)

FORMAT = 1
_POLL_S = 0.1


@dataclass(frozen=True)
class SpillPaths:
    """The two files of the spill ``name`` in ``directory``."""

    directory: Path
    name: str

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise ConfigError(f"spill name {self.name!r}: it must be a plain file name without '/'")

    @property
    def spill(self) -> Path:
        """The layers."""
        return self.directory / f"{self.name}.spill"

    @property
    def manifest(self) -> Path:
        """What vouches for them."""
        return self.directory / f"{self.name}.json"

    @contextmanager
    def reporting(self, action: str, needed_bytes: int) -> Iterator[None]:
        """Turn an ``OSError`` into a ``SpillError`` with the path, the space, and what to do."""
        try:
            yield
        except OSError as error:
            raise SpillError(
                f"cannot {action} the spill {self.spill}: {error.strerror or error}. It needs "
                f"{needed_bytes} bytes, {self._free_bytes()} are free there; set stream_dir to a "
                "directory of your own on a disk with room"
            ) from error

    def _free_bytes(self) -> int:
        absolute = self.directory.absolute()
        there = next(p for p in (absolute, *absolute.parents) if os.path.isdir(p))
        return shutil.disk_usage(there).free


@dataclass(frozen=True)
class Manifest:
    """What a spill's bytes are. ``layout`` is ``SpillLayout.describe()``, digests are per unit."""

    identity: str
    layout: list[list[list[object]]]
    digests: tuple[str, ...]

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """The manifest at ``path``, None where there is none.

        Raises:
            OSError: it cannot be read, or is a symlink or another user's.
            SpillDamagedError: it is no manifest of this format.
        """
        try:
            fields = json.loads(read_private(path))
            if fields.pop("format") != FORMAT:
                raise ValueError("unknown format")
            return cls(str(fields["identity"]), fields["layout"], tuple(fields["digests"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpillDamagedError(
                f"{path} is no spill manifest of format {FORMAT} ({error}); remove it and load the "
                "model again"
            ) from error

    def dump(self) -> str:
        """The manifest as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def mismatch(self, layout: SpillLayout, identity: str) -> str | None:
        """Why this manifest is not of these weights; None if it is."""
        if self.identity != identity:
            return f"it holds the weights {self.identity!r}, not {identity!r}"
        if self.layout != layout.describe() or len(self.digests) != len(layout.units):
            return "its layers, shapes or dtypes are not this model's"
        return None


def open_locked(paths: SpillPaths, *, create: bool, patience_s: float = 0.0) -> BlockFile:
    """Open the spill file under a shared lock.

    Args:
        paths: of the spill.
        create: make the file where it is missing.
        patience_s: how long to wait for a process that is writing it.

    Raises:
        OSError: it cannot be opened.
        SpillError: another process is still writing it.
    """
    deadline = time.monotonic() + patience_s
    waiting = False
    while True:
        file = BlockFile(paths.spill, create=create)
        if not file.lock(exclusive=False):
            file.close()
            if time.monotonic() >= deadline:
                raise in_use(paths)
            if not waiting:
                logger.info(
                    "waiting up to %.0f s for the process that writes %s", patience_s, paths.spill
                )
            waiting = True
            time.sleep(_POLL_S)
        elif file.is_linked:
            return file
        else:
            file.close()  # a writer that failed removed it between our open and our lock


def in_use(paths: SpillPaths) -> SpillError:
    """The error of a spill that another process's lock keeps from this one."""
    return SpillError(
        f"{paths.spill} is in use by another process: it streams other weights from it, or is "
        "writing it. Stop or await that process, or set stream_dir to another directory"
    )


class Spill:
    """An open spill under a shared lock: as long as it is open, no process rewrites it.

    No lock keeps others from truncating or overwriting the file all the same, so every read is
    checked (``stamp``, ``check``; see ``Integrity`` for what that finds). A removed spill stays
    readable until it is closed.
    """

    def __init__(self, file: BlockFile, layout: SpillLayout, digests: tuple[str, ...]) -> None:
        self.layout = layout
        self.digests = digests
        self._file = file
        self._integrity = Integrity(file, layout, digests)

    @classmethod
    def open(
        cls,
        directory: Path,
        name: str,
        layout: SpillLayout,
        identity: str,
        *,
        verify: bool = True,
    ) -> Spill:
        """Open a finished spill of exactly these weights.

        Args:
            directory: the private directory it lies in.
            name: its file name without ``.spill``.
            layout: what it must hold.
            identity: the caller's name for the weights; it must be the writer's.
            verify: also read everything and compare its digests, instead of at first use.

        Raises:
            SpillError: it is missing, unreadable, or being written.
            SpillDamagedError: it is unfinished, truncated, altered, or of other weights.
        """
        paths = SpillPaths(directory, name)
        with paths.reporting("open", layout.total_bytes):
            paths = SpillPaths(private_directory(directory), name)
            with ExitStack() as on_failure:
                file = open_locked(paths, create=False)
                on_failure.callback(file.close)
                manifest = Manifest.load(paths.manifest)
                spill = cls(file, layout, _checked(manifest, file, layout, identity))
                file.use_direct()
                if verify:
                    spill.verify()
                on_failure.pop_all()
        return spill

    @property
    def path(self) -> Path:
        """The spill file."""
        return self._file.path

    @property
    def is_direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return self._file.direct

    def read_into(self, buffer: torch.Tensor, offset: int) -> None:
        """Fill ``buffer`` (uint8, address and length aligned) from byte ``offset`` of the file.

        Raises:
            OSError: the disk fails, or the file ends early (ENODATA).
        """
        self._file.read_into(buffer, offset)

    def stamp(self) -> Stamp:
        """The file's state now: take it before a layer's first byte is read, for ``check``.

        Raises:
            OSError: the file is closed.
        """
        return self._file.stamp()

    def check(self, layer: int, content: torch.Tensor, before: Stamp) -> None:
        """Raise unless ``content`` (uint8 [nbytes]) is what the layer must hold.

        Args:
            layer: index in the layout.
            content: what a read just brought.
            before: ``stamp()`` before that read.

        Raises:
            OSError: the file is closed.
            SpillDamagedError: it is not; or a mapped tensor in use is damaged.
        """
        self._integrity.check(layer, content, before)

    def map(self, name: str) -> torch.Tensor:
        """The mapped tensor ``name``, for reading: pages come and go with the page cache.

        Made for an embedding table, of which a pass needs a few rows. Its digest is checked here,
        and again with the next layer that is read after the file changed. What cannot be caught is
        a file truncated under it: touching pages that are gone kills the process (SIGBUS).

        The tensor, and any view of it, keeps the file and its shared lock after ``close``.

        Raises:
            OSError: the disk fails.
            SpillError: no mapped tensor has that name.
            SpillDamagedError: its bytes are not those that were written.
        """
        index = self.layout.mapped_index(name)
        self._integrity.check_mapped(index)
        unit = self.layout.units[index]
        # Few rows, far apart: reading ahead of them would only evict what is needed.
        return unit.views(self._file.map(unit.offset, unit.nbytes, mmap.MADV_RANDOM))[name]

    def verify(self) -> None:
        """Read every layer and mapped tensor, and compare its digest with the manifest's.

        Raises:
            OSError: the disk fails, or the file ends early.
            SpillDamagedError: bytes are not those that were written.
        """
        buffer = aligned_buffer(self.layout.slot_bytes)
        for index, layer in enumerate(self.layout.layers):
            before = self.stamp()
            self.read_into(buffer[: layer.nbytes], layer.offset)
            self.check(index, buffer[: layer.nbytes], before)
        for unit in self.layout.mapped:
            self._integrity.check_mapped(self.layout.mapped_index(unit.tensors[0][0].name))

    def close(self) -> None:
        """Close the file and give up the lock. Idempotent."""
        self._file.close()

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _checked(
    manifest: Manifest | None, file: BlockFile, layout: SpillLayout, identity: str
) -> tuple[str, ...]:
    """The digests of a manifest that fits layout, identity and the file's size."""
    if manifest is None:
        raise SpillDamagedError(
            f"{file.path} has no manifest: its writing was not finished; load the model again"
        )
    if reason := manifest.mismatch(layout, identity):
        raise SpillDamagedError(f"{file.path} is another spill: {reason}; load the model again")
    if file.size != layout.total_bytes:
        whole = sum(unit.offset + unit.nbytes <= file.size for unit in layout.units)
        raise SpillDamagedError(
            f"{file.path} has {file.size} bytes instead of {layout.total_bytes} (layers from "
            f"{whole} on are damaged); load the model again"
        )
    return manifest.digests
