"""The command ``vllm-subspec verify``: arguments, checked before anything runs, and files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import ModelShape
from vllm_subspec.tools.bench_command import parse_options
from vllm_subspec.tools.lossless import Protocol, Say
from vllm_subspec.tools.lossless_asks import Plan, Texts
from vllm_subspec.tools.lossless_report import write_page
from vllm_subspec.tools.provenance import provenance

DTYPES = ("float32", "bfloat16")
_FIXED = ("speculate", "noise_coupling")


@dataclass(frozen=True)
class Request:
    """The command line of ``vllm-subspec verify``, as given."""

    model: Path
    dtypes: Sequence[str]
    draws: int
    options: str
    json_file: Path | None
    html_file: Path | None

    def protocol(self) -> Protocol:
        """What it asks for.

        Raises:
            ConfigError: a wrong value, or a folder without such a model; nothing was run.
        """
        dtypes = tuple(self.dtypes) or DTYPES
        unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
        if unknown or len(set(dtypes)) < len(dtypes):
            raise ConfigError(
                f"--dtype {' '.join(dtypes)}: give {' or '.join(DTYPES)}, each at most once"
            )
        options = parse_options(self.options)
        if taken := [name for name in _FIXED if name in options]:
            raise ConfigError(f"leave {', '.join(taken)} out of --options: the protocol sets it")
        depth_is_open = SubSpecConfig(**options).depth is None
        ModelShape.read(self.model)
        plan = Plan(Texts.read(self.model), self.draws, depth_is_open)
        return Protocol(self.model, plan, dtypes, options)


def run_and_report(request: Request, say: Say) -> bool:
    """Run, say the verdict, write the files; False where a check failed.

    Raises:
        ConfigError: a wrong value; nothing was run.
        WorkerError: an engine failed.
    """
    protocol = request.protocol()
    command_line = shlex.join(["vllm-subspec", *sys.argv[1:]])
    report: dict[str, Any] = protocol.run(say) | {"provenance": provenance(command_line)}
    if request.json_file is not None:
        request.json_file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    if request.html_file is not None:
        write_page(report, request.html_file)
    verdict = "PASSED" if report["passed"] else "FAILED"
    for dtype, found in report["dtypes"].items():
        if found["missed"]:
            say(f"{dtype}: the checks missed wrong samplers: {', '.join(found['missed'])}")
    say(f"{verdict}: {report['model']}, {', '.join(report['dtypes'])}, {report['seconds']:.0f} s")
    return bool(report["passed"])
