"""The benchmark: modes side by side on one budget, outputs judged before any speed is told.

Every run of a mode is a fresh process, and the repeats are whole rounds over all modes. Workers
that stay alive would add up their memory, and a disk drifts over minutes: in rounds every mode
meets the same drift, and the spread over the rounds shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError
from vllm_subspec.files import private_directory
from vllm_subspec.plan import Placement
from vllm_subspec.tools.audit import sampling_noise
from vllm_subspec.tools.bench_figures import (
    Figures,
    figures,
    losses,
    ratios,
    slot_bytes,
    spread,
)
from vllm_subspec.tools.bench_gate import Gate
from vllm_subspec.tools.bench_modes import (
    Mode,
    Workload,
    best_batch,
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
AGAIN = "again"
Say = Callable[[str], None]


@dataclass
class ModeRuns:
    """What the runs of one mode at one temperature brought, one entry a round.

    Attributes:
        temperature: of its requests.
        batch: of its requests at once.
        killed: why there is no run: the kernel killed it at the limit.
        no_energy: why no energy counter could be read; empty where one could.
    """

    mode: Mode
    temperature: float
    batch: int
    figures: list[Figures] = field(default_factory=list)
    memory: list[MemoryUse] = field(default_factory=list)
    losses: list[Figures] = field(default_factory=list)
    placement: Placement | None = None
    killed: str = ""
    no_energy: str = ""


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        work: what every mode does.
        modes: in the order of the rounds; ``plain`` is the reference and must be among them.
        repeats: rounds.
        timeline: record one more answer of ``subspec`` in the first round.
        again: end each round with ``subspec`` (else ``plain``) again: what that differs from
            itself by is noise.
    """

    work: Workload
    modes: Sequence[Mode]
    repeats: int
    timeline: bool
    again: bool = False

    def __post_init__(self) -> None:
        names = [mode.name for mode in self.modes]
        if REFERENCE not in names:
            raise ConfigError(
                f"--modes {','.join(names)}: {REFERENCE!r} must be among them, since the other "
                f"modes' tokens and speeds are compared with it"
            )
        if self.timeline and SHOWN not in names:
            raise ConfigError(f"--timeline shows mode {SHOWN!r}: add it to --modes")

    @property
    def _twice(self) -> Mode | None:
        """The mode that runs again."""
        by_name = {mode.name: mode for mode in self.modes}
        return by_name.get(SHOWN, by_name[REFERENCE]) if self.again else None

    def _all_modes(self) -> list[Mode]:
        twice = self._twice
        again = [] if twice is None else [replace(twice, name=f"{twice.name} {AGAIN}")]
        modes = [*self.modes, *again]
        return [mode for mode in modes if mode.temperatures(self.work.temperatures)]

    def rounds(self, say: Say) -> Iterator[dict[str, Any]]:
        """Run everything; after each round, the report of all so far, JSON-serialisable.

        A red gate ends it, and no speed is in that report.

        Args:
            say: told what begins and what was found.

        Raises:
            WorkerError: a worker failed, or any but mode ``vllm`` was killed at the limit.
        """
        work, modes = self.work, self._all_modes()
        gates = {t: self._gate(t) for t in work.temperatures}
        runs = {
            mode.name: [
                ModeRuns(mode, t, best_batch(work) if mode.batched else 1)
                for t in mode.temperatures(work.temperatures)
            ]
            for mode in modes
        }
        recorded = None
        for number in range(self.repeats):
            for mode in modes:
                say(f"round {number + 1} of {self.repeats}, {mode.name}")
                result = self._run(runs[mode.name], self._job(runs[mode.name], number))
                if result is None:
                    say(f"  {runs[mode.name][0].killed}")
                    continue
                recorded = result.get("timeline", recorded)
                for run in result["runs"]:
                    self._show(gates[run["temperature"]], mode, run)
            for gate in gates.values():
                gate.judge(say)
            report: dict[str, Any] = {
                "budget_bytes": work.budget_bytes,
                "runtime_allowance_bytes": RUNTIME_ALLOWANCE_BYTES,
                "workload": self._workload(number + 1),
                "gate": _together(gate.report() for gate in gates.values()),
            }
            if report["gate"]["passed"]:
                everything = [each for of_mode in runs.values() for each in of_mode]
                report |= _speeds(everything, work.options.get("emulate_link"), self._twice)
            if recorded is not None:
                report["timeline"] = recorded
            yield report
            if not report["gate"]["passed"]:
                return

    def _gate(self, temperature: float) -> Gate:
        seeds = range(len(self.work.prompts))
        noise = sampling_noise(seeds, temperature) if temperature else None
        return Gate(self.work.model, label(REFERENCE, temperature), noise)

    def _show(self, gate: Gate, mode: Mode, run: Mapping[str, Any]) -> None:
        """To the gate, in pieces of all prompts; what vLLM's methods sample is not plain's."""
        if mode.method is not None and run["temperature"]:
            return
        count = len(self.work.prompts)
        for start in range(0, len(run["answers"]), count):
            answers = run["answers"][start : start + count]
            gate.take(label(mode.name, run["temperature"]), answers)

    def _job(self, runs: Sequence[ModeRuns], number: int) -> Job:
        mode, batch = runs[0].mode, runs[0].batch
        return Job(
            arguments=engine_arguments(mode, self.work, batch),
            streams=mode.streams,
            prompts=self.work.prompts,
            max_tokens=self.work.max_tokens,
            timeline=self.timeline and number == 0 and mode.name == SHOWN,
            procs=None,
            temperatures=[each.temperature for each in runs],
            batch=batch,
        )

    def _run(self, runs: Sequence[ModeRuns], job: Job) -> dict[str, Any] | None:
        limit = self.work.budget_bytes + RUNTIME_ALLOWANCE_BYTES
        mode = runs[0].mode
        log = private_directory(envs.cache_dir() / "logs") / f"bench-{mode.name}.log"
        try:
            result, memory = run_worker(job, limit, log)
        except WorkerKilled as error:
            if mode.streams:
                raise
            for each in runs:
                each.killed = str(error)  # what this mode is there to show
            return None
        for each, run in zip(runs, result["runs"], strict=True):
            each.figures.append(figures(run))
            each.memory.append(memory)
            each.no_energy = result["no_energy"]
            if result["placement"] is not None:
                each.placement = Placement.from_json(result["placement"])
                if each.placement.tree is not None:
                    each.losses.append(losses(run, slot_bytes(each.placement)))
        return result

    def _workload(self, rounds: int) -> dict[str, Any]:
        work = self.work
        return {
            "model": work.model.name,
            "prompts": len(work.prompts),
            "max_tokens": work.max_tokens,
            "max_model_len": work.max_model_len,
            "temperatures": list(work.temperatures),
            "repeats": rounds,
            "options": dict(work.options),
        }


