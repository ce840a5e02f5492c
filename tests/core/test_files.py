"""Private directories, whole replacement, digests."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.temporary import temporary_directory

from vllm_subspec.files import (
    OTHERS_ALL,
    alone,
    atomic_replace,
    open_private,
    private_directory,
    read_private,
    tensor_digest,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- private_directory -----------------------------------------------------------------------------


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        made = private_directory(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(umask)
    assert made == tmp_path.resolve() / "a" / "b" / "c"
    assert private_directory(made) == made
    for one in (made, made.parent, made.parent.parent):  # each may be asked for on its own
        assert mode(one) == 0o700
        assert private_directory(one) == one


def test_a_relative_path_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert private_directory(Path("x")) == tmp_path.resolve() / "x"


@pytest.mark.parametrize("allowed", [0o700, 0o750, 0o755, 0o711])
def test_an_existing_directory_of_this_user_is_left_as_it_is(tmp_path: Path, allowed: int) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(allowed)
    private_directory(there)
    assert mode(there) == allowed


@pytest.mark.parametrize("allowed", [0o777, 0o775, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, allowed: int) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(allowed)
    with pytest.raises(PermissionError, match="others may write to") as refused:
        private_directory(there)
    assert "chmod go-w" in str(refused.value)
    assert stat.filemode(there.stat().st_mode) in str(refused.value)
    assert mode(there) == allowed
    private_directory(there / "inside")


def test_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="symbolic link; name the directory"):
        private_directory(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        private_directory(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        private_directory(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        private_directory(tmp_path / "file" / "below")


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"belongs to user id {owner}"):
        private_directory(tmp_path)


# -- open_private and read_private -----------------------------------------------------------------


def private_file(path: Path, data: bytes = b"text") -> Path:
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_a_private_file_is_read(tmp_path: Path) -> None:
    assert read_private(private_file(tmp_path / "a", "naïve".encode())) == "naïve"
    assert read_private(private_file(tmp_path / "b", b"\xff!")) == "\ufffd!"


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "a")


def test_a_file_that_is_made_is_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        os.close(open_private(tmp_path / "a", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(umask)
    assert mode(tmp_path / "a") == 0o600


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    private_file(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        read_private(tmp_path / "link")


def test_what_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)  # to open it for reading would wait for a writer
    (tmp_path / "directory").mkdir(mode=0o700)
    for name in ("pipe", "directory"):
        with pytest.raises(PermissionError, match="plain file"):
            read_private(tmp_path / name)


@pytest.mark.parametrize("allowed", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, allowed: int) -> None:
    private_file(tmp_path / "a").chmod(allowed)
    with pytest.raises(
        PermissionError, match=f"mode 0600, but is {stat.filemode(0o100000 | allowed)}"
    ):
        read_private(tmp_path / "a")


def test_a_file_that_others_may_read_is_a_matter_of_the_caller(tmp_path: Path) -> None:
    private_file(tmp_path / "a").chmod(0o644)
    assert read_private(tmp_path / "a") == "text"
    with pytest.raises(PermissionError, match="mode 0600"):
        open_private(tmp_path / "a", closed_to=OTHERS_ALL)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_file(tmp_path / "a")
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=f"of user id {owner}"):
        read_private(tmp_path / "a")


def test_nothing_of_a_file_too_large_is_read(tmp_path: Path) -> None:
    private_file(tmp_path / "a")
    os.truncate(tmp_path / "a", 1 << 40)
    with pytest.raises(ValueError, match=f"it holds {1 << 40} bytes"):
        read_private(tmp_path / "a")


def test_a_refused_file_is_closed_again(tmp_path: Path) -> None:
    private_file(tmp_path / "a").chmod(0o666)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(PermissionError):
        open_private(tmp_path / "a")
    assert os.listdir("/proc/self/fd") == before


# -- alone -----------------------------------------------------------------------------------------


def test_one_at_a_time_is_let_in(tmp_path: Path) -> None:
    inside = []

    def enter(index: int) -> None:
        with alone(tmp_path):
            inside.append(index)
            time.sleep(0.01)
            inside.append(index)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(8)))
    assert inside[::2] == inside[1::2]
    assert sorted(inside[::2]) == list(range(8))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_lets_the_next_one_in(tmp_path: Path) -> None:
    with pytest.raises(KeyError), alone(tmp_path):
        raise KeyError
    with alone(tmp_path):
        pass


# -- atomic_replace --------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o644)
    with atomic_replace(path) as temporary:
        assert temporary.parent.parent == tmp_path
        assert mode(temporary.parent) == 0o700
        assert mode(temporary) == 0o600
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", ["old", None])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_on_an_exception_all_stays(
    tmp_path: Path, before: str | None, error: type[BaseException]
) -> None:
    path = tmp_path / "a"
    if before is not None:
        path.write_text(before)

    def interrupted() -> None:
        with atomic_replace(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([before] if before else [])


def test_a_writer_that_replaced_the_temporary_file_itself_is_served(tmp_path: Path) -> None:
    """Some libraries write by a rename of their own, with a mode of their own."""
    path = tmp_path / "a"
    with atomic_replace(path) as temporary:
        other = tmp_path / "b"
        other.write_text("new")
        other.chmod(0o644)
        other.replace(temporary)
    assert path.read_text() == "new"
    assert mode(path) == 0o600


def test_two_writers_never_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic_replace(path) as first, atomic_replace(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the last to finish
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="a"), atomic_replace(tmp_path / "a") as temporary:
        temporary.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# -- temporary_directory ---------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from subspec_kernels.temporary import temporary_directory
with temporary_directory(Path(sys.argv[1])) as directory:
    (directory / "half").write_bytes(b"x" * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, tmp_path]).returncode == -9
        assert len(list(tmp_path.glob("*/half"))) == 1
    (tmp_path / ".subspec-killed-before-its-lock").mkdir()
    (tmp_path / ".another.tmp").touch()
    path = tmp_path / "a"
    with atomic_replace(path) as temporary:
        temporary.write_text("new")
        assert {p.name for p in tmp_path.iterdir()} == {".another.tmp", temporary.parent.name}
    assert {p.name for p in tmp_path.iterdir()} == {".another.tmp", "a"}


def test_living_temporary_directories_are_left_alone(tmp_path: Path) -> None:
    def use(index: int) -> None:
        for turn in range(50):
            with temporary_directory(tmp_path) as directory:
                (directory / "mine").write_text(f"{index} {turn}")
                assert (directory / "mine").read_text() == f"{index} {turn}"
                assert mode(directory) == 0o700

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert list(tmp_path.iterdir()) == []


# -- tensor_digest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_a_digest_is_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).view(3, 4, 5).to(dtype)
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.clone())
    assert digest == tensor_digest(tensor.transpose(0, 2).contiguous().transpose(0, 2))
    assert digest != tensor_digest(tensor.transpose(0, 2))
    changed = tensor.clone()
    changed[2, 3, 4] += 1
    assert digest != tensor_digest(changed)
    assert digest == tensor_digest(tensor[:1], tensor[1:])
    assert digest != tensor_digest(tensor[1:], tensor[:1])


def test_a_digest_is_blake3() -> None:
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert tensor_digest() == tensor_digest(torch.empty(0)) == empty


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.data())
def test_one_flipped_bit_changes_it(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.uint8)
    place = data.draw(st.integers(0, len(values) - 1))
    flipped = tensor.clone()
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(tensor) != tensor_digest(flipped)
