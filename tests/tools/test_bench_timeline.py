"""The picture of one decode cycle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from vllm_subspec.timeline import Span
from vllm_subspec.tools.timeline_plot import typical_cycle, write_pictures

SPANS = [
    Span("target", 10.0, 10.6),
    Span("link", 9.5, 10.5),  # began in the cycle before
    Span("draft", 10.7, 11.5),  # ends in the next one
    Span("other", 10.6, 10.7),
    Span("link", 20.0, 21.0),  # another cycle
]
STEPS = [(0.0, 9.0), (10.0, 11.0), (20.0, 20.5), (30.0, 30.1)]


def test_the_cycle_of_median_length_without_the_last() -> None:
    cycle = typical_cycle(SPANS, STEPS)
    assert (cycle.start, cycle.end) == (10.0, 11.0)
    assert cycle.spans == (
        Span("target", 10.0, 10.6),
        Span("link", 10.0, 10.5),
        Span("draft", 10.7, 11.0),
        Span("other", 10.6, 10.7),
    )
    assert cycle.shares() == pytest.approx({"link": 0.5, "draft": 0.3, "target": 0.1, "other": 0.1})
    assert cycle.caption == (
        "One decode cycle of 1000 ms: link busy 50%; idle 30% while drafting, 10% in the target's "
        "pass, 10% in between"
    )
    assert typical_cycle([], [(1.0, 2.0)]).end == 2.0


def test_pictures_show_every_span_and_ask_nobody(tmp_path: Path) -> None:
    cycle = typical_cycle(SPANS, STEPS)
    png, html = write_pictures(cycle, tmp_path / "new")
    page = html.read_text()
    assert page.count("<rect ") == 4
    assert "<title>draft: 700.0 to 1000.0 ms</title>" in page
    assert not re.search(r"(src|href)=|https?:|<script|@import|url\(", page)
    image = Image.open(png).convert("RGB")
    colours = {image.getpixel((x, y)) for x in range(0, 1200, 5) for y in range(80, 250, 5)}
    for colour in ((59, 111, 182), (217, 131, 36), (61, 154, 85), (138, 138, 138)):
        assert colour in colours
