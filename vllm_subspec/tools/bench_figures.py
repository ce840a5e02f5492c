"""From answers and counters to the benchmark's figures: pure arithmetic on a worker's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from scipy.stats import t

from vllm_subspec.plan import Placement
from vllm_subspec.statistics import Statistics, total
from vllm_subspec.tools.measure import Answer, Run, speculation_figures, stream_figures

Figures = dict[str, Any]


def decode_run(result: Mapping[str, Any]) -> Run:
    """A worker's answers as one run whose times and counters are those of decoding only."""
    answers = result["answers"]
    return Run(
        tuple(
            Answer(tuple(a["prompt"]), tuple(a["tokens"]), "", a["decode_seconds"]) for a in answers
        ),
        total(answer["statistics"] for answer in answers),
    )


def figures(result: Mapping[str, Any]) -> Figures:
    """What one worker's run says; times of decode steps, each prompt's own pass left out.

    ``tokens_per_s`` alone is of whole requests, the prompts' passes included. ``bound_share`` is
    the share of tau * link bandwidth / streamed bytes that was reached, ``draft_steps_in_passes``
    the share of draft steps that ran in a pass's waits, ``joules_per_token`` of whole requests, by
    all that the machine did meanwhile. Keys that a mode has no counter for are
    absent.
    """
    run, answers = decode_run(result), result["answers"]
    steps = sum(answer["decode_steps"] for answer in answers)
    decoded = run.new_tokens - sum(1 + answer["early_tokens"] for answer in answers)
    found: Figures = {
        "tokens_per_s": run.new_tokens / sum(answer["seconds"] for answer in answers),
        "decode_tokens_per_s": decoded / run.seconds,
        "acceptance_length": decoded / steps,
        "cycle_ms": 1e3 * run.seconds / steps,
    }
    if result["joules"] is not None:
        found["joules_per_token"] = result["joules"] / run.new_tokens
    if run.statistics.get("target_passes"):
        found |= speculation_figures(run)
        counted = Statistics.from_report(run.statistics)
        found["levels_per_pass"] = counted.levels_per_pass
        found["draft_steps_in_passes"] = counted.draft_steps_in_passes
    if run.statistics.get("stream_bytes_read"):
        found |= stream_figures(run)
        bound = found["acceptance_length"] * found["link_bandwidth"]
        bound /= found["streamed_bytes_per_pass"]
        found["bound_share"] = found["decode_tokens_per_s"] / bound
    return found


def losses(result: Mapping[str, Any], slot_bytes: int) -> Figures:
    """Where the decode time goes as seen from the link, by the counters; shares that sum to 1.

    The counters tell how long the link was busy, not when. Reads while drafting fill free slots
    and no more, so that much is counted there at most; the rest is counted to the target's passes,
    then to what lies between. A recorded timeline tells it exactly.

    Args:
        result: of a worker that speculated over a stream.
        slot_bytes: of all slots together.
    """
    run = decode_run(result)
    counted, seconds = run.statistics, run.seconds
    busy_s = counted["stream_read_busy_s"]
    draft_s, target_s = counted["draft_seconds"], counted["target_seconds"]
    bandwidth = counted["stream_bytes_read"] / busy_s
    needed_s = counted["target_passes"] * counted["streamed_bytes_per_pass"] / bandwidth
    slots_s = counted["target_passes"] * slot_bytes / bandwidth
    busy_drafting = min(draft_s, slots_s, busy_s)
    busy_verifying = min(target_s, busy_s - busy_drafting)
    busy_between = busy_s - busy_drafting - busy_verifying
    return {
        "link_needed": needed_s / seconds,
        "link_read_in_vain": (busy_s - needed_s) / seconds,
        "idle_while_drafting": (draft_s - busy_drafting) / seconds,
        "idle_while_verifying": (target_s - busy_verifying) / seconds,
        "idle_in_bookkeeping": (seconds - draft_s - target_s - busy_between) / seconds,
    }


def slot_bytes(placement: Placement) -> int:
    """Bytes of all slots together, from the ledger."""
    return sum(item.bytes for item in placement.memory if item.name == "slots")


def spread(repeats: Sequence[Figures]) -> dict[str, Any]:
    """Each figure over the repeats (see ``summary``); lists are the first repeat's."""
    return {
        name: value if isinstance(value, list) else summary([figures[name] for figures in repeats])
        for name, value in repeats[0].items()
    }


def ratios(mode: Sequence[Figures], reference: Sequence[Figures]) -> dict[str, Any]:
    """Speed over that of another mode, round by round: what slows a whole round cancels out."""
    return {
        name: summary([a[figure] / b[figure] for a, b in zip(mode, reference, strict=True)])
        for name, figure in (
            ("speedup", "tokens_per_s"),
            ("decode_speedup", "decode_tokens_per_s"),
        )
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Mean, median, least and greatest, and ``ci95``: half the width of the mean's 95 % interval
    (Student's t over the values, one a round), ``None`` of a single one."""
    half = None
    if len(values) > 1:
        half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return {
        "mean": mean(values),
        "ci95": half,
        "median": median(values),
        "min": min(values),
        "max": max(values),
    }
