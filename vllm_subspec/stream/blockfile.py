"""One private, locked file read and written in aligned blocks, past the page cache if possible."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from pathlib import Path

import torch

from vllm_subspec.files import OTHERS_ALL, open_private

logger = logging.getLogger(__name__)

IO_BYTES = 8 << 20
"""Bytes of one system call; far below Linux's limit of 2 GiB, far above its per-call cost."""


def aligned_buffer(nbytes: int) -> torch.Tensor:
    """A zeroed, page-aligned uint8 [nbytes] CPU tensor that O_DIRECT can read into.

    Raises:
        OSError: the machine refuses that much memory.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def split(buffer: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Cut a uint8 [n] buffer into views of ``nbytes``; the last one may be shorter."""
    return [buffer[start : start + nbytes] for start in range(0, len(buffer), nbytes)]


class BlockFile:
    """An open file; every method raises plain ``OSError``, which the caller puts into words.

    Args:
        path: the file; never a symlink.
        create: make it (mode 0600) where it is missing, and open it for writing too.

    Raises:
        OSError: it cannot be opened.
        PermissionError: it is no plain file of this user that is closed to all others.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        access = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self.path = path
        self.direct = False
        self._fd = open_private(path, access, closed_to=OTHERS_ALL)

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._fd).st_size

    @property
    def is_linked(self) -> bool:
        """False once the file was removed from its directory."""
        return os.fstat(self._fd).st_nlink > 0

    def stamp(self) -> tuple[int, int]:
        """Size and change time (ns) of the file.

        Whatever changes its bytes through the file system changes one of them. So do removal,
        renaming and chmod; nobody can set a change time back.
        """
        info = os.fstat(self._fd)
        return info.st_size, info.st_ctime_ns

    def map(self, offset: int, nbytes: int, advice: int) -> torch.Tensor:
        """``nbytes`` from byte ``offset`` as a uint8 tensor over the page cache.

        The mapping is private: writing to it changes a copy. It and, through a second descriptor,
        the lock live as long as the tensor or a view of it does.

        Args:
            offset: where it begins; any byte.
            nbytes: at least 1, and all within the file (else touching it kills the process).
            advice: ``mmap.MADV_*``, how it will be read.
        """
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            self._fd, skipped + nbytes, access=mmap.ACCESS_COPY, offset=offset - skipped
        )
        mapping.madvise(advice)
        return torch.frombuffer(mapping, dtype=torch.uint8)[skipped:]

    def lock(self, *, exclusive: bool) -> bool:
        """Take, or change to, a shared or exclusive flock; False if others' locks forbid it.

        A change is not atomic: another process may have held the file in between.
        """
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def allocate(self, nbytes: int) -> None:
        """Make the file exactly ``nbytes`` long with its disk space reserved; bytes are kept."""
        if self.size > nbytes:
            os.ftruncate(self._fd, nbytes)
        os.posix_fallocate(self._fd, 0, nbytes)

    def use_direct(self) -> None:
        """Switch to O_DIRECT; warns and stays with the page cache where the disk refuses it.

        It is not set at open, since posix_fallocate may be emulated by one-byte writes.
        """
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            logger.warning(
                "the filesystem of %s has no O_DIRECT: reads go through the page cache, which "
                "costs CPU time and memory; set stream_dir to a local disk",
                self.path,
            )
        else:
            self.direct = True

    def read_into(self, buffer: torch.Tensor, offset: int) -> None:
        """Fill ``buffer`` (aligned uint8, a multiple of ALIGNMENT long) from byte ``offset``.

        The error of a file that ends early is ENODATA.
        """
        for part in split(buffer, IO_BYTES):
            count = os.preadv(self._fd, [part.numpy().data], offset)
            if count != len(part):
                # A regular file reads short only at its end, or right before an error.
                end = self.size
                if offset + len(part) > end:
                    raise OSError(errno.ENODATA, f"the file ends at byte {end}")
                raise OSError(errno.EIO, f"short read: {count} of {len(part)} bytes")
            if not self.direct:
                os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
            offset += count

    def write_from(self, buffer: torch.Tensor, offset: int) -> None:
        """Write ``buffer`` (aligned uint8, a multiple of ALIGNMENT long) at byte ``offset``."""
        data = buffer.numpy().data
        start = 0
        while start < len(data):
            start += os.pwritev(self._fd, [data[start : start + IO_BYTES]], offset + start)

    def sync(self) -> None:
        """Return when every written byte is on the disk; buffered pages are dropped then."""
        os.fsync(self._fd)
        if not self.direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file and give up its lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
