"""When the link, the draft and the target worked: spans of time, kept only while somebody looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

Lane = Literal["link", "draft", "target", "other"]
LANES: tuple[Lane, ...] = get_args(Lane)
MAX_SPANS = 65536
"""Spans kept; the oldest go first. A cycle of a 30-layer model leaves some hundred."""


class Span(NamedTuple):
    """One piece of work: ``start`` and ``end`` are seconds of ``time.monotonic``."""

    lane: Lane
    start: float
    end: float


class Timeline:
    """A recorder that is off until ``start``; off, ``record`` costs one attribute look-up.

    All methods may be called from any thread. The clock is ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.recording = False
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def start(self) -> None:
        """Forget what was recorded before, and record from now on."""
        with self._lock:
            self._spans.clear()
            self.recording = True

    def stop(self) -> None:
        """Record no more; what was recorded stays."""
        self.recording = False

    def record(self, lane: Lane, start: float, end: float) -> None:
        """Keep one span; no effect while the recorder is off.

        Args:
            lane: who worked.
            start: ``time.monotonic`` before the work.
            end: the same after it.
        """
        if self.recording:
            with self._lock:
                self._spans.append(Span(lane, start, end))

    def spans(self, seconds: float | None = None) -> list[Span]:
        """What was recorded, in the order of its starts.

        Args:
            seconds: only what ended within this time before the last end; ``None`` for all.
        """
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span.start)
        if seconds is None or not spans:
            return spans
        first = max(span.end for span in spans) - seconds
        return [span for span in spans if span.end > first]


def merged(spans: Iterable[Span], lane: Lane) -> list[tuple[float, float]]:
    """The times at which ``lane`` worked, as disjoint ascending intervals."""
    intervals: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.lane == lane):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], end)
        elif end > start:
            intervals.append((start, end))
    return intervals


def link_shares(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """How the time from ``start`` to ``end`` divides: the link busy, or what ran while it idled.

    Returns:
        Seconds by ``link``, ``draft``, ``target`` and ``other`` (neither draft nor target ran);
        they sum to ``end - start``.
    """
    spans = list(spans)
    lanes: tuple[Lane, ...] = ("link", "draft", "target")
    busy = {lane: merged(spans, lane) for lane in lanes}
    edges = {start, end}
    for intervals in busy.values():
        edges.update(edge for pair in intervals for edge in pair if start < edge < end)
    shares: dict[str, float] = dict.fromkeys((*lanes, "other"), 0.0)
    position = dict.fromkeys(lanes, 0)
    for begin, stop in pairwise(sorted(edges)):
        owner = "other"
        for lane in lanes:
            intervals, index = busy[lane], position[lane]
            while index < len(intervals) and intervals[index][1] <= begin:
                index += 1
            position[lane] = index
            if index < len(intervals) and intervals[index][0] <= begin:
                owner = lane
                break
        shares[owner] += stop - begin
    return shares
