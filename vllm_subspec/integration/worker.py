"""The workers that ``--worker-cls`` names when SubSpec is on."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from vllm_subspec import envs
from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration.orphans import end_with_parent
from vllm_subspec.integration.runner import (
    SubSpecCPUModelRunner,
    SubSpecGPUModelRunner,
    SubSpecRunnerMixin,
)
from vllm_subspec.memory import map_large_blocks

ONEDNN_KERNELS = 64
"""Products that oneDNN keeps, one for each number of rows and shape of weight. By itself it keeps
1024, and torch as many descriptions of a quarter of a megabyte: under mixed requests the process
grew by that for half an hour. Some six shapes at ten numbers of rows suffice."""


class SubSpecWorkerMixin:
    """One of vLLM's workers around SubSpec's runner."""

    runner_class: ClassVar[type[SubSpecRunnerMixin]]

    def init_device(self) -> None:
        """Initialise as vLLM does, then put our runner in the place of the one it made.

        ``init_device`` offers no seam for the runner's class that both workers share; a runner
        holds no weights yet, so building it twice costs milliseconds.
        """
        end_with_parent()
        super().init_device()
        self.model_runner = self.runner_class(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up, after ours: it measures, and watches for kernels that come later."""
        self.model_runner.capture_drafts()
        return super().compile_or_warm_up_model()

    def reload_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the slow tier and the shadows would keep the old weights.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "SubSpec does not replace weights in place, since spill and shadows are made of the "
            "old ones: start the engine again with the new checkpoint"
        )

    def subspec_statistics(self) -> dict[str, Any]:
        """Counters of this worker; reach them by ``LLM.collective_rpc("subspec_statistics")``."""
        return self.model_runner.subspec_statistics()

    def subspec_placement(self) -> dict[str, Any]:
        """What this worker keeps and what it streams, as ``Placement.to_json`` gives it."""
        return self.model_runner.offloader.placement.to_json()

    def subspec_timeline(self, seconds: float | None) -> list[tuple[str, float, float]]:
        """Record when link, draft and target work, from now on; ``None`` stops.

        Args:
            seconds: to keep when it stops, counted back from the last piece of work.

        Returns:
            At the stop (lane, start, end) in seconds of ``time.monotonic``; nothing before.
        """
        return self.model_runner.record_timeline(seconds)

    def set_draft_policy(self, changes: dict[str, Any]) -> None:
        """Change ``width``, ``depth``, ``max_nodes``, ``draft_temperature``, ``noise_coupling``
        or ``post_speculation`` between requests, by ``LLM.collective_rpc``."""
        self.model_runner.set_draft_policy(**changes)


class SubSpecCPUWorker(SubSpecWorkerMixin, CPUWorker):
    """vLLM's CPU worker with SubSpec."""

    runner_class = SubSpecCPUModelRunner

    def init_device(self) -> None:
        super().init_device()
        map_large_blocks()
        envs.limit_onednn_kernels(ONEDNN_KERNELS)


class SubSpecGPUWorker(SubSpecWorkerMixin, Worker):
    """vLLM's GPU worker with SubSpec."""

    runner_class = SubSpecGPUModelRunner
