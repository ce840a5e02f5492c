"""SubSpec's metrics at the API server's ``/metrics``, and its line a minute in the log.

The counters live in the worker, the server is another process. Each engine step's growth of a
worker's report rides in the one dictionary that vLLM 0.32 carries from a worker's output to the
stat loggers without looking into it: the statistics of an encoder cache connector, which
``refuse_arguments`` keeps free. Growth is what makes several API servers add up: each step's goes
to one of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
from vllm.v1.outputs import ECConnectorOutput

from vllm_subspec.integration.statistics import Fallback
from vllm_subspec.statistics import Report, Statistics, total

logger = init_logger("vllm.subspec")

PREFIX = "vllm:subspec_"
SECONDS_BETWEEN_LINES = 60.0
TOKENS_A_PASS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
_KEY = "subspec"
_LABELS = ("model_name", "engine")
_Labels = tuple[str, str]


def carrying(report: Report) -> ECConnectorOutput:
    """A part of a worker's output that brings a report to the process with the stat loggers."""
    return ECConnectorOutput(ec_connector_stats=ECConnectorStats({_KEY: dict(report)}))


def take_report(stats: SchedulerStats | None) -> Report | None:
    """The report that ``carrying`` put in, which vLLM's own loggers then never see."""
    carried = None if stats is None else stats.ec_connector_stats
    if stats is None or carried is None or _KEY not in carried:
        return None
    stats.ec_connector_stats = None
    report: Report = carried[_KEY]
    return report


@dataclass(frozen=True)
class _Count:
    """A counter, or one of a counter's labels: its growth is an attribute of ``Statistics``."""

    name: str
    documentation: str
    attribute: str
    label: tuple[str, str] | None = None


_DRAFT_SECONDS = "Time spent drafting, by phase: between the target's passes or within them."
_DRAFT_STEPS = "Levels drafted, by phase: between the target's passes or within them."
_COUNTS = (
    _Count("passes", "Verification passes, one per request and engine step.", "target_passes"),
    _Count("undrafted_passes", "Passes that verified no draft.", "undrafted_passes"),
    _Count("committed_tokens", "Tokens that passes committed, bonus included.", "committed_tokens"),
    _Count("drafted_nodes", "Tree nodes that passes verified.", "drafted_nodes"),
    _Count("engine_steps", "Passes over the weights, prompts' included.", "engine_steps"),
    _Count("busy_seconds", "Time in which requests were running.", "busy_seconds"),
    _Count("target_steps", "Engine steps without prompt tokens.", "decode_steps"),
    _Count("target_seconds", "Time of those in target and sampler.", "target_seconds"),
    _Count("draft_steps", _DRAFT_STEPS, "draft_steps", ("phase", "between")),
    _Count("draft_steps", _DRAFT_STEPS, "overlapped_draft_steps", ("phase", "within")),
    _Count("draft_seconds", _DRAFT_SECONDS, "draft_seconds", ("phase", "between")),
    _Count("draft_seconds", _DRAFT_SECONDS, "overlapped_draft_seconds", ("phase", "within")),
    _Count("stopped_drafts", "Drafts that another level promised too little.", "stopped_drafts"),
    _Count("link_busy_seconds", "Time in which weights were read.", "stream_read_busy_s"),
    _Count("link_wait_seconds", "Time the target waited for weights, idle.", "stream_wait_s"),
    _Count("link_read_bytes", "Bytes of weights read.", "stream_bytes_read"),
    _Count("link_retries", "Reads that failed and were tried again.", "stream_retries"),
)
_GAUGES = (
    _Count("layers", "Decoder layers by place.", "resident_layers", ("place", "resident")),
    _Count("layers", "Decoder layers by place.", "streamed_layers", ("place", "streamed")),
    _Count("memory_bytes", "Weights in memory.", "resident_bytes", ("part", "resident_layers")),
    _Count("memory_bytes", "Weights in memory.", "shadow_bytes", ("part", "shadows")),
    _Count("memory_bytes", "Weights in memory.", "slot_bytes", ("part", "slots")),
    _Count("pass_bytes", "Bytes that one pass streams.", "streamed_bytes_per_pass"),
    _Count("worker_memory_bytes", "Resident memory of the worker.", "worker_memory_bytes"),
)


