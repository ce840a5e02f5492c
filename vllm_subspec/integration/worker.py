"""The worker that ``--worker-cls`` names when SubSpec is on."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_subspec.integration.runner import SubSpecCPUModelRunner


class SubSpecCPUWorker(CPUWorker):
    """vLLM's CPU worker around SubSpec's runner."""

    def init_device(self) -> None:
        """Initialise as vLLM does, then put our runner in the place of the one it made.

        ``init_device`` offers no seam for the runner's class; a runner holds no weights yet, so
        building it twice costs milliseconds.
        """
        super().init_device()
        self.model_runner = SubSpecCPUModelRunner(self.vllm_config, self.device)

    def subspec_statistics(self) -> dict[str, Any]:
        """Counters of this worker; reach them by ``LLM.collective_rpc("subspec_statistics")``."""
        return self.model_runner.subspec_statistics()
