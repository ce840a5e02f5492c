"""Plots of reports, as SVG images that need nothing from outside."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plot:
    """One picture.

    Attributes:
        title: what it is of.
        reading: how to read it, one or two sentences.
        svg: the picture.
    """

    title: str
    reading: str
    svg: bytes

    @property
    def image(self) -> str:
        """A ``data:`` URI."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode('ascii')}"


def plot(title: str, reading: str, figure: Figure) -> Plot:
    """The figure as a plot."""
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(title, reading, file.getvalue())


def new_axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty plot of the reports' common size."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
