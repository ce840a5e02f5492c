"""Energy by the machine's own counters (NVML, RAPL), read through zeus; nothing is estimated."""

from __future__ import annotations

from typing import Any

_WINDOW = "answers"


class EnergyMeter:
    """Counts the joules of all GPUs and processor packages of this machine, whoever uses them.

    Attributes:
        why_not: why there is no counter to read; empty if there is one.
    """

    def __init__(self) -> None:
        self._monitor: Any = None
        self.why_not = ""
        try:
            from zeus.device import get_cpus, get_gpus
            from zeus.exception import ZeusBaseError
            from zeus.monitor import ZeusMonitor
        except ImportError as error:
            self.why_not = f"{error}; pip install 'vllm-subspec[energy]' brings zeus"
            return
        reasons = []
        for counters in (get_gpus, get_cpus):
            try:
                counters()
            except ZeusBaseError as error:
                reasons.append(str(error))
        if len(reasons) == 2:
            self.why_not = "; ".join(reasons)
        else:
            self._monitor = ZeusMonitor()

    def begin(self) -> None:
        """Count from now on."""
        if self._monitor is not None:
            self._monitor.begin_window(_WINDOW, sync_execution=False)

    def end(self) -> float | None:
        """Joules since ``begin``; ``None`` where no counter can be read."""
        if self._monitor is None:
            return None
        counted = self._monitor.end_window(_WINDOW, sync_execution=False)
        parts = (counted.gpu_energy, counted.cpu_energy, counted.dram_energy)
        return float(sum(sum(part.values()) for part in parts if part))
