"""Energy counters: read where zeus finds one, else told why not; on a zeus of the test's own."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_subspec.tools.energy import EnergyMeter


class Zeus:
    """The parts of zeus that are used, with the counters that a test gives it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, str] = {}
        self.counted = SimpleNamespace(gpu_energy={}, cpu_energy=None, dram_energy=None)
        self.windows: list[str] = []
        modules = {name: ModuleType(name) for name in ("device", "exception", "monitor")}
        error = type("ZeusBaseError", (Exception,), {})

        def counters(name: str) -> Any:
            def find() -> None:
                if name in self.errors:
                    raise error(self.errors[name])

            return find

        vars(modules["device"]).update(get_gpus=counters("gpus"), get_cpus=counters("cpus"))
        vars(modules["exception"]).update(ZeusBaseError=error)
        vars(modules["monitor"]).update(ZeusMonitor=lambda: self)
        monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, f"zeus.{name}", module)

    def begin_window(self, key: str, sync_execution: bool) -> None:
        self.windows.append(key)

    def end_window(self, key: str, sync_execution: bool) -> Any:
        assert self.windows.pop() == key
        return self.counted


@pytest.fixture
def zeus(monkeypatch: pytest.MonkeyPatch) -> Zeus:
    return Zeus(monkeypatch)


def read() -> float | None:
    meter = EnergyMeter()
    assert meter.why_not == ""
    meter.begin()
    return meter.end()


def test_all_counters_of_the_machine_are_added(zeus: Zeus) -> None:
    zeus.counted = SimpleNamespace(
        gpu_energy={0: 1.0, 1: 2.0}, cpu_energy={0: 10.0}, dram_energy={0: 0.5}
    )
    assert read() == 13.5


def test_one_kind_of_counter_is_enough(zeus: Zeus) -> None:
    zeus.errors = {"gpus": "NVML unavailable"}
    zeus.counted = SimpleNamespace(gpu_energy={}, cpu_energy={0: 10.0}, dram_energy=None)
    assert read() == 10.0


def test_no_counter_is_no_number(zeus: Zeus) -> None:
    zeus.errors = {"gpus": "NVML unavailable", "cpus": "RAPL unavailable"}
    meter = EnergyMeter()
    assert meter.why_not == "NVML unavailable; RAPL unavailable"
    meter.begin()
    assert meter.end() is None


def test_zeus_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    meter = EnergyMeter()
    assert "pip install 'vllm-subspec[energy]'" in meter.why_not
    meter.begin()
    assert meter.end() is None