class Metrics:
    """What Prometheus collects, of all engines that report to this process.

    Units are seconds and bytes; counters make rates, and ratios of rates the shares (tau, link
    utilisation, time split). vLLM's own ``vllm:spec_decode_*`` stay beside them.

    Args:
        model_name: as it is served.
        engines: indices of the engines.
    """

    def __init__(self, model_name: str, engines: list[int]) -> None:
        self._labels: dict[int, _Labels] = {index: (model_name, str(index)) for index in engines}
        self._counters = _by_name(_COUNTS, Counter)
        self._gauges = _by_name(_GAUGES, Gauge, multiprocess_mode="mostrecent")
        self._length = Histogram(
            f"{PREFIX}acceptance_length",
            "Tokens committed per pass.",
            _LABELS,
            buckets=TOKENS_A_PASS,
        )
        self._accepted = _by_label(Counter, "accepted_nodes", "Nodes accepted, by level.", "level")
        self._drafted = _by_label(Counter, "verified_levels", "Passes that verified it.", "level")
        self._fallbacks = _by_label(
            Counter, "fallbacks", "Passes with less than a tree, by reason.", "reason"
        )
        self._bits = _by_label(
            Gauge,
            "shadow_layers",
            "Layers by bits of their shadow.",
            "bits",
            multiprocess_mode="mostrecent",
        )
        for labels in self._labels.values():  # a series that appears at 1 has no rate
            self._length.labels(*labels)
            for count in _COUNTS:
                _child(self._counters, count, labels)
            for reason in get_args(Fallback):
                self._fallbacks.labels(*labels, reason)

    def observe(self, grown: Statistics, engine: int) -> None:
        """Add what an engine counted in a step, and show its sizes."""
        labels = self._labels[engine]
        for count in _COUNTS:
            _child(self._counters, count, labels).inc(getattr(grown, count.attribute))
        for gauge in _GAUGES:
            _child(self._gauges, gauge, labels).set(getattr(grown, gauge.attribute))
        for tokens, passes in enumerate(grown.passes_by_tokens, start=1):
            for _ in range(passes):
                self._length.labels(*labels).observe(tokens)
        levels = zip(grown.accepted_by_level, grown.drafted_by_level, strict=True)
        for level, (accepted, drafted) in enumerate(levels, start=1):
            self._accepted.labels(*labels, str(level)).inc(accepted)
            self._drafted.labels(*labels, str(level)).inc(drafted)
        for reason, fallbacks in grown.fallbacks.items():
            self._fallbacks.labels(*labels, reason).inc(fallbacks)
        for bits, layers in grown.layers_by_bits.items():
            self._bits.labels(*labels, bits).set(layers)


def _by_name(counts: tuple[_Count, ...], kind: Any, **options: Any) -> dict[str, Any]:
    return {
        count.name: kind(
            PREFIX + count.name,
            count.documentation,
            (*_LABELS, *([count.label[0]] if count.label else [])),
            **options,
        )
        for count in {count.name: count for count in counts}.values()
    }


def _by_label(kind: Any, name: str, documentation: str, label: str, **options: Any) -> Any:
    return kind(PREFIX + name, documentation, (*_LABELS, label), **options)


def _child(metrics: Mapping[str, Any], count: _Count, labels: _Labels) -> Any:
    return metrics[count.name].labels(*labels, *([count.label[1]] if count.label else []))


class MinuteLine:
    """One engine's line in the log: what it did since its last one, while it works.

    Args:
        engine: its index.
    """

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._last = time.monotonic()
        self._running = 0
        self._tokens = 0
        self._grown: dict[str, Any] = {}

    def add(
        self, report: Report | None, stats: SchedulerStats | None, tokens: IterationStats | None
    ) -> None:
        """Take in what came from one engine step."""
        if report is not None:
            self._grown = total([self._grown, report])
        if stats is not None:
            self._running = stats.num_running_reqs
        if tokens is not None:
            self._tokens += tokens.num_generation_tokens

    def due(self, now: float) -> str | None:
        """The line, if the last one is a minute old and something was done since."""
        grown = Statistics.from_report(self._grown)
        if now - self._last < SECONDS_BETWEEN_LINES or not grown.engine_steps:
            return None
        text = self._text(grown)
        self._last, self._tokens, self._grown = now, 0, {}
        return text

    def _text(self, grown: Statistics) -> str:
        parts = [f"{self._tokens / grown.busy_seconds:.1f} tokens/s while it worked"]
        if grown.target_passes:
            parts.append(f"{grown.tau:.2f} tokens a pass")
        if grown.stream_bytes_read:
            parts.append(
                f"link busy {grown.link_utilization:.0%} at {grown.link_bandwidth / 1e9:.2f} GB/s"
            )
        parts.append(f"{self._running} running")
        if grown.stream_retries:
            parts.append(f"{grown.stream_retries} reads tried again")
        fallbacks = {reason: count for reason, count in grown.fallbacks.items() if count}
        parts += [f"{reason} {count}" for reason, count in fallbacks.items()]
        return f"SubSpec, engine {self._engine}: {', '.join(parts)}"


class SubSpecStatLogger(AggregateStatLoggerBase):
    """Shows what workers report; must come before vLLM's own loggers (see ``take_report``).

    Args:
        vllm_config: of the engines.
        engine_indexes: of those that report to this process.
        writes_lines: whether this process sees every step of them.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], writes_lines: bool = True
    ) -> None:
        self._metrics = Metrics(str(vllm_config.model_config.served_model_name), engine_indexes)
        self._lines = {index: MinuteLine(index) for index in engine_indexes}
        self._writes_lines = writes_lines

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM for each engine step."""
        report = take_report(scheduler_stats)
        if report is not None:
            self._metrics.observe(Statistics.from_report(report), engine_idx)
        self._lines[engine_idx].add(report, scheduler_stats, iteration_stats)

    def log(self) -> None:
        """Called by vLLM every ``VLLM_LOG_STATS_INTERVAL`` seconds."""
        for line in self._lines.values():
            text = line.due(time.monotonic())
            if text is not None and self._writes_lines:
                logger.info(text)

    def log_engine_initialized(self) -> None:
        """Nothing: the worker has said what it loaded."""
