"""The command ``vllm-subspec bench``: arguments, checked before anything runs, and files."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError
from vllm_subspec.machine import measure_anew
from vllm_subspec.plan.budget import device_memory_bytes, parse_budget
from vllm_subspec.timeline import Span
from vllm_subspec.tools.bench import Bench, Say
from vllm_subspec.tools.bench_modes import Workload, check_options, parse_modes
from vllm_subspec.tools.bench_report import render
from vllm_subspec.tools.plan_command import served_dtype
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.timeline_plot import typical_cycle, write_pictures

_PROMPTS = 8


@dataclass(frozen=True)
class Request:
    """The command line of ``vllm-subspec bench``, as given."""

    model: Path
    budget: str
    modes: str
    max_tokens: int
    prompts: Path | None
    repeats: int
    max_model_len: int
    draft_model: Path | None
    options: str
    json_file: Path | None
    timeline: Path | None
    temperatures: str = "0"
    again: bool = False

    def bench(self) -> Bench:
        """What it asks for.

        Raises:
            ConfigError: a wrong value; nothing was run.
            DependencyError: a mode lacks its package.
        """
        modes = parse_modes(self.modes, self.draft_model)
        options = parse_options(self.options)
        check_options(modes, options)
        work = Workload(
            model=self.model,
            budget_bytes=parse_budget(self.budget, device_memory_bytes()),
            prompts=PROMPTS[:_PROMPTS] if self.prompts is None else read_prompts(self.prompts),
            max_tokens=self.max_tokens,
            max_model_len=self.max_model_len,
            options=options,
            draft_model=self.draft_model,
            temperatures=parse_temperatures(self.temperatures),
        )
        return Bench(work, modes, self.repeats, self.timeline is not None, self.again)


def run_and_report(request: Request, say: Say) -> bool:
    """Run, print the tables, write the files; False where the gate is red.

    Raises:
        ConfigError: a wrong value; nothing was run.
        DependencyError: a mode lacks its package.
        WorkerError: a run failed.
    """
    bench = request.bench()
    command_line = shlex.join(["vllm-subspec", *sys.argv[1:]])
    say("measuring this machine, by which the modes are planned")
    spills = Path(bench.work.options.get("stream_dir") or envs.cache_dir() / "spill")
    machine = measure_anew(spills, served_dtype(request.model))
    say(f"  link {machine.link_bytes_per_s / 1e9:.2f} GB/s")
    bench = replace(bench, work=replace(bench.work, machine=machine))
    about = {"provenance": provenance(command_line), "machine": machine.to_json()}
    report: dict[str, Any] = {}
    for report in bench.rounds(say):
        report |= about
        recorded = report.pop("timeline", None)
        if request.json_file is not None:  # a round's work outlives what ends the next one
            request.json_file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    say("\n" + render(report))
    if request.timeline is not None and recorded is not None:
        cycle = typical_cycle([Span(*span) for span in recorded["spans"]], recorded["steps"])
        paths = write_pictures(cycle, request.timeline)
        say(f"\n{cycle.caption}: {', '.join(map(str, paths))}")
    return bool(report["gate"]["passed"])


def parse_options(text: str) -> dict[str, Any]:
    """SubSpec options as ``--options`` gives them.

    Raises:
        ConfigError: no JSON object.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--options {text!r} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"--options {text!r} is no JSON object")
    return parsed


def parse_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of ``--temperatures``, in the order given.

    Raises:
        ConfigError: no numbers from 0 to 2, or one twice.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {text!r}: {error}; write 0,0.6") from error
    if len(set(found)) < len(found) or not all(0 <= t <= 2 for t in found):
        raise ConfigError(f"--temperatures {text!r}: name each once, from 0 (greedy) to 2")
    return found


def read_prompts(path: Path) -> tuple[str, ...]:
    """User messages of a file: a JSON list of strings, or one message a line.

    Raises:
        ConfigError: no such file, no message in it, or JSON of another shape.
    """
    try:
        text = path.read_text()
        prompts = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError(f"--prompts {path} must hold a JSON list of strings")
    kept = tuple(prompt for prompt in prompts if prompt.strip())
    if not kept:
        raise ConfigError(f"--prompts {path} holds no prompt; write one a line")
    return kept
