"""Memory groups: on hand-made files of both cgroup versions, and on this machine's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_subspec.tools import cgroup
from vllm_subspec.tools.cgroup import NoMemoryGroup, memory_group

V1_FILES = {
    "memory.limit_in_bytes": "",
    "memory.memsw.limit_in_bytes": "",
    "memory.max_usage_in_bytes": "4096\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
}
V2_FILES = {
    "memory.max": "",
    "memory.swap.max": "",
    "memory.peak": "8192\n",
    "memory.events": "low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n",
}


class Kernel:
    """Makes the files of a new group appear, as the kernel does, and remembers what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
        self.seen: dict[str, str] = {}
        mkdir, rmdir = Path.mkdir, Path.rmdir

        def make(path: Path, *args: object, **kwargs: object) -> None:
            mkdir(path)
            for name, text in files.items():
                (path / name).write_text(text)

        def remove(path: Path) -> None:
            for file in path.iterdir():
                self.seen[file.name] = file.read_text()
                file.unlink()
            rmdir(path)

        monkeypatch.setattr(cgroup.Path, "mkdir", make)
        monkeypatch.setattr(cgroup.Path, "rmdir", remove)


def process(tmp_path: Path, groups: str, mounts: list[tuple[str, Path, str, str]]) -> Path:
    """A /proc/self of which only the two files exist that tell the groups."""
    proc, mount_points = tmp_path / "proc", [mount for _, mount, _, _ in mounts]
    for directory in (proc, *mount_points):
        os.makedirs(directory, exist_ok=True)
    (proc / "cgroup").write_text(groups)
    lines = [
        f"30 25 0:26 {root} {mount} rw,nosuid shared:9 - {kind} cgroup rw,{options}\n"
        for root, mount, kind, options in mounts
    ]
    (proc / "mountinfo").write_text("".join(lines))
    return proc


def test_cgroup_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "memory"
    own = mount / "user"
    proc = process(
        tmp_path,
        "9:cpu,cpuacct:/\n4:memory:/user\n0::/\n",
        [("/", tmp_path / "unified", "cgroup2", "x"), ("/", mount, "cgroup", "memory")],
    )
    own.mkdir()
    kernel = Kernel(monkeypatch, V1_FILES)
    with memory_group(1 << 30, proc) as group:
        assert group.path.parent == own
        assert (group.peak_bytes(), group.kills(), group.limit_bytes) == (4096, 2, 1 << 30)
        assert group.procs == group.path / "cgroup.procs"
    assert kernel.seen["memory.limit_in_bytes"] == str(1 << 30)
    assert kernel.seen["memory.memsw.limit_in_bytes"] == str(1 << 30)
    assert list(own.iterdir()) == []


def test_cgroup_v2_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = tmp_path / "cgroup"
    proc = process(tmp_path, "0::/box/7\n", [("/box/7", mount, "cgroup2", "nsdelegate")])
    kernel = Kernel(monkeypatch, V2_FILES)
    with memory_group(5 << 20, proc) as group:
        assert group.path.parent == mount
        assert (group.peak_bytes(), group.kills()) == (8192, 1)
    assert (kernel.seen["memory.max"], kernel.seen["memory.swap.max"]) == (str(5 << 20), "0")


def test_v2_without_the_controller_is_no_silent_success(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    proc = process(tmp_path, "0::/\n", [("/", mount, "cgroup2", "x")])
    with pytest.raises(NoMemoryGroup, match="takes no memory limit"), memory_group(1 << 30, proc):
        raise AssertionError("an unlimited group must not be handed out")
    assert list(mount.iterdir()) == []


def test_no_controller_and_no_right(tmp_path: Path) -> None:
    proc = process(tmp_path, "3:cpu:/\n", [("/", tmp_path / "cpu", "cgroup", "cpu")])
    with pytest.raises(NoMemoryGroup, match="no memory controller"), memory_group(1, proc):
        pass
    proc = process(tmp_path, "0::/gone\n", [("/", tmp_path / "cgroup", "cgroup2", "x")])
    with pytest.raises(NoMemoryGroup, match="No such file"), memory_group(1, proc):
        pass