def label(name: str, temperature: float) -> str:
    """Of a mode's figures at one temperature."""
    return f"{name}, T = {temperature:g}" if temperature else name


def _together(gates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The reports of all temperatures' gates as one."""
    reports = list(gates)
    modes = {name: found for report in reports for name, found in report["modes"].items()}
    return {"passed": all(report["passed"] for report in reports), "modes": modes}


def _speeds(runs: Sequence[ModeRuns], emulated: float | None, twice: Mode | None) -> dict[str, Any]:
    """Everything that may be told once the outputs are right."""
    emulation = {} if emulated is None else {"emulated_link_bytes_per_s": emulated}
    by_label = {label(each.mode.name, each.temperature): each for each in runs}
    modes = {}
    plain_runs = next(each for each in runs if each.mode.name == REFERENCE)
    for name, each in by_label.items():
        plain = by_label[label(REFERENCE, each.temperature)].figures
        modes[name] = emulation | _told(each, plain)
    found: dict[str, Any] = {"modes": modes, "no_energy": plain_runs.no_energy}
    if SHOWN in modes:
        for name in ("speedup", "decode_speedup"):
            found[name] = modes[SHOWN][name]["mean"]
    if twice is not None:
        found["noise_floor"] = {
            name: ratios(by_label[again].figures, each.figures)
            for name, each in by_label.items()
            if (again := label(f"{twice.name} {AGAIN}", each.temperature)) in by_label
            and each.mode is twice
        }
    return emulation | found


def _told(runs: ModeRuns, plain: Sequence[Figures]) -> dict[str, Any]:
    told: dict[str, Any] = {"meaning": runs.mode.meaning, "temperature": runs.temperature}
    if runs.killed:
        return told | {"killed": runs.killed}
    told |= {"batch": runs.batch} | spread(runs.figures) | ratios(runs.figures, plain)
    told["memory"] = [memory.to_json() for memory in runs.memory]
    told["peak_rss"] = max(memory.peak_rss for memory in runs.memory)
    if runs.placement is not None:
        told["placement"] = runs.placement.to_json()
        predicted = runs.placement.prediction.tokens_per_s
        if predicted and runs.batch == 1:  # a placement by count predicts nothing
            measured = told["decode_tokens_per_s"]["mean"]
            told["measured_over_predicted"] = measured / predicted
    if runs.losses:
        told["losses"] = spread(runs.losses)
    return told
