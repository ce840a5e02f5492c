"""What engines counted, and what follows from it; plain values that travel through any RPC.

A worker reports a flat dictionary (a *report*). Reports are subtracted and added here, for whoever
looks at a span of time, and ``Statistics`` gives them types and derived figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

Report = Mapping[str, Any]

SIZES = frozenset(
    {
        "streamed_bytes_per_pass",
        "resident_layers",
        "streamed_layers",
        "layers_by_bits",
        "resident_bytes",
        "shadow_bytes",
        "slot_bytes",
        "remembered_requests",
        "worker_memory_bytes",
    }
)
"""Entries of a report that do not count: a span of time has the last one."""

_FALLBACK = "fallback_"


def growth(before: Report, after: Report) -> dict[str, Any]:
    """What each counter grew by; lists grow by item, and may get longer. Sizes stay as they are."""
    return {
        name: value if name in SIZES else _combined(value, before[name], -1)
        for name, value in after.items()
    }


def total(reports: Iterable[Report]) -> dict[str, Any]:
    """Counters of several spans of time together; lists by item, as long as the longest."""
    together: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            known = together.get(name)
            counts = known is not None and name not in SIZES
            together[name] = _combined(known, value, 1) if counts else value
    return together


def _combined(value: Any, other: Any, sign: int) -> Any:
    if not isinstance(value, list | tuple):
        return value + sign * other
    size = max(len(value), len(other))
    pairs = zip(_padded(value, size), _padded(other, size), strict=True)
    return [a + sign * b for a, b in pairs]


def _padded(values: Sequence[int], size: int) -> list[int]:
    return [*values, *[0] * (size - len(values))]


@dataclass(frozen=True)
class Statistics:
    """One engine's counters since start, or what they grew by in a span of time (``later -
    earlier``), and what it keeps in memory.

    A pass is one request's verification in one engine step; a prompt's own pass is none. Seconds
    are wall time.

    Attributes:
        target_passes: passes.
        undrafted_passes: passes that verified no draft, whatever the reason.
        committed_tokens: tokens that passes committed, bonus tokens included, none past an end.
        drafted_nodes: nodes that passes verified.
        accepted_by_level: how often a node of level i + 1 was accepted.
        drafted_by_level: how often such a level was verified.
        fallbacks: how often a request got less than a tree, by reason.
        engine_steps: passes of the target over its weights, those for prompts included.
        busy_seconds: time in which requests were running: steps, and what lies between them.
        decode_steps: engine steps without prompt tokens.
        target_seconds: time of those in the target and its sampler.
        draft_steps: levels drafted between target passes.
        draft_seconds: time spent there.
        overlapped_draft_steps: levels drafted within target passes, in waits for weights.
        overlapped_draft_seconds: time spent there.
        followed_drafts: drafts that went on below the path just accepted.
        started_drafts: drafts that began at a root alone.
        stopped_drafts: drafts that stopped since another level promised less than its price.
        stream_bytes_read: bytes that came over the link.
        stream_reads: reads that ended.
        stream_read_busy_s: time in which at least one read was in flight.
        stream_wait_s: time that the target waited for weights and did nothing else.
        stream_retries: reads that failed and were tried again.
        streamed_bytes_per_pass: bytes that one engine step reads.
        resident_layers: decoder layers whose weights stay on the fast tier.
        streamed_layers: the others.
        layers_by_bits: number of layers by the bits of their shadow ("4", "6", "8").
        resident_bytes: weights of resident layers.
        shadow_bytes: all shadows.
        slot_bytes: all slots that streamed layers pass through.
        remembered_requests: requests of which speculation remembers anything.
        worker_memory_bytes: resident memory of the worker's process.
    """

    target_passes: int = 0
    undrafted_passes: int = 0
    committed_tokens: int = 0
    drafted_nodes: int = 0
    accepted_by_level: tuple[int, ...] = ()
    drafted_by_level: tuple[int, ...] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    engine_steps: int = 0
    busy_seconds: float = 0.0
    decode_steps: int = 0
    target_seconds: float = 0.0
    draft_steps: int = 0
    draft_seconds: float = 0.0
    overlapped_draft_steps: int = 0
    overlapped_draft_seconds: float = 0.0
    followed_drafts: int = 0
    started_drafts: int = 0
    stopped_drafts: int = 0
    stream_bytes_read: int = 0
    stream_reads: int = 0
    stream_read_busy_s: float = 0.0
    stream_wait_s: float = 0.0
    stream_retries: int = 0
    streamed_bytes_per_pass: int = 0
    resident_layers: int = 0
    streamed_layers: int = 0
    layers_by_bits: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    shadow_bytes: int = 0
    slot_bytes: int = 0
    remembered_requests: int = 0
    worker_memory_bytes: int = 0

    @classmethod
    def from_report(cls, report: Report) -> Statistics:
        """What a worker reported; what the report does not tell is 0."""
        known = {f.name: report[f.name] for f in fields(cls) if f.name in report}
        for name in ("accepted_by_level", "drafted_by_level"):
            known[name] = tuple(known.get(name, ()))
        known["fallbacks"] = {
            name.removeprefix(_FALLBACK): count
            for name, count in report.items()
            if name.startswith(_FALLBACK)
        }
        return cls(**known)

    def to_report(self) -> dict[str, Any]:
        """The flat dictionary that ``from_report`` takes."""
        report = {f.name: getattr(self, f.name) for f in fields(self)}
        fallbacks = report.pop("fallbacks")
        return report | {_FALLBACK + reason: count for reason, count in fallbacks.items()}

    def __sub__(self, earlier: Statistics) -> Statistics:
        """What was counted since ``earlier``, of the same engine; sizes are the later ones."""
        before = self._zero() | earlier.to_report()
        return Statistics.from_report(growth(before, self.to_report()))

    def _zero(self) -> dict[str, Any]:
        return {_FALLBACK + reason: 0 for reason in self.fallbacks}

    @classmethod
    def of_ranks(cls, reports: Sequence[Report]) -> Statistics:
        """Ranks that share each layer, as one engine.

        They count the same passes, tokens and drafts: those are the first rank's. Each reads and
        keeps its own part: bytes, reads and retries are summed. They wait for each other: seconds
        are those of the rank that took the longest.
        """
        merged = dict(reports[0])
        for name in merged:
            values = [report[name] for report in reports]
            if name in _SUMMED_OVER_RANKS:
                merged[name] = sum(values)
            elif isinstance(values[0], float):
                merged[name] = max(values)
        return cls.from_report(merged)

    # -- derived ---------------------------------------------------------------------------------

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per pass; 0 before the first."""
        return _ratio(self.committed_tokens, self.target_passes)

    @property
    def nodes_per_pass(self) -> float:
        """Nodes verified per pass."""
        return _ratio(self.drafted_nodes, self.target_passes)

    @property
    def levels_per_pass(self) -> float:
        """Levels verified per pass: the mean depth of trees."""
        return _ratio(sum(self.drafted_by_level), self.target_passes)

    @property
    def acceptance_by_level(self) -> tuple[float, ...]:
        """Share of the passes that verified level i + 1 in which a node of it was accepted."""
        levels = zip(self.accepted_by_level, self.drafted_by_level, strict=True)
        return tuple(accepted / drafted for accepted, drafted in levels if drafted)

    @property
    def passes_by_tokens(self) -> tuple[int, ...]:
        """Number of passes that committed i + 1 tokens."""
        reaching = (self.target_passes, *self.accepted_by_level, 0)
        return tuple(here - deeper for here, deeper in pairwise(reaching))

    @property
    def draft_step_s(self) -> float:
        """Seconds of one level drafted between passes; 0 where there was none."""
        return _ratio(self.draft_seconds, self.draft_steps)

    @property
    def target_pass_s(self) -> float:
        """Seconds of one engine step without prompt tokens, its drafting left out."""
        return _ratio(self.target_seconds, self.decode_steps)

    @property
    def draft_steps_in_passes(self) -> float:
        """Share of the drafted levels that passes hid."""
        drafted = self.draft_steps + self.overlapped_draft_steps
        return _ratio(self.overlapped_draft_steps, drafted)

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second of the link while it was busy."""
        return _ratio(self.stream_bytes_read, self.stream_read_busy_s)

    @property
    def link_utilization(self) -> float:
        """Share of the time in which requests ran that the link was busy, 0 to 1."""
        return min(1.0, _ratio(self.stream_read_busy_s, self.busy_seconds))

    @property
    def bound_share(self) -> float:
        """Share that was reached of the bound tau * link bandwidth / streamed bytes, 0 to 1: how
        much of the time went into the reads that the steps could not do without."""
        needed = self.engine_steps * self.streamed_bytes_per_pass
        seconds = _ratio(needed, self.link_bandwidth)
        return min(1.0, _ratio(seconds, self.busy_seconds))


_SUMMED_OVER_RANKS = frozenset(
    {
        "stream_bytes_read",
        "stream_reads",
        "stream_retries",
        "streamed_bytes_per_pass",
        "resident_bytes",
        "shadow_bytes",
        "slot_bytes",
        "worker_memory_bytes",
    }
)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
