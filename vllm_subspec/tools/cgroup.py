"""A memory limit that the kernel enforces on a process and its children: one control group."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_subspec.errors import SubSpecError

_EMPTY_S = 10.0
_POLL_S = 0.05


class NoMemoryGroup(SubSpecError, RuntimeError):
    """This machine lets us make no memory group; the message says why."""


@dataclass(frozen=True)
class _Files:
    """Names of the files of one cgroup version."""

    limit: str
    swap: str
    swap_value: str | None  # None: the limit itself, since v1 counts memory and swap together
    peak: str
    events: str


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    None,
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
_V2 = _Files("memory.max", "memory.swap.max", "0", "memory.peak", "memory.events")


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory limit.

    Page cache of its processes counts too, but the kernel drops it before it kills anybody.

    Attributes:
        path: its directory; a process joins by writing 0 to ``procs``.
        limit_bytes: what the kernel enforces, swap excluded.
    """

    path: Path
    limit_bytes: int
    _files: _Files

    @property
    def procs(self) -> Path:
        """The file that takes the ids of processes that join."""
        return self.path / "cgroup.procs"

    def peak_bytes(self) -> int:
        """The most that was ever charged, page cache included; never above the limit."""
        return int((self.path / self._files.peak).read_text())

    def kills(self) -> int:
        """How many processes the kernel killed for the limit."""
        lines = (self.path / self._files.events).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])


@contextmanager
def memory_group(limit_bytes: int, proc: Path = Path("/proc/self")) -> Iterator[MemoryGroup]:
    """A new group inside this process's own one (so its limits hold too), removed at the end.

    Every process in it must have ended by then.

    Args:
        limit_bytes: of all its processes together; rounded down to whole pages by the kernel.
        proc: where this process's ``cgroup`` and ``mountinfo`` are.

    Raises:
        NoMemoryGroup: no memory controller, no right to make groups, or (cgroup v2) the controller
            is not passed on to groups below this process's.
    """
    parent, files = _own_group(proc)
    path = parent / f"subspec-{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.mkdir()
    except OSError as error:
        raise NoMemoryGroup(f"no memory group can be made in {parent}: {error.strerror}") from error
    try:
        yield _limited(path, files, limit_bytes)
    finally:
        _remove(path)


def _limited(path: Path, files: _Files, limit_bytes: int) -> MemoryGroup:
    try:
        _write(path / files.limit, str(limit_bytes))
        if (path / files.swap).exists():  # absent where the kernel does not account swap
            _write(path / files.swap, files.swap_value or str(limit_bytes))
    except OSError as error:
        raise NoMemoryGroup(f"{path} takes no memory limit: {error.strerror}") from error
    return MemoryGroup(path, limit_bytes, files)


def _write(path: Path, text: str) -> None:
    # Not `write_text`, which would make a file where the controller offers none.
    with open(os.open(path, os.O_WRONLY), "w") as file:
        file.write(text)


def _own_group(proc: Path) -> tuple[Path, _Files]:
    """Directory of this process's memory group, and its version's file names."""
    groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    paths = {controllers: path for _, controllers, path in groups}
    for mount, root, kind, options in _mounts(proc):
        if kind == "cgroup" and "memory" in options:
            named = next(
                (path for names, path in paths.items() if "memory" in names.split(",")), None
            )
            if named is not None:
                return _below(mount, root, named), _V1
    for mount, root, kind, _ in _mounts(proc):
        if kind == "cgroup2" and "" in paths:
            return _below(mount, root, paths[""]), _V2
    raise NoMemoryGroup("no memory controller is mounted here")


def _mounts(proc: Path) -> Iterator[tuple[Path, str, str, list[str]]]:
    """Mount point, root, type and super options of each mount (proc(5), mountinfo)."""
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        yield Path(mount), root, kind, options.split(",")


def _below(mount: Path, root: str, path: str) -> Path:
    """``path`` as seen through a mount of the subtree ``root``; in a container often the mount."""
    group = Path(path)
    return mount / group.relative_to(root) if group.is_relative_to(root) else mount


def _remove(path: Path) -> None:
    """A group of processes that were just killed stays busy for a moment."""
    deadline = time.monotonic() + _EMPTY_S
    while True:
        try:
            return path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
