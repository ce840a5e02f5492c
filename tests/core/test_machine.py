"""Figures of the machine: what is measured, and when it is measured anew."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_subspec import machine
from vllm_subspec.errors import ConfigError, SpillError
from vllm_subspec.plan.machine import DEFAULT, MachineFigures
from vllm_subspec.shadow import probe
from vllm_subspec.stream.probe import link_bytes_per_s, streaming

OUT, IN = 4096, 2048


class Measuring:
    """Stands in for the measurement and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, directory: Path, dtype: torch.dtype) -> MachineFigures:
        self.count += 1
        return replace(DEFAULT, link_bytes_per_s=1e9 + self.count)


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "kernel_status", lambda: "native")
    stub = Measuring()
    monkeypatch.setattr(machine, "measure_machine", stub)
    return stub


def test_a_machine_is_measured_once(tmp_path: Path, measuring: Measuring) -> None:
    first = machine.load_or_measure(tmp_path / "spill", torch.bfloat16)
    assert first.link_bytes_per_s == 1e9 + 1
    assert machine.load_or_measure(tmp_path / "spill", torch.bfloat16) == first
    assert measuring.count == 1


def test_of_replicas_that_start_together_one_measures(
    tmp_path: Path, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def start(_: int) -> MachineFigures:
        both.wait(timeout=30)
        return machine.load_or_measure(tmp_path / "spill", torch.bfloat16)

    def measure(directory: Path, dtype: torch.dtype) -> MachineFigures:
        time.sleep(0.1)
        return measuring(directory, dtype)

    monkeypatch.setattr(machine, "measure_machine", measure)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert first == second
    assert measuring.count == 1


def test_figures_that_another_could_have_written_are_not_taken(
    tmp_path: Path, measuring: Measuring
) -> None:
    machine.load_or_measure(tmp_path, torch.bfloat16)
    (path,) = (tmp_path / "cache").glob("machine-*.json")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=rf"{path} .*mode 0600.* delete it"):
        machine.load_or_measure(tmp_path, torch.bfloat16)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{path} .*symbolic links.* delete it"):
        machine.load_or_measure(tmp_path, torch.bfloat16)
    assert measuring.count == 1


def test_measured_anew_replaces_what_is_cached(tmp_path: Path, measuring: Measuring) -> None:
    first = machine.load_or_measure(tmp_path / "spill", torch.bfloat16)
    anew = machine.measure_anew(tmp_path / "spill", torch.bfloat16)
    assert measuring.count == 2
    assert anew != first
    assert machine.load_or_measure(tmp_path / "spill", torch.bfloat16) == anew
    assert measuring.count == 2


def test_another_dtype_or_thread_count_or_kernel_is_measured_anew(
    tmp_path: Path, measuring: Measuring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured() -> int:
        machine.load_or_measure(tmp_path, torch.bfloat16)
        return measuring.count

    assert measured() == 1
    machine.load_or_measure(tmp_path, torch.float32)
    assert measuring.count == 2
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert measured() == 3
    monkeypatch.setattr(machine, "kernel_status", lambda: "torch's own")
    assert measured() == 4
    monkeypatch.setattr(machine, "_processor", lambda: "another")
    assert measured() == 5
    assert measured() == 5


def test_damaged_figures_are_named(tmp_path: Path, measuring: Measuring) -> None:
    machine.load_or_measure(tmp_path, torch.bfloat16)
    (path,) = (tmp_path / "cache").glob("machine-*.json")
    for text in ("{", "{}", path.read_text().replace("link", "lynk")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{path} is damaged .*: delete it"):
            machine.load_or_measure(tmp_path, torch.bfloat16)
    assert measuring.count == 1


def test_each_figure_is_what_its_probe_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "draft_rates", lambda: probe.DraftRates(2e10, 3e11))
    monkeypatch.setattr(machine, "call_s", lambda: 1e-6)
    link_is_busy = []

    @contextmanager
    def streaming(folder: Path) -> Iterator[float]:
        link_is_busy.append(True)
        yield 5e9
        link_is_busy.clear()

    monkeypatch.setattr(machine, "streaming", streaming)
    monkeypatch.setattr(machine, "target_flops_per_s", lambda dtype: 4e11 * len(link_is_busy))
    found = machine.measure_machine(tmp_path, torch.bfloat16)
    assert found == MachineFigures(
        link_bytes_per_s=5e9,
        draft_bytes_per_s=2e10,
        target_flops_per_s=4e11,
        step_overhead_s_per_layer=machine.STEP_OVERHEAD_CALLS_PER_LAYER * 1e-6,
        pass_overhead_s_per_layer=machine.PASS_OVERHEAD_CALLS_PER_LAYER * 1e-6,
        draft_flops_per_s=3e11,
    )


def test_compute_rates_are_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(probe, "perf_counter", lambda: float(next(ticks)))  # each pass takes 1 s
    rates = probe.draft_rates(weight_bytes=1)  # one linear
    low, high = OUT * IN / 2, OUT * IN * 0.6  # 4 bits, and scales
    assert low < rates.bytes_per_s < high
    assert rates.flops_per_s == 2 * OUT * IN * 16
    assert probe.target_flops_per_s(torch.float32, weight_bytes=1) == 2 * OUT * IN * 33


def test_a_time_is_the_least_of_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs adds to the others."""
    took = iter([9.0, 3.0, 2.0, 5.0, 4.0, 8.0, 7.0])
    now = [0.0]

    def clock() -> float:
        return now[0]

    def linear(x: torch.Tensor) -> torch.Tensor:
        now[0] += next(took)
        return x

    monkeypatch.setattr(probe, "perf_counter", clock)
    assert probe._seconds_per_linear([linear], torch.ones(1)) == 2.0


def test_a_call_without_work_is_short() -> None:
    assert 0 < probe.call_s() < 1e-2


def test_weights_of_the_probe_fill_what_was_asked_for() -> None:
    one = OUT * IN // 2
    assert len(probe._shadows(one * 3)) == 3
    assert len(probe._plain_linears(torch.bfloat16, one * 12)) == 3


def test_the_link_is_measured_on_its_disk_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir(mode=0o700)
    assert link_bytes_per_s(folder, num_layers=3, layer_bytes=8192) > 0
    assert os.listdir(folder) == []


def test_the_link_stays_busy_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = threading.Semaphore(0)

    def count(*_: object) -> float:
        passes.release()
        return 7.0

    monkeypatch.setattr("vllm_subspec.stream.probe._read_all", count)
    with streaming(tmp_path, num_layers=2, layer_bytes=8192) as speed:
        assert speed == 7.0
        assert all(passes.acquire(timeout=5) for _ in range(3 + 2))  # three measure
    assert os.listdir(tmp_path) == []
    assert [t for t in threading.enumerate() if t.name.startswith("subspec")] == []


def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("vllm_subspec.stream.spill.Spill.read_into", fail)
    monkeypatch.setattr("vllm_subspec.stream.disk.RETRY_WAITS_S", ())
    with pytest.raises(SpillError, match="Input/output"):
        link_bytes_per_s(tmp_path, num_layers=2, layer_bytes=8192)
    assert os.listdir(tmp_path) == []
