"""Files that hold weights: private directories, atomic replacement, content digests."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


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
    """Create ``path`` (mode 0700) where it is missing and return it resolved.

    Raises:
        OSError: it cannot be created.
        FileExistsError: it is no directory.
        PermissionError: it exists, but is a symlink, another user's, or others may write to it
            (and so replace what lies in it).
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise PermissionError(f"{path} is a symbolic link; name the directory that it leads to")
    if info.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user id {info.st_uid}, not to this process's")
    if info.st_mode & 0o022:
        raise PermissionError(
            f"others may write to {path} ({stat.filemode(info.st_mode)}); run `chmod go-w` on it, "
            f"or name a directory inside it that does not exist yet"
        )
    return path.resolve()


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it is synced and renamed over ``path``.

    On an exception the temporary file is removed and ``path`` stays as it was. Mode 0600.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o600)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
