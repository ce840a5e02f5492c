"""The recorder of spans, and how the time of a cycle divides by them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec import timeline
from vllm_subspec.timeline import LANES, Span, Timeline, link_shares, merged


def test_records_nothing_until_started_and_nothing_after() -> None:
    recorder = Timeline()
    recorder.record("link", 0.0, 1.0)
    assert recorder.spans() == []
    recorder.start()
    recorder.record("draft", 2.0, 3.0)
    recorder.record("link", 1.0, 2.0)
    recorder.stop()
    recorder.record("target", 4.0, 5.0)
    assert recorder.spans() == [Span("link", 1.0, 2.0), Span("draft", 2.0, 3.0)]
    recorder.start()
    assert recorder.spans() == []


def test_last_seconds_only() -> None:
    recorder = Timeline()
    recorder.start()
    for second in range(10):
        recorder.record("other", second, second + 1.0)
    assert [span.start for span in recorder.spans(2.5)] == [7, 8, 9]
    assert len(recorder.spans(None)) == 10


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SPANS", 5)
    recorder = Timeline()
    recorder.start()
    for second in range(9):
        recorder.record("link", second, second + 1.0)
    assert [span.start for span in recorder.spans()] == [4, 5, 6, 7, 8]


def test_threads_lose_no_span() -> None:
    recorder = Timeline()
    recorder.start()
    threads = [
        threading.Thread(target=lambda: [recorder.record("link", i, i + 1) for i in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    read = [len(recorder.spans()) for _ in range(20)]  # reading meanwhile is allowed
    for thread in threads:
        thread.join()
    assert len(recorder.spans()) == 2000
    assert read == sorted(read)


def test_link_shares_of_a_cycle_by_hand() -> None:
    spans = [
        Span("draft", 0.0, 4.0),
        Span("link", 0.0, 1.0),  # prefetch while drafting
        Span("target", 5.0, 9.0),
        Span("link", 5.0, 7.0),
        Span("link", 6.0, 8.0),  # two readers at once
    ]
    assert merged(spans, "link") == [(0.0, 1.0), (5.0, 8.0)]
    assert link_shares(spans, 0.0, 10.0) == {"link": 4.0, "draft": 3.0, "target": 1.0, "other": 2.0}
    assert link_shares(spans, 5.0, 6.0) == {"link": 1.0, "draft": 0.0, "target": 0.0, "other": 0.0}


TIMES = st.integers(0, 40)
SPANS = st.lists(
    st.builds(
        lambda lane, start, length: Span(lane, start, start + length),
        st.sampled_from(LANES),
        TIMES,
        st.integers(0, 10),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(SPANS, TIMES, st.integers(1, 20))
def test_link_shares_agree_with_counting_ticks(spans: list[Span], start: int, length: int) -> None:
    expected = dict.fromkeys(("link", "draft", "target", "other"), 0.0)
    for tick in range(start, start + length):
        running = {span.lane for span in spans if span.start <= tick < span.end}
        owner = next((lane for lane in ("link", "draft", "target") if lane in running), "other")
        expected[owner] += 1
    assert link_shares(spans, start, start + length) == expected
