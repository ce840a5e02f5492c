"""A sweep for people: a table, a page, pictures."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from vllm_subspec.tools.bench_report import table
from vllm_subspec.tools.sweep_file import Results
from vllm_subspec.tools.sweep_grid import Grid
from vllm_subspec.tools.sweep_plots import Surface, plots


def render(results: Results, grid: Grid) -> str:
    """Markdown: tau and predicted tokens/s by bits and depth at the base, then the departures."""
    surface = Surface(results, grid)
    head = ["tau; tokens/s predicted", *(f"depth {depth}" for depth in grid.depths)]
    rows = [
        [
            name + ("" if curve[0]["has_kernel"] else " (no kernel)"),
            *(f"{r['tau']:.2f}; {r['predicted']['tokens_per_s']:.2f}" for r in curve),
        ]
        for name, curve in surface.by_bits().items()
    ]
    lines = [*table(head, rows), ""]
    departures = [
        [name, f"{r['tau']:.2f} [{r['tau_interval'][0]:.2f}, {r['tau_interval'][1]:.2f}]"]
        for name, r in surface.departures()
    ]
    lines += table([f"one setting changed, depth {max(grid.depths)}", "tau"], departures)
    for record in surface.measured:
        lines.append(
            f"\nmeasured: {record['bits']} bits, {record['width']}x{record['depth']}: "
            f"{record['decode_tokens_per_s']:.2f} tokens/s, tau {record['acceptance_length']:.2f}; "
            f"plain streaming {record['plain_tokens_per_s']:.2f}"
        )
    return "\n".join(lines)


def write_page(results: Results, grid: Grid, file: Path) -> None:
    """One page with every plot, and no request to anybody."""
    template = files("vllm_subspec.tools").joinpath("data", "sweep.html").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(
        identity=results.header["identity"],
        base=grid.base.to_json(),
        table=render(results, grid),
        plots=list(plots(Surface(results, grid)).values()),
        runs=results.of_kind("run"),
        header=json.dumps(results.header, indent=2),
    )
    file.write_text(page, encoding="utf-8")


def write_plots(results: Results, grid: Grid, folder: Path) -> None:
    """Every plot as an SVG file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in plots(Surface(results, grid)).items():
        (folder / f"{name}.svg").write_bytes(plot.svg)
