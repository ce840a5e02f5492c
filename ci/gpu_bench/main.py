"""The command line: the gate first, then what was asked for, then one report."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType

import torch

from gpu_bench import environment
from gpu_bench.checks import Operations, run_checks, tables
from gpu_bench.device import Device, Gpu, NoGpu
from gpu_bench.inputs import QWEN_7B, TINY, ModelShape
from gpu_bench.link import measure_link
from gpu_bench.method import measure_method
from gpu_bench.model import Plan
from gpu_bench.report import Tables, markdown, without_figures
from gpu_bench.sanitizer import sanitize
from gpu_bench.timings import Kernels, time_all

SECTIONS = ("environment", "checks", "sanitizer", "roofline", "link", "method", "kernels")
KERNELS = tuple(field.name for field in fields(Operations))
TIMED = SECTIONS[3:]
_PLAN = Plan(residents=4, slots=2, host_layers=4, bits=4, width=6, depth=48, context=2048, tau=20)
_TINY_PLAN = Plan(residents=1, slots=2, host_layers=3, bits=4, width=2, depth=3, context=37, tau=3)
_DESCRIPTION = """What the CUDA path does on this machine: kernels against their references, then
their times against the roofline and rivals, the link, and the whole method on a synthetic model.
No time is told of kernels that are wrong."""


RESERVE_S = 15.0  # for what is under way when the time for more is over


class OutOfTime(BaseException):
    """The limit has passed. No Exception, or a kernel's failure would it be taken for."""


class Run:
    """One run: sections in order, each into the report as soon as it is there."""

    def __init__(
        self, device: Device, given: argparse.Namespace, operations: Operations | None = None
    ) -> None:
        self._device, self._given = device, given
        self._operations = operations or Operations()
        self._ends_at = time.monotonic() + given.limit_s
        self._is_red = False
        self.sections: dict[str, Tables] = {}
        self.failures: list[str] = []

    def run(self) -> None:
        """All that was asked for; no time where the gate is red."""
        torch.manual_seed(0)
        only = self._given.only
        self._keep("environment", self._environment)
        if "checks" in only or set(only) & set(TIMED):
            self._keep("checks", self._checks)
        if "sanitizer" in only and not self._is_red:
            self._keep("sanitizer", self._sanitizer)
        steps = {"roofline": self._roofline, "link": self._link}
        steps |= {"method": self._method, "kernels": self._kernels}
        for name, step in steps.items():
            wanted = name in only or (name == "roofline" and "kernels" in only)
            if wanted and not self._is_red:
                self._keep(name, step)

    def report(self) -> dict[str, object]:
        """What goes to JSON."""
        return {
            "dry_run": self._device.is_dry,
            "passed": not self.failures,
            "failures": self.failures,
            "sections": self.sections,
        }

    def text(self) -> str:
        """The tables, and what failed."""
        lines = [markdown(self.sections, self._device.is_dry)]
        lines += [f"FAILED: {failure}" for failure in self.failures]
        return "\n".join(lines)

    def _keep(self, name: str, step: Callable[[], Tables]) -> None:
        start = time.monotonic()
        try:
            told = step()
        except Exception:  # the others are worth having: a GPU is not always at hand
            self._is_red |= name not in TIMED
            self.failures.append(f"{name} broke off:\n{traceback.format_exc(limit=-4)}")
            told = {}
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        self.sections[name] = without_figures(told) if self._device.is_dry else told
        if self._given.json is not None:
            self._given.json.write_text(json.dumps(self.report(), indent=2) + "\n")

    def _environment(self) -> Tables:
        return {"Machine": environment.facts(self._device, environment.command_line())}

    def _checks(self) -> Tables:
        given = self._given
        kernels = KERNELS if "method" in given.only else given.kernels
        checks = run_checks(self._operations, self._device, given.small, kernels)
        if any(check.problem for check in checks):
            self._is_red = True
            self.failures.append("kernels are wrong, so nothing is timed")
        return tables(checks)

    def _sanitizer(self) -> Tables:
        rows = sanitize(self._device, self._ends_at - time.monotonic())
        if any(row["state"] == "errors" for row in rows):
            self._is_red = True
            self.failures.append("the sanitizer found errors, so nothing is timed")
        return {"compute-sanitizer": rows}

    def _roofline(self) -> Tables:
        self._peaks, rows = environment.roofline(self._device, self._given.small)
        return {"Measured peaks": rows}

    def _link(self) -> Tables:
        return {"From pinned RAM": measure_link(self._device, self._given.small)}

    def _method(self) -> Tables:
        return measure_method(self._device, self._shape, self._given.plan)

    def _kernels(self) -> Tables:
        kernels = Kernels(self._device, self._operations, self._shape)
        wanted = [timed for timed in kernels.all() if timed.kernel in self._given.kernels]
        told, all_ran = time_all(self._device, wanted, self._peaks, self._ends_at - RESERVE_S)
        if not all_ran:
            self.failures.append("a kernel of ours did not run at its real size: see why")
        return told

    @property
    def _shape(self) -> ModelShape:
        shape: ModelShape = self._given.shape
        return shape


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the plan and the shape that it makes."""
    parser = argparse.ArgumentParser(prog="ci/gpu", description=_DESCRIPTION)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="without a GPU: everything up to the launch")
    add("--small", action="store_true", help="small sizes; a dry run has them anyway")
    add("--only", type=_names(SECTIONS), default=SECTIONS, help=f"of {','.join(SECTIONS)}")
    add("--kernels", type=_names(KERNELS), default=KERNELS, help=f"of {','.join(KERNELS)}")
    add("--limit-s", type=float, default=480.0, help="what is not done by then is left out")
    add("--json", type=Path, help="write everything here too")
    add("--layers", type=int, help="of the synthetic model")
    for name in ("residents", "slots", "host_layers", "bits", "width", "depth", "context", "tau"):
        add(f"--{name.replace('_', '-')}", type=int, help="see gpu_bench.model.Plan")
    given = parser.parse_args(arguments)
    given.small |= given.dry_run
    plan = _TINY_PLAN if given.small else _PLAN
    chosen = {field.name: getattr(given, field.name) for field in fields(Plan)}
    try:
        given.plan = replace(plan, **{name: n for name, n in chosen.items() if n is not None})
    except ValueError as error:
        parser.error(str(error))
    given.shape = TINY if given.small else QWEN_7B
    if given.layers is not None:
        given.shape = replace(given.shape, layers=given.layers)
    if not 0 <= given.plan.residents < given.shape.layers:
        parser.error(f"--residents {given.plan.residents}: stream at least one layer of the model")
    return given


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; there are {', '.join(known)}")
        return given

    return names


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: everything that ran was right."""
    given = parse(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here: run it where one is, or give --dry-run.")
        return 2
    run = Run(NoGpu() if given.dry_run else Gpu(), given)

    def stop(signum: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"{given.limit_s:.0f} s have passed")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, given.limit_s)
    try:
        run.run()
    except OutOfTime as error:
        run.failures.append(f"stopped, since {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if given.json is not None:
        given.json.write_text(json.dumps(run.report(), indent=2) + "\n")
    print(run.text())
    return 1 if run.failures else 0
