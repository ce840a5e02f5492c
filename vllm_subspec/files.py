"""Files that hold weights: private directories, atomic replacement, content digests."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from subspec_kernels.temporary import temporary_directory

OTHERS_WRITE = 0o022
OTHERS_ALL = 0o077
MOST_TEXT_BYTES = 64 << 20
"""Of manifests and figures; those of the largest models take a few MB."""


def tensor_digest(*tensors: torch.Tensor) -> str:
    """BLAKE3 hex digest of the tensors' bytes, in order.

    Args:
        tensors: CPU tensors of any dtype; a non-contiguous one is copied first.
    """
    from blake3 import blake3  # here, so that streaming from RAM needs torch alone

    hasher = blake3(max_threads=blake3.AUTO)
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        hasher.update(data)
    return str(hasher.hexdigest())


def private_directory(path: Path) -> Path:
    """Create ``path``, and its parents, with mode 0700 where they are missing; return it resolved.

    Raises:
        OSError: it cannot be created.
        FileExistsError: it is no directory.
        PermissionError: it exists, but is a symlink, another user's, or others may write to it
            (and so replace what lies in it).
    """
    # Path.mkdir would leave the parents' modes to the umask, and refuse them at the next start.
    for missing in reversed([p for p in path.absolute().parents if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise PermissionError(f"{path} is a symbolic link; name the directory that it leads to")
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user id {info.st_uid}, not to this process's")
    if info.st_mode & OTHERS_WRITE:
        raise PermissionError(
            f"others may write to {path} ({stat.filemode(info.st_mode)}); run `chmod go-w` on it, "
            f"or name a directory inside it that does not exist yet"
        )
    return path.resolve()


def open_private(path: Path, flags: int = os.O_RDONLY, *, closed_to: int = OTHERS_WRITE) -> int:
    """A descriptor of a plain file that only this user can have written.

    Args:
        path: never a symlink; a pipe or a device is refused without waiting for it.
        flags: ``os.O_*``; a file that ``O_CREAT`` makes has mode 0600.
        closed_to: mode bits that must not be set.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it is another user's, others may write to it, or it is no plain file.
        OSError: it cannot be opened, or is a symlink.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    info = os.fstat(handle)
    private = info.st_uid == os.geteuid() and not info.st_mode & closed_to
    if not stat.S_ISREG(info.st_mode) or not private:
        os.close(handle)
        raise PermissionError(
            errno.EPERM,
            f"{path.name} must be a plain file of this user with mode 0600, but is "
            f"{stat.filemode(info.st_mode)} of user id {info.st_uid}; remove it",
            str(path),
        )
    return handle


def read_private(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The text of a file as ``open_private`` opens it; what is no UTF-8 becomes U+FFFD.

    Raises:
        ValueError: it holds more than ``most_bytes``; nothing was read.
        OSError: as for ``open_private``.
    """
    with open(open_private(path), encoding="utf-8", errors="replace") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it holds {size} bytes, more than {most_bytes}")
        return file.read(most_bytes)


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Let one process at a time into the block; the others wait for it, or for its death.

    Args:
        directory: whose lock is taken; no file is made.

    Raises:
        OSError: it cannot be opened, or its file system has no locks.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file; on success it is synced and renamed over ``path``. Mode 0600.

    On an exception it is removed and ``path`` stays as it was. What a killed process left of its
    own is removed by the next that writes beside it.
    """
    with temporary_directory(path.parent) as directory:
        temporary = directory / path.name
        temporary.touch(0o600, exist_ok=False)
        yield temporary
        temporary.chmod(0o600)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
