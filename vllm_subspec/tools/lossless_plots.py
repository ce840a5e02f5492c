"""The plots of the losslessness report, as SVG images that need nothing from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.stats import binom

from vllm_subspec.tools.plotting import Plot, new_axes, plot

_RIGHT, _WRONG, _REFERENCE = "#2b7a3d", "#c0392b", "#9aa7b1"
_LARGEST_GAP = 6.0
_CONFIDENCE = 0.999


def plots(found: Mapping[str, Any]) -> list[Plot]:
    """All plots of one dtype's part of the report."""
    return [_gaps(found), _variation(found), _ranks(found), _accuracy(found)]


def _gaps(found: Mapping[str, Any]) -> Plot:
    figure, axes = new_axes("gap to the best token, in logits", "tokens of the reference")
    gaps = np.minimum(found["gaps"], _LARGEST_GAP)
    axes.hist(gaps, bins=60, range=(0, _LARGEST_GAP), color=_REFERENCE, label="second-best tokens")
    judged = _divergences(found["checks"])
    wrong = _divergences(found["controls"]["accepting"]["checks"])
    for divergences, colour, height, label in (
        (judged, _RIGHT, 0.92, "SubSpec's differences"),
        (wrong, _WRONG, 0.84, "differences of a wrong sampler"),
    ):
        places = [min(gap, _LARGEST_GAP) for gap, _ in divergences]
        axes.plot(
            places,
            [height] * len(places),
            "v",
            color=colour,
            label=f"{label} ({len(places)})",
            transform=axes.get_xaxis_transform(),
        )
    tolerances = [tolerance for _, tolerance in judged + wrong]
    if tolerances and not found["exact"]:
        axes.axvspan(0, float(np.median(tolerances)), color=_RIGHT, alpha=0.12, label="tolerated")
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "How near the other token was, wherever texts part",
        "Grey: the gap between the best and the second-best token at every greedy position of the "
        "reference. A difference that rounding explains lies at the left end, within the tolerance "
        "(shaded: its median; none in float32). The last bar holds wider gaps too.",
        figure,
    )


def _divergences(checks: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Gap and tolerance of the greedy and the seeded texts' first differences."""
    return [
        (_LARGEST_GAP if d["gap"] is None else d["gap"], d["tolerance"])
        for name in ("greedy", "seeded")
        for d in checks.get(name, {}).get("divergences", ())
    ]


def _samplers(found: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Label, colour and comparison of everything that drew."""
    all_of = [("SubSpec", _RIGHT, found["checks"]["unseeded"]["comparison"])]
    for (name, control), colour in zip(found["controls"].items(), (_WRONG, "#d98324"), strict=True):
        comparison = control["checks"]["unseeded"]["comparison"]
        all_of.append((f"wrong sampler: {name}", colour, comparison))
    return all_of


def _variation(found: Mapping[str, Any]) -> Plot:
    figure, axes = new_axes("token after the prompt", "total variation from the target's law")
    for index, (label, colour, comparison) in enumerate(_samplers(found)):
        distances = comparison["distances"]
        places = [distance["position"] + 0.15 * (index - 1) for distance in distances]
        for place, distance in zip(places, distances, strict=True):
            least, most = distance["tv_of_exact"]
            axes.bar(place, most - least, 0.13, bottom=least, color=_REFERENCE, alpha=0.6)
        middles = [distance["tv"] for distance in distances]
        axes.plot(places, middles, "o", color=colour, label=label)
        for place, distance in zip(places, distances, strict=True):
            axes.plot([place] * 2, distance["tv_interval"], color=colour, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "How far the drawn tokens are from the target's law",
        "Points: total variation between the frequencies of the drawn tokens and the law. Grey "
        "bars: what 95 % of exact samplers show with as many draws, by chance alone; a right one "
        "lies in its bar. Lines: 95 % intervals of the distance without that chance.",
        figure,
    )


def _ranks(found: Mapping[str, Any]) -> Plot:
    figure, axes = new_axes(
        "place in the target's law, the most probable token first", "share of draws"
    )
    for label, colour, comparison in _samplers(found):
        counts = np.sum(comparison["pit"], axis=0)
        cells, total = len(counts), int(counts.sum())
        if colour == _RIGHT:
            least, most = binom.interval(_CONFIDENCE, total, 1 / cells)
            axes.axhspan(least / total, most / total, color=_REFERENCE, alpha=0.5)
        edges = np.linspace(0, 1, cells + 1)
        axes.stairs(counts / total, edges, color=colour, label=label, linewidth=1.5)
    axes.legend(frameon=False, fontsize=8)
    return plot(
        "Where in the law the draws fall",
        "The target's law of each token, laid end to end from the most to the least probable "
        "value, is cut into 20 pieces of equal probability. An exact sampler hits all pieces "
        "equally often, whatever the text: 99.9 % of its points lie in the grey band.",
        figure,
    )


def _accuracy(found: Mapping[str, Any]) -> Plot:
    figure, axes = new_axes("right answers of SubSpec minus those of the reference", "")
    figure.set_figheight(1.8)
    accuracy = found["checks"]["tasks"]["accuracy"]
    low, high = accuracy["interval"]
    axes.axvline(0, color=_REFERENCE)
    axes.plot([low, high], [0, 0], color=_RIGHT)
    axes.plot([accuracy["difference"]], [0], "o", color=_RIGHT)
    axes.set_yticks([])
    axes.set_ylim(-1, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f} %")
    widest = max(0.1, 1.1 * abs(low), 1.1 * abs(high))
    axes.set_xlim(-widest, widest)
    return plot(
        "Accuracy on questions with checkable answers",
        f"{accuracy['questions']} questions; the reference answers {accuracy['reference']:.0%} of "
        f"them rightly, SubSpec {accuracy['found']:.0%}. The line is the 95 % interval of the "
        "paired difference.",
        figure,
    )
