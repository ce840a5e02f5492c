"""The spill on disk: right bytes or a typed error, whatever lies there."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from vllm_subspec.errors import ConfigError, SpillDamagedError, SpillError
from vllm_subspec.stream import Spill, SpillLayout, SpillWriter, TensorSpec


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["", "org/model", "../m"])
def test_a_name_with_a_path_in_it_is_refused(case: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="plain file name"):
        SpillWriter(case.directory, name, case.layout, "a")


def test_round_trip_in_any_layer_order(case: Any) -> None:
    weights = case.weights(0)
    assert case.write(weights) == [True, True, True]
    with case.open() as spill:
        case.assert_holds(spill, weights)
        assert spill.path.stat().st_size == case.layout.total_bytes


def test_strided_parameters_are_written_by_value(case: Any) -> None:
    weights = case.weights(0)
    strided = [
        {n: Parameter(t.mT.contiguous().mT if t.ndim > 1 else t) for n, t in w.items()}
        for w in weights
    ]
    case.write(strided)
    with case.open() as spill:
        case.assert_holds(spill, weights)


def test_files_are_private(case: Any) -> None:
    case.write(case.weights(0))
    assert stat.S_IMODE(case.directory.stat().st_mode) == 0o700
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in case.directory.iterdir()}
    assert modes == {"m.spill": 0o600, "m.json": 0o600}


def test_same_weights_are_kept(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights = case.weights(0)
    case.write(weights)
    before = [(case.directory / n).stat().st_mtime_ns for n in ("m.spill", "m.json")]
    caplog.set_level(logging.INFO)
    assert case.write(weights, order=(0, 1, 2)) == [False, False, False]
    assert [(case.directory / n).stat().st_mtime_ns for n in ("m.spill", "m.json")] == before
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "3 layers reused, 0 written (none)"
    ]


def _remove_manifest(case: Any) -> None:
    case.manifest.unlink()


def _garble_manifest(case: Any) -> None:
    case.manifest.write_text("{]")


def _future_format(case: Any) -> None:
    manifest = json.loads(case.manifest.read_text())
    case.manifest.write_text(json.dumps({**manifest, "format": 99}))


def _wrong_digest(case: Any) -> None:
    manifest = json.loads(case.manifest.read_text())
    manifest["digests"][1] = "00" * 32
    case.manifest.write_text(json.dumps(manifest))


def _flip_in_layer_one(case: Any) -> None:
    flip_byte(case.spill, case.layout.layers[1].offset + 5)


def _truncate(case: Any) -> None:
    os.truncate(case.spill, case.layout.total_bytes - 1)


def _extend(case: Any) -> None:
    os.truncate(case.spill, case.layout.total_bytes + 4096)


@pytest.mark.parametrize(
    ("damage", "message", "written", "log"),
    [
        (_remove_manifest, "has no manifest", [], "3 layers reused, 0 written (none)"),
        (_garble_manifest, "no spill manifest of format 1", [], "3 layers reused"),
        (_future_format, "unknown format", [], "3 layers reused"),
        (_wrong_digest, "layer 1 .* is damaged", [], "3 layers reused"),
        (_flip_in_layer_one, r"layer 1 .* is damaged \(4096 bytes", [1], "1 written (1 damaged)"),
        (_truncate, r"has \d+ bytes instead of 49152", [2], "(1 damaged)"),
        (_extend, r"has \d+ bytes instead of 49152", [], "3 layers reused"),
    ],
)
def test_damage_is_found_and_mended_by_the_next_load(
    case: Any,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Any], None],
    message: str,
    written: list[int],
    log: str,
) -> None:
    weights = case.weights(0)
    case.write(weights)
    damage(case)
    with pytest.raises(SpillDamagedError, match=message):
        case.open()
    caplog.set_level(logging.INFO)
    assert case.write(weights, order=(0, 1, 2)) == [layer in written for layer in range(3)]
    assert log in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == (logging.WARNING if written else logging.INFO)
    with case.open() as spill:
        case.assert_holds(spill, weights)


def test_without_verify_only_the_manifest_is_checked(case: Any) -> None:
    case.write(case.weights(0))
    _flip_in_layer_one(case)
    case.open("a", verify=False).close()
    with pytest.raises(SpillDamagedError, match="'b'"):
        case.open("b", verify=False)


def test_other_weights_are_refused_and_replaced(
    case: Any, caplog: pytest.LogCaptureFixture
) -> None:
    case.write(case.weights(0))
    with pytest.raises(SpillDamagedError, match=r"'a', not 'b'"):
        case.open("b")
    other_layout = SpillLayout.of([*case.specs[:2], [TensorSpec("w", (65, 129), torch.float32)]])
    with pytest.raises(SpillDamagedError, match="layers, shapes or dtypes"):
        Spill.open(case.directory, "m", other_layout, "a")
    caplog.set_level(logging.INFO)
    assert case.write(case.weights(1), "b") == [True, True, True]
    assert "3 written (3 of other weights)" in caplog.text
    with case.open("b") as spill:
        case.assert_holds(spill, case.weights(1))


def test_changed_weights_under_an_old_identity_are_noticed(case: Any) -> None:
    weights = case.weights(0)
    case.write(weights)
    weights[1] = case.weights(1)[1]
    assert case.write(weights, order=(0, 1, 2)) == [False, True, False]
    with case.open() as spill:
        case.assert_holds(spill, weights)


def test_a_smaller_spill_replaces_a_larger_one(case: Any) -> None:
    case.write(case.weights(0))
    layout = SpillLayout.of(case.specs[:1])
    with SpillWriter(case.directory, "m", layout, "small") as writer:
        writer.put(0, case.weights(1)[0])
        writer.finish().close()
    Spill.open(case.directory, "m", layout, "small").close()


def test_finish_wants_every_layer(case: Any) -> None:
    weights = case.weights(0)
    with case.writer() as writer:
        writer.put(1, weights[1])
        with pytest.raises(SpillError, match=r"layers \[0, 2\] were never put"):
            writer.finish()
        writer.put(0, weights[0])
        writer.put(2, weights[2])
        writer.finish().close()
    case.open().close()


def test_a_load_that_stops_leaves_nothing(case: Any) -> None:
    with case.writer() as writer:
        writer.put(1, case.weights(0)[1])
        assert list(case.directory.iterdir()) == [case.spill]
    assert list(case.directory.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (0, {"w": torch.zeros(37, 61)}, r"weights \['w'\]"),
        (0, {"b": torch.zeros(1)}, r"weights \['b'\]"),
        (0, {"extra": torch.zeros(1)}, r"weights \['extra'\]"),
        (3, {}, "layer 3 is not among"),
        (-1, {}, "layer -1 is not among"),
    ],
    ids=["dtype", "shape", "name", "past-the-end", "negative"],
)
def test_put_wants_exactly_the_layout(
    case: Any, layer: int, change: dict[str, torch.Tensor], message: str
) -> None:
    tensors = {**case.weights(0)[0], **change}
    with (
        case.writer() as writer,
        pytest.raises(SpillError, match=message),
    ):
        writer.put(layer, tensors)


def test_a_missing_spill_is_an_error(case: Any) -> None:
    with pytest.raises(SpillError, match=r"m\.spill: No such file"):
        case.open()


@pytest.mark.parametrize("target", ["m.spill", "m.json"])
def test_symlinks_are_refused(case: Any, tmp_path: Path, target: str) -> None:
    case.write(case.weights(0))
    victim = tmp_path / "victim"
    (case.directory / target).rename(victim)
    (case.directory / target).symlink_to(victim)
    before = victim.read_bytes()
    for use in (case.open, case.writer):
        with pytest.raises(SpillError, match=r"symbolic links.*stream_dir"):
            use()
    assert victim.read_bytes() == before


def test_a_file_open_to_others_is_refused(case: Any) -> None:
    case.write(case.weights(0))
    case.spill.chmod(0o644)
    for use in (case.open, case.writer):
        with pytest.raises(SpillError, match=r"m\.spill must be .* mode 0600, but is -rw-r--r--"):
            use()


def test_a_manifest_that_another_could_have_written_is_refused(case: Any) -> None:
    case.write(case.weights(0))
    case.manifest.chmod(0o622)
    for use in (case.open, case.writer):
        with pytest.raises(SpillError, match=r"m\.json must be a plain file .* mode 0600"):
            use()


@pytest.mark.parametrize("target", ["m.spill", "m.json"])
def test_a_pipe_is_refused_without_waiting(case: Any, target: str) -> None:
    case.write(case.weights(0))
    (case.directory / target).unlink()
    os.mkfifo(case.directory / target, 0o600)
    for use in (case.open, case.writer):
        with pytest.raises(SpillError, match="plain file"):
            use()


def test_sizes_in_a_manifest_are_never_allocated(case: Any) -> None:
    """They are compared with what this process works out for itself."""
    case.write(case.weights(0))
    fields = json.loads(case.manifest.read_text())
    assert fields["layout"][0][0][1:2] == [[37, 61]]
    fields["layout"][0][0][1] = [1 << 30, 1 << 30]
    case.manifest.write_text(json.dumps(fields))
    with pytest.raises(SpillDamagedError, match="not this model's"):
        case.open()
    assert case.write(case.weights(0)) == [False, False, False]
    case.open().close()


def test_a_manifest_too_large_is_not_read(case: Any) -> None:
    case.write(case.weights(0))
    os.truncate(case.manifest, 1 << 40)
    with pytest.raises(SpillDamagedError, match=f"it holds {1 << 40} bytes"):
        case.open()
    assert case.write(case.weights(0)) == [False, False, False]
    case.open().close()


AS_NOBODY = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in sys.argv[1:]:
    try:
        open(path, "rb").close()
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_reads_nothing(case: Any) -> None:
    case.write(case.weights(0))
    case.directory.chmod(0o755)  # the worst that is accepted
    # From within: the test's own folder is closed to others too.
    done = subprocess.run(
        [sys.executable, "-I", "-c", AS_NOBODY, "m.spill", "m.json"],
        cwd=case.directory,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "refused\n" * 2


def test_directories_that_cannot_be_used(case: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    message = rf"needs {case.layout.total_bytes} bytes, \d+ are free there.*stream_dir"
    for case.directory in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link"):
        with pytest.raises(SpillError, match=message):
            case.writer()


@pytest.mark.parametrize(
    ("call", "action"), [("posix_fallocate", "create"), ("pwritev", "write"), ("fsync", "finish")]
)
def test_a_disk_that_fails_leaves_nothing(
    case: Any, monkeypatch: pytest.MonkeyPatch, call: str, action: str
) -> None:
    real = os.fsync

    def fail(descriptor: int, *_: object) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return real(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    message = rf"cannot {action} .* No space left .* {case.layout.total_bytes} bytes, .*stream_dir"
    with pytest.raises(SpillError, match=message):
        case.write(case.weights(0))
    assert list(case.directory.iterdir()) == []


def test_without_o_direct_it_works_and_warns_once(
    case: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    weights = case.weights(0)
    with case.writer() as writer:
        for layer in range(3):
            writer.put(layer, weights[layer])
        spill = writer.finish()
    with spill:
        assert not spill.is_direct
        case.assert_holds(spill, weights)
        spill.verify()
    assert [r.message.count("no O_DIRECT") for r in caplog.records] == [1]
