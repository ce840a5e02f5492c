"""One decode cycle as a picture: who worked when, as PNG and as one HTML file without requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median_low

from PIL import Image, ImageDraw, ImageFont

from vllm_subspec.timeline import LANES, Lane, Span, link_shares, merged

_COLOURS: dict[Lane, str] = {
    "link": "#3b6fb6",
    "draft": "#d98324",
    "target": "#3d9a55",
    "other": "#8a8a8a",
}
_WIDTH, _LANE, _LEFT, _TOP, _BOTTOM, _RIGHT = 1200, 46, 90, 70, 46, 30
_HEIGHT = _TOP + _LANE * len(LANES) + _BOTTOM
_TICKS = 10


@dataclass(frozen=True)
class Cycle:
    """One decode step: the target's pass, its sampling, and the next draft.

    Attributes:
        spans: what ran in it, cut at its ends; seconds of ``time.monotonic``.
        start: when it began.
        end: when the next one could begin.
    """

    spans: tuple[Span, ...]
    start: float
    end: float

    @property
    def caption(self) -> str:
        """How long it took, and what the link's time went to."""
        seconds = self.end - self.start
        shares = {name: part / seconds for name, part in self.shares().items()}
        return (
            f"One decode cycle of {1e3 * seconds:.0f} ms: link busy {shares['link']:.0%}; idle "
            f"{shares['draft']:.0%} while drafting, {shares['target']:.0%} in the target's pass, "
            f"{shares['other']:.0%} in between"
        )

    def shares(self) -> dict[str, float]:
        """See ``timeline.link_shares``; seconds."""
        return link_shares(self.spans, self.start, self.end)


def typical_cycle(spans: Sequence[Span], steps: Sequence[tuple[float, float]]) -> Cycle:
    """The cycle of median length, of those that another one followed.

    Args:
        spans: recorded while the steps ran.
        steps: start and end of each decode step of one answer, in order, at least one.
    """
    inner = steps[:-1] or steps  # the last step drafts nothing
    length = median_low(end - start for start, end in inner)
    start, end = next(step for step in inner if step[1] - step[0] == length)
    cut = [
        Span(span.lane, max(span.start, start), min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    ]
    return Cycle(tuple(cut), start, end)


def write_pictures(cycle: Cycle, folder: Path) -> tuple[Path, Path]:
    """Write ``cycle.png`` and ``cycle.html`` into ``folder`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    png, html = folder / "cycle.png", folder / "cycle.html"
    _draw(cycle).save(png)
    html.write_text(_page(cycle), encoding="utf-8")
    return png, html


def _x(cycle: Cycle, time: float) -> float:
    share = (time - cycle.start) / (cycle.end - cycle.start)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _boxes(cycle: Cycle) -> list[tuple[Lane, float, float, float, float, str]]:
    """Lane, x0, y0, x1, y1 and label of each interval; overlapping spans of a lane are one."""
    boxes: list[tuple[Lane, float, float, float, float, str]] = []
    for row, lane in enumerate(LANES):
        top = _TOP + row * _LANE
        for start, end in merged(cycle.spans, lane):
            left = _x(cycle, start)
            right = max(_x(cycle, end), left + 1)  # a short span stays visible
            label = f"{lane}: {1e3 * (start - cycle.start):.1f} to {1e3 * (end - cycle.start):.1f}"
            boxes.append((lane, left, top + 6, right, top + _LANE - 6, f"{label} ms"))
    return boxes


def _ticks(cycle: Cycle) -> list[tuple[float, str]]:
    step = (cycle.end - cycle.start) / _TICKS
    times = [cycle.start + index * step for index in range(_TICKS + 1)]
    return [(_x(cycle, time), f"{1e3 * (time - cycle.start):.0f} ms") for time in times]


def _draw(cycle: Cycle) -> Image.Image:
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(15)
    floor = _TOP + _LANE * len(LANES)
    draw.text((_LEFT, 24), cycle.caption, fill="black", font=font)
    for x, label in _ticks(cycle):
        draw.line((x, _TOP, x, floor), fill="#dddddd")
        draw.text((x, floor + 8), label, fill="black", font=font, anchor="ma")
    for row, lane in enumerate(LANES):
        middle = _TOP + (row + 0.5) * _LANE
        draw.text((_LEFT - 10, middle), lane, fill="black", font=font, anchor="rm")
    for lane, left, top, right, bottom, _ in _boxes(cycle):
        draw.rectangle((left, top, right, bottom), fill=_COLOURS[lane])
    return image


def _page(cycle: Cycle) -> str:
    floor = _TOP + _LANE * len(LANES)
    parts = [
        f'<text x="{_LEFT}" y="36">{escape(cycle.caption)}</text>',
        *(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{floor}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{floor + 22}" text-anchor="middle">{label}</text>'
            for x, label in _ticks(cycle)
        ),
        *(
            f'<text x="{_LEFT - 10}" y="{_TOP + (row + 0.5) * _LANE + 5}" '
            f'text-anchor="end">{lane}</text>'
            for row, lane in enumerate(LANES)
        ),
        *(
            f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}" '
            f'fill="{_COLOURS[lane]}"><title>{label}</title></rect>'
            for lane, left, top, right, bottom, label in _boxes(cycle)
        ),
    ]
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="15">'
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>One decode cycle</title></head>\n<body>{svg}\n" + "\n".join(parts) + "\n</svg>"
        "<p>Point at a bar to read its times.</p></body></html>\n"
    )
