"""The command ``vllm-subspec sweep``: arguments, checked before anything runs, and files."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_subspec import envs
from vllm_subspec.errors import ConfigError
from vllm_subspec.machine import measure_anew
from vllm_subspec.plan import MachineFigures, ModelShape
from vllm_subspec.plan.alignment import checkpoint_digest
from vllm_subspec.plan.budget import device_memory_bytes, parse_budget
from vllm_subspec.shadow import kernel_status
from vllm_subspec.tools.plan_command import served_dtype
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.sweep import Say, Sweep
from vllm_subspec.tools.sweep_file import Results
from vllm_subspec.tools.sweep_grid import PLANNED, Grid, parse_list
from vllm_subspec.tools.sweep_report import render, write_page, write_plots


@dataclass(frozen=True)
class Request:
    """The command line of ``vllm-subspec sweep``, as given."""

    model: Path
    results: Path
    bits: str
    group_size: str
    resident_layers: str
    width: str
    depth: str
    draft_temperature: str
    temperature: str
    together: int
    budget: str | None
    prompts: int
    new_tokens: int
    measure: int
    html_file: Path | None
    plots: Path | None

    def grid(self) -> Grid:
        """What it asks for.

        Raises:
            ConfigError: a wrong value.
        """
        values = {
            "bits": parse_list("bits", self.bits, int),
            "group_size": parse_list("group-size", self.group_size, int),
            "resident_layers": parse_list("resident-layers", self.resident_layers, int),
            "width": parse_list("width", self.width, int),
            "draft_temperature": parse_list("draft-temperature", self.draft_temperature, float),
            "temperature": parse_list("temperature", self.temperature, float),
        }
        depths = parse_list("depth", self.depth, int)
        grid = Grid(values, sorted(depths), self.together)
        if PLANNED in values["bits"] and self.budget is None:
            raise ConfigError("bits 'planned' are those that a plan chooses: add --budget")
        if self.measure and self.budget is None:
            raise ConfigError("--measure runs points within a memory budget: add --budget")
        layers = len(ModelShape.read(self.model).layers)
        if max(values["resident_layers"]) >= layers:
            raise ConfigError(f"--resident-layers: MODEL has {layers} layers, one must stream")
        return grid


def run_and_report(request: Request, say: Say) -> None:
    """Measure what is missing, print the table, write the files.

    Raises:
        ConfigError: a wrong value, or results of something else; nothing was run.
        WorkerError: a measured run failed.
    """
    grid = request.grid()
    budget = request.budget
    budget_bytes = None if budget is None else parse_budget(budget, device_memory_bytes())
    results = _open(request, budget_bytes, say)
    sweep = Sweep(
        request.model,
        grid,
        PROMPTS[: request.prompts],
        request.new_tokens,
        budget_bytes,
        MachineFigures.from_json(results.header["machine"]),
    )
    began = time.monotonic()
    sweep.run(results)
    if request.measure:
        sweep.measure(results, request.measure, say)
    seconds = time.monotonic() - began
    results.append([{"kind": "run", "command_line": _command_line(), "seconds": seconds}])
    say("\n" + render(results, grid))
    if request.html_file is not None:
        write_page(results, grid, request.html_file)
    if request.plots is not None:
        write_plots(results, grid, request.plots)


def _command_line() -> str:
    return shlex.join(["vllm-subspec", *sys.argv[1:]])


def _open(request: Request, budget_bytes: int | None, say: Say) -> Results:
    origin = provenance(_command_line())
    del origin["command_line"]  # each run has its own
    identity: dict[str, Any] = {
        "model": request.model.resolve().name,
        "checkpoint": checkpoint_digest(request.model),
        "prompts": request.prompts,
        "new_tokens": request.new_tokens,
        "budget_bytes": budget_bytes,
        "kernels": kernel_status(),
        **origin,
    }
    if request.results.exists():
        machine = Results.read(request.results).header["machine"]
    else:
        say("measuring this machine, by which speeds are predicted")
        folder = envs.cache_dir() / "spill"
        machine = measure_anew(folder, served_dtype(request.model)).to_json()
    header = {"kind": "sweep", "identity": identity, "machine": machine}
    return Results.begin_or_resume(request.results, header)
