"""Temporary directories that do not outlive their maker for long, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = ".subspec-"
_LOCK = "lock"


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """Yield a new private directory (0700) in ``parent``, and remove it with all that it holds.

    A process that is killed cannot tidy up: the next one to come here does it. What is alive is
    told by a lock on a file inside (a process id would say nothing of another machine, or of
    another container, on the same disk).

    Raises:
        OSError: it cannot be made.
    """
    _remove_orphans(parent)
    directory, lock = _make(parent)
    try:
        yield directory
    finally:
        with suppress(FileNotFoundError):  # once emptied, it may be taken for an orphan
            shutil.rmtree(directory)
        os.close(lock)


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # taken for an orphan before it was locked
            lock = _lock(directory, os.O_CREAT)
            if lock is not None:
                return directory, lock


def _remove_orphans(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _lock(directory)
        except FileNotFoundError:  # its maker was killed before or after all else that it did
            with suppress(OSError):  # or lives, and has not come to remove the rest
                directory.rmdir()
            continue
        if lock is not None:
            # A compiler that outlived its caller may still write there: the rest goes next time.
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path, create: int = 0) -> int | None:
    """The descriptor of the directory's lock; ``None`` if another process holds it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(directory / _LOCK, flags | create, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink > 0:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
