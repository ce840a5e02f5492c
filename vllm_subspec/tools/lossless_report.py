"""The losslessness report as one page: every figure, the plots, and no request to anybody."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from vllm_subspec.tools.lossless_plots import plots

_MEANINGS = {
    "greedy": "greedy answers, token by token",
    "seeded": "seeded sampling, token by token",
    "unseeded": "unseeded sampling, against the target's law",
    "tasks": "right answers to checkable questions",
}


def write_page(report: Mapping[str, Any], file: Path) -> None:
    """Write what ``Protocol.run`` returned, with its provenance, as HTML."""
    template = files("vllm_subspec.tools").joinpath("data", "lossless.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(
        report=report,
        meanings=_MEANINGS,
        plots={dtype: plots(found) for dtype, found in report["dtypes"].items()},
        provenance=json.dumps(report["provenance"], indent=2),
    )
    file.write_text(page, encoding="utf-8")
