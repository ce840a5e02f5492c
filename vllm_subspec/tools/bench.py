"""The benchmark: modes side by side on one budget, outputs judged before any speed is told.

Every run of a mode is a fresh process, and the repeats are whole rounds over all modes. Workers
that stay alive would add up their memory, and a disk drifts over minutes: in rounds every mode
meets the same drift, and the spread over the rounds shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError
from vllm_subspec.files import private_directory
from vllm_subspec.plan import Placement
from vllm_subspec.tools.bench_figures import Figures, figures, losses, slot_bytes, spread
from vllm_subspec.tools.bench_gate import Gate
from vllm_subspec.tools.bench_modes import (
    Mode,
    Workload,
    engine_arguments,
)
from vllm_subspec.tools.bench_process import (
    RUNTIME_ALLOWANCE_BYTES,
    MemoryUse,
    WorkerKilled,
    run_worker,
)
from vllm_subspec.tools.bench_worker import Job

REFERENCE = "plain"
SHOWN = "subspec"
Say = Callable[[str], None]


@dataclass
class ModeRuns:
    """What the runs of one mode brought, one entry a round.

    Attributes:
        killed: why there is no run: the kernel killed it at the limit.
    """

    mode: Mode
    figures: list[Figures] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)
    losses: list[Figures] = field(default_factory=list)
    placement: Placement | None = None
    killed: str = ""


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        work: what every mode does.
        modes: in the order of the rounds; ``plain`` is the reference and must be among them.
        repeats: rounds.
        timeline: record one more answer of ``subspec`` in the first round.
    """

    work: Workload
    modes: Sequence[Mode]
    repeats: int
    timeline: bool

    def __post_init__(self) -> None:
        names = [mode.name for mode in self.modes]
        if REFERENCE not in names:
            raise ConfigError(
                f"--modes {','.join(names)}: {REFERENCE!r} must be among them, since the other "
                f"modes' tokens and speeds are compared with it"
            )
        if self.timeline and SHOWN not in names:
            raise ConfigError(f"--timeline shows mode {SHOWN!r}: add it to --modes")

    def run(self, say: Say) -> dict[str, Any]:
        """Run everything; JSON-serialisable. A red gate ends it, and no speed is in the result.

        Args:
            say: told what begins and what was found.

        Raises:
            WorkerError: a worker failed, or any but mode ``vllm`` was killed at the limit.
        """
        gate = Gate(self.work.model, REFERENCE)
        runs = {mode.name: ModeRuns(mode) for mode in self.modes}
        recorded = None
        for number in range(self.repeats):
            for mode in self.modes:
                say(f"round {number + 1} of {self.repeats}, {mode.name}")
                result = self._run(runs[mode.name], self._job(mode, number))
                if result is None:
                    say(f"  {runs[mode.name].killed}")
                    continue
                recorded = result.get("timeline", recorded)
                gate.take(mode.name, result["answers"])
            gate.judge(say)
            if not gate.passed:
                break
        report: dict[str, Any] = {
            "budget_bytes": self.work.budget_bytes,
            "runtime_allowance_bytes": RUNTIME_ALLOWANCE_BYTES,
            "workload": self._workload(),
            "gate": gate.report(),
        }
        if gate.passed:
            report |= _speeds(runs, self.work.options.get("emulate_link"))
        if recorded is not None:
            report["timeline"] = recorded
        return report

    def _job(self, mode: Mode, number: int) -> Job:
        return Job(
            arguments=engine_arguments(mode, self.work),
            streams=mode.streams,
            prompts=self.work.prompts,
            max_tokens=self.work.max_tokens,
            timeline=self.timeline and number == 0 and mode.name == SHOWN,
            procs=None,
        )

    def _run(self, runs: ModeRuns, job: Job) -> dict[str, Any] | None:
        limit = self.work.budget_bytes + RUNTIME_ALLOWANCE_BYTES
        log = private_directory(envs.cache_dir() / "logs") / f"bench-{runs.mode.name}.log"
        try:
            result, memory = run_worker(job, limit, log)
        except WorkerKilled as error:
            if runs.mode.streams:
                raise
            runs.killed = str(error)  # what this mode is there to show
            return None
        runs.figures.append(figures(result))
        runs.memory.append(memory)
        if result["placement"] is not None:
            runs.placement = Placement.from_json(result["placement"])
            if runs.placement.tree is not None:
                runs.losses.append(losses(result, slot_bytes(runs.placement)))
        return result

    def _workload(self) -> dict[str, Any]:
        work = self.work
        return {
            "model": work.model.name,
            "prompts": len(work.prompts),
            "max_tokens": work.max_tokens,
            "max_model_len": work.max_model_len,
            "repeats": self.repeats,
            "options": dict(work.options),
        }


def _speeds(runs: dict[str, ModeRuns], emulated: float | None) -> dict[str, Any]:
    """Everything that may be told once the outputs are right."""
    label = {} if emulated is None else {"emulated_link_bytes_per_s": emulated}
    modes = {name: label | _told(mode_runs) for name, mode_runs in runs.items()}
    found: dict[str, Any] = {"modes": modes}
    if SHOWN in modes:
        for name, figure in (
            ("speedup", "tokens_per_s"),
            ("decode_speedup", "decode_tokens_per_s"),
        ):
            found[name] = modes[SHOWN][figure]["median"] / modes[REFERENCE][figure]["median"]
    return label | found


def _told(runs: ModeRuns) -> dict[str, Any]:
    told: dict[str, Any] = {"meaning": runs.mode.meaning}
    if runs.killed:
        return told | {"killed": runs.killed}
    told |= spread(runs.figures)
    told["memory"] = [memory.to_json() for memory in runs.memory]
    told["peak_rss"] = max(memory.peak_rss for memory in runs.memory)
    if runs.placement is not None:
        told["placement"] = runs.placement.to_json()
        predicted = runs.placement.prediction.tokens_per_s
        if predicted:  # a placement by count predicts nothing
            measured = told["decode_tokens_per_s"]["median"]
            told["measured_over_predicted"] = measured / predicted
    if runs.losses:
        told["losses"] = spread(runs.losses)
    return told
