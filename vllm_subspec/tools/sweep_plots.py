"""The plots of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from vllm_subspec.tools.plotting import Plot, new_axes, plot
from vllm_subspec.tools.sweep_file import Record, Results, matching
from vllm_subspec.tools.sweep_grid import AXES, PLANNED, Grid, label

_AXIS_NAMES = {
    "group_size": "groups of {}",
    "resident_layers": "{} resident layers",
    "width": "width {}",
    "draft_temperature": "T_d {}",
    "temperature": "temperature {}",
}
_Number = Callable[[Record], float]


class Surface:
    """Points of a grid, by what differs from its base.

    Args:
        results: of the sweep.
        grid: which points are looked at.
    """

    def __init__(self, results: Results, grid: Grid) -> None:
        self._points = results.of_kind("point")
        self.measured = results.of_kind("measured")
        self._grid = grid
        self._base = grid.base.to_json()

    def at(self, **changes: Any) -> list[Record]:
        """Points at the base but for ``changes``, by depth."""
        wanted = {**self._base, **changes}
        if wanted["bits"] == "mxfp4":
            wanted["group_size"] = 32
        if wanted["bits"] == PLANNED:
            del wanted["resident_layers"]
        depths = set(self._grid.depths)
        found = [r for r in matching(self._points, **wanted) if r["depth"] in depths]
        return sorted(found, key=lambda record: int(record["depth"]))

    def by_bits(self) -> dict[str, list[Record]]:
        """Curves over depth by what the shadow is, the most bytes first."""
        curves = [(bits, self.at(bits=bits)) for bits in self._grid.values["bits"]]
        curves = [(bits, curve) for bits, curve in curves if curve]
        curves.sort(key=lambda named: -named[1][0]["bytes_per_weight"])
        return {label(bits): curve for bits, curve in curves}

    def departures(self) -> list[tuple[str, Record]]:
        """The deepest points that differ from the base in one axis, the base's own first."""
        rows: dict[str, Record] = {}
        for axis in AXES:
            for value in self._grid.values[axis]:
                curve = self.at(**{axis: value})
                name = label(value) if axis == "bits" else _AXIS_NAMES[axis].format(value)
                if curve:
                    rows.setdefault("base" if value == self._base[axis] else name, curve[-1])
        return list(rows.items())


def plots(surface: Surface) -> Mapping[str, Plot]:
    """All of them, by a name for a file."""
    return {
        "tau-by-depth": _over_depth(
            surface,
            "Acceptance length by depth",
            "tau, tokens per target pass",
            lambda r: float(r["tau"]),
            "How many tokens a pass commits, by the shadow's bits; bars: 95 % intervals over "
            "texts. A curve that has gone flat gains nothing from deeper trees.",
            bars=True,
        ),
        "tau-by-bits": _tau_by_bits(surface),
        "speed-by-depth": _speed(surface),
        "conversion": _over_depth(
            surface,
            "Conversion: speedup per unit of tau",
            "predicted speedup / tau",
            lambda r: float(r["predicted"]["speedup"] / r["tau"]),
            "How much of the acceptance becomes speed. 1 would mean that drafting and verifying "
            "cost nothing beside plain streaming's pass.",
        ),
        "denominator": _over_depth(
            surface,
            "The denominator: tau / speedup",
            "a cycle in plain passes, predicted",
            lambda r: float(r["tau"] / r["predicted"]["speedup"]),
            "What a cycle costs in passes of plain streaming: drafting (it grows with depth) "
            "and the pass that verifies. Speedup is tau over this.",
        ),
        "acceptance-by-level": _by_level(surface),
        "departures": _departures(surface),
    }


def _over_depth(
    surface: Surface, title: str, ylabel: str, value: _Number, reading: str, bars: bool = False
) -> Plot:
    figure, axes = new_axes("depth of the tree, levels", ylabel)
    for name, curve in surface.by_bits().items():
        depths, values = [r["depth"] for r in curve], [value(r) for r in curve]
        (line,) = axes.plot(depths, values, ".-", label=name)
        if bars:
            for record in curve:
                axes.plot(
                    [record["depth"]] * 2, record["tau_interval"], color=line.get_color(), alpha=0.4
                )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return plot(title, reading, figure)


def _tau_by_bits(surface: Surface) -> Plot:
    figure, axes = new_axes("bytes per weight of the shadows, scales included", "tau")
    curves = surface.by_bits()
    depths: Sequence[int] = [r["depth"] for r in next(iter(curves.values()), [])]
    for depth in depths:
        at = [next((r for r in curve if r["depth"] == depth), None) for curve in curves.values()]
        found = [r for r in at if r is not None]
        places = [r["bytes_per_weight"] for r in found]
        axes.plot(places, [r["tau"] for r in found], ".-", label=f"depth {depth}")
    for name, curve in curves.items():
        axes.annotate(
            name, (curve[-1]["bytes_per_weight"], curve[-1]["tau"]), fontsize=7,
            xytext=(0, 5), textcoords="offset points", ha="center",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "Acceptance length by the shadow's bytes",
        "The same points by what a weight's shadow weighs. Deep trees need bits: with few of them "
        "the curves of all depths lie together.",
        figure,
    )


def _speed(surface: Surface) -> Plot:
    figure, axes = new_axes("depth of the tree, levels", "tokens/s, predicted")
    plain = 0.0
    for name, curve in surface.by_bits().items():
        has_kernel = all(r["has_kernel"] for r in curve)
        (line,) = axes.plot(
            [r["depth"] for r in curve],
            [r["predicted"]["tokens_per_s"] for r in curve],
            ".-" if has_kernel else ".:",
            label=name if has_kernel else f"{name}, if there were a kernel",
        )
        plain = curve[0]["predicted"]["plain_tokens_per_s"]
        bits = curve[0]["bits"]
        chosen = {name: curve[0][name] for name in AXES}
        if measured := matching(surface.measured, **chosen):
            axes.plot(
                [r["depth"] for r in measured],
                [r["decode_tokens_per_s"] for r in measured],
                "*", markersize=10, color=line.get_color(), label=f"{label(bits)}, measured",
            )  # fmt: skip
    axes.axhline(plain, color="#9aa7b1", label="plain streaming, predicted")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "Tokens a second by depth",
        "Measured tau over the cycle model's seconds on this machine, whole trees verified. "
        "Dotted: formats without a kernel here, as if one read their bytes as fast.",
        figure,
    )


def _by_level(surface: Surface) -> Plot:
    figure, axes = new_axes("level of the tree", "share of trees accepted that far")
    for name, curve in surface.by_bits().items():
        shares = curve[-1]["acceptance_by_level"]
        axes.plot(range(1, len(shares) + 1), shares, label=name)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "Acceptance by level",
        "Of the deepest trees that had such a level, the share in which it was accepted, and all "
        "above it. The area under a curve, plus 1, is about tau.",
        figure,
    )


def _departures(surface: Surface) -> Plot:
    figure, axes = new_axes("tau of the deepest tree", "")
    rows = surface.departures()[::-1]
    figure.set_figheight(0.6 + 0.22 * len(rows))
    for place, (name, record) in enumerate(rows):
        colour = "#2b7a3d" if name == "base" else "#555555"
        axes.barh(place, record["tau"], color=colour, alpha=0.6)
        axes.plot(record["tau_interval"], [place] * 2, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    return plot(
        "One setting changed",
        "Acceptance length of the deepest tree at the base (green), and with one setting changed. "
        "Lines: 95 % intervals over texts.",
        figure,
    )
