"""The doctor's verdicts, on machines made up for it and on a real disk."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_subspec.errors import SpillError
from vllm_subspec.integration import diagnosis
from vllm_subspec.tools import doctor
from vllm_subspec.tools.cli import app
from vllm_subspec.tools.doctor import Check, link_bytes_per_s, render, stops, to_json

FAST = 2e9


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "link_bytes_per_s", lambda folder: FAST)
    monkeypatch.setattr(doctor, "PROBE_LAYER_BYTES", 4096)
    monkeypatch.setattr("vllm_subspec.shadow.kernel_status", lambda: "native, AVX-512 VNNI")


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_as_the_command_tells_it(tmp_path: Path) -> None:
    told = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--json", str(told)])
    assert result.exit_code == 0, result.output
    checks = {check["name"]: check for check in json.loads(told.read_text())["checks"]}
    assert json.loads(told.read_text())["works"]
    assert checks["link"]["figure"] == FAST
    assert checks["vLLM"]["found"].endswith("seams")
    assert checks["plugin"]["verdict"] == "ok"
    assert checks["memory"]["figure"] > 1 << 28
    for name in checks:
        assert f"| {name} |" in result.output


def test_the_probe_reads_what_it_wrote_and_leaves_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    speed = link_bytes_per_s(tmp_path, num_layers=3, layer_bytes=8192)
    assert 1e3 < speed < 1e12
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    [spill] = doctor._disk(open_to_all)
    assert (spill.verdict, "chmod go-w" in spill.advice) == ("stops", True)

    def fail(folder: Path) -> float:
        raise SpillError("the disk is gone")

    monkeypatch.setattr(doctor, "link_bytes_per_s", fail)
    space, link = doctor._disk(tmp_path / "new")
    assert (space.verdict, link.verdict, link.advice) == ("ok", "stops", "the disk is gone")
    usage = SimpleNamespace(total=1, used=1, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    [spill] = doctor._disk(tmp_path / "new")
    assert (spill.verdict, "stream_dir" in spill.advice) == ("stops", True)


def test_a_slow_link_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "link_bytes_per_s", lambda folder: 1e8)
    link = by_name(doctor._disk(tmp_path / "new"))["link"]
    assert (link.verdict, link.found[:9], link.figure) == ("slow", "0.10 GB/s", 1e8)
    assert not stops([link])


def test_threads_and_preloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(diagnosis, "reserved_cores", lambda: None)
    found = by_name(list(doctor._threads()))
    assert found["threads"].verdict == "slow"
    assert "OMP_NUM_THREADS" in found["threads"].advice
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU=0" in found["reserved cores"].advice
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(diagnosis, "reserved_cores", lambda: 0)
    found = by_name(list(doctor._threads()))
    assert (found["threads"].verdict, found["reserved cores"].verdict) == ("ok", "ok")


def test_a_missing_kernel_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    status = "torch's own (4 and 8 bits): no C++ compiler is on PATH"
    monkeypatch.setattr("vllm_subspec.shadow.kernel_status", lambda: status)
    kernel = doctor._kernel()
    assert (kernel.verdict, kernel.found) == ("slow", status)


def test_vllm_that_would_refuse_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    vllm = by_name(list(doctor._software()))["vLLM"]
    assert vllm.verdict == "stops"
    assert "outside the tested range" in vllm.advice


def test_a_plugin_that_vllm_would_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves 'subspec' out" in str(diagnosis.plugin_problem())
    monkeypatch.delenv("VLLM_PLUGINS")
    assert diagnosis.plugin_problem() is None
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: [])
    assert "no entry point 'subspec'" in str(diagnosis.plugin_problem())


def test_a_model_that_would_be_refused(tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
    logging.disable(logging.NOTSET)
    assert result.exit_code == 1
    assert "| model | stops |" in result.output


def test_table_and_json() -> None:
    checks = [Check("a", "found"), Check("b", "there", "stops", "mend it")]
    assert render(checks).splitlines()[2:] == [
        "| a | ok | found |",
        "| b | stops | there: mend it |",
    ]
    assert not to_json(checks)["works"]
    assert to_json(checks[:1])["works"]
