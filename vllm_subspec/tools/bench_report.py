"""The benchmark's result for people: markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_subspec.plan import Placement

_Spread = Mapping[str, Any]
PUBLISHED_ROUNDS = 5
"""A figure of fewer says so."""
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens_per_s", "tokens/s", lambda v: f"{v:.2f}"),
    ("speedup", "over plain", lambda v: f"{v:.2f}"),
    ("decode_tokens_per_s", "decoding", lambda v: f"{v:.2f}"),
    ("acceptance_length", "tau", lambda v: f"{v:.2f}"),
    ("levels_per_pass", "depth", lambda v: f"{v:.1f}"),
    ("cycle_ms", "cycle, ms", lambda v: f"{v:.0f}"),
    ("draft_step_ms", "draft step, ms", lambda v: f"{v:.1f}"),
    ("draft_steps_in_passes", "of them in passes", lambda v: f"{v:.0%}"),
    ("target_pass_ms", "target pass, ms", lambda v: f"{v:.0f}"),
    ("streamed_bytes_per_pass", "streamed a pass, MB", lambda v: f"{v / 1e6:.0f}"),
    ("link_bandwidth", "link, GB/s", lambda v: f"{v / 1e9:.2f}"),
    ("link_utilization", "link busy", lambda v: f"{v:.0%}"),
    ("bound_share", "of the bound", lambda v: f"{v:.0%}"),
    ("joules_per_token", "J/token, whole machine", lambda v: f"{v:.2f}"),
)
_LOSSES = {
    "link_needed": "the link reads what passes need: the bound itself",
    "link_read_in_vain": "the link reads what is read again",
    "idle_while_drafting": "the link idles while drafting, slots full",
    "idle_while_verifying": "the link idles in the target's pass: computing that no read hid",
    "idle_in_bookkeeping": "the link idles in between: scheduler, sampling, output",
}


def render(report: Mapping[str, Any]) -> str:
    """Everything that ``--json`` holds and a reader wants, as markdown."""
    lines = [_workload(report), "", *_gate(report["gate"])]
    if not report["gate"]["passed"]:
        return "\n".join([*lines, "", "The gate is red, so no speed is told."])
    modes = report["modes"]
    lines += ["", *_speeds(modes), ""]
    if report["no_energy"]:
        lines += [f"Energy: no counter readable: {report['no_energy']}", ""]
    lines += [*_noise_floor(report.get("noise_floor", {})), *_memory(modes), ""]
    lines += [
        *_lost({name: told["losses"] for name, told in modes.items() if "losses" in told}),
        "",
    ]
    for name, told in modes.items():
        if "measured_over_predicted" in told:
            plan = told["placement"]["prediction"]
            link_s = plan["link_utilization"] * plan["cycle_s"]
            lines.append(
                f"{name}: the plan predicted {plan['tokens_per_s']:.2f} tokens/s decoding by a "
                f"link of {plan['streamed_bytes'] / link_s / 1e9:.2f} GB/s; measured over "
                f"predicted {told['measured_over_predicted']:.2f}"
            )
    if "speedup" in report:
        lines.append(
            f"**subspec over plain: {report['speedup']:.2f}x** (whole requests; decoding alone "
            f"{report['decode_speedup']:.2f}x)"
        )
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def gib(nbytes: float) -> str:
    """Bytes as GiB with two decimals."""
    return f"{nbytes / 2**30:.2f} GiB"


def _workload(report: Mapping[str, Any]) -> str:
    work = report["workload"]
    text = (
        f"{work['model']}, budget {gib(report['budget_bytes'])}, {work['prompts']} prompts, "
        f"{work['max_tokens']} new tokens each, greedy where no temperature T is named, one at a "
        f"time where no batch is; {work['repeats']} rounds"
    )
    if work["repeats"] > 1:
        text += ", means ± half of their 95 % intervals (Student's t over the rounds)"
    if work["repeats"] < PUBLISHED_ROUNDS:
        text += f"; FEWER ROUNDS THAN THE {PUBLISHED_ROUNDS} OF A PUBLISHED FIGURE"
    emulated = work["options"].get("emulate_link")
    return text if emulated is None else f"{text}; EMULATED LINK of {emulated / 1e9:.2f} GB/s"


def _gate(gate: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, str(found["answers"]), str(found["near_ties"]), str(found["wrong_tokens"])]
        for name, found in gate["modes"].items()
    ]
    return table(["gate", "answers", "near-ties", "wrong"], rows)


def _speeds(modes: Mapping[str, Any]) -> list[str]:
    columns = [c for c in _COLUMNS if any(c[0] in told for told in modes.values())]
    rows = [
        [name, told["killed"], *["-"] * (len(columns) - 1)]
        if "killed" in told
        else [_named(name, told), *[_cell(told.get(key), show) for key, _, show in columns]]
        for name, told in modes.items()
    ]
    return table(["mode", *[title for _, title, _ in columns]], rows)


def _named(name: str, told: Mapping[str, Any]) -> str:
    return name if told["batch"] == 1 else f"{name}, batch {told['batch']}"


def _cell(value: _Spread | None, show: Callable[[float], str]) -> str:
    if value is None:
        return "-"
    middle = show(value["mean"])
    return middle if value["ci95"] is None else f"{middle} ± {show(value['ci95'])}"


def _noise_floor(floors: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, ratios in floors.items():
        found = ratios["speedup"]
        farthest = max(abs(found["min"] - 1), abs(found["max"] - 1))
        lines += [
            f"Noise floor: {name} again over itself {_cell(found, lambda v: f'{v:.3f}')}, farthest "
            f"round {farthest:.1%} off: smaller differences between modes say nothing",
            "",
        ]
    return lines


def _memory(modes: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, told in modes.items():
        if "killed" in told:
            continue
        use = max(told["memory"], key=lambda use: int(use["peak_rss"]))
        limit = f"{gib(use['limit'])}, " + (
            "enforced" if use["enforced"] else f"NOT ENFORCED ({use['why_not']})"
        )
        held = "yes" if use["within"] else "NO"
        parts = [gib(use[part]) for part in ("peak_rss", "peak_anonymous", "peak_file")]
        rows.append([name, *parts, limit, held, _placed(told.get("placement"))])
    head = ["memory", "peak RSS", "anonymous", "file", "limit", "within", "placement"]
    return table(head, rows)


def _placed(placement: Mapping[str, Any] | None) -> str:
    return "-" if placement is None else describe_placement(Placement.from_json(placement))


def describe_placement(placement: Placement) -> str:
    """One line: residents, streamed layers by bits of their shadows, head, slots, tree."""
    shadows = Counter(placement.bits[layer] for layer in placement.streamed)
    parts = [f"{placement.num_layers - len(placement.streamed)} resident"]
    parts += [
        f"{count} streamed" + ("" if bits is None else f" with {bits} bits")
        for bits, count in sorted(shadows.items(), key=lambda pair: pair[0] or 0)
    ]
    head = "" if placement.head_bits is None else f" with {placement.head_bits} bits"
    parts += [f"head {placement.head}{head}", f"{placement.num_slots} slots"]
    if (tree := placement.tree) is not None:
        parts.append(f"tree {tree.width}x{tree.depth} of {tree.node_count} nodes")
    return ", ".join(parts)


def _lost(losses: Mapping[str, Mapping[str, _Spread]]) -> list[str]:
    """Where the decode time goes, as seen from the link."""
    rows = [
        [mode, *[_cell(shares[name], lambda value: f"{value:.1%}") for name in _LOSSES]]
        for mode, shares in losses.items()
    ]
    return table(["of the decode time", *_LOSSES.values()], rows) if rows else []
