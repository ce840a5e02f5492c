"""The whole method on the synthetic model: grow, verify, walk, compact, by the engine's own parts.

Random weights agree with nothing, so the acceptance is forced: a stub puts the target's draws on a
path of the tree. The target's pass runs in full and its draws come to the host; only then are they
replaced. So the cycle takes its true time at that acceptance, and says nothing about acceptance.
Drafting goes on beside the prefetch into the slots, and not beyond it: no post-speculation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from subspec_kernels.grow_mask import pack_mask
from subspec_kernels.kv_compact import kv_compact

from gpu_bench.device import Call, Device
from gpu_bench.inputs import PAGE, ModelShape
from gpu_bench.model import Plan, SyntheticModel
from gpu_bench.report import Rows, Tables
from vllm_subspec.draft.growth import Growth
from vllm_subspec.draft.tree import Tree
from vllm_subspec.timeline import Lane, Span, Timeline, link_shares, merged
from vllm_subspec.verify.compaction import compaction_moves
from vllm_subspec.verify.walk import Walk, walk_trees

_PICTURE = 64  # characters of a timeline's line
_PASSES = 3  # measured, after one that warms up


def forced_draws(tree: Tree, tau: int) -> torch.Tensor:
    """Draws, int64 [n + 1], under which a walk visits ``tau`` rows of the deepest path.

    -1, which no node holds, ends it.
    """
    path = tree.ancestor_mask()[-1].nonzero().flatten()[:tau]
    assert len(path) == tau, (len(path), tau)
    draws = torch.full((len(tree) + 1,), -1)
    draws[path[:-1]] = tree.tokens[path[1:] - 1]
    return draws


@dataclass(frozen=True)
class Phases:
    """``time.monotonic`` at a cycle's borders; ``compute_ms`` is the target's on the device."""

    began: float
    drafted: float
    verified: float
    ended: float
    compute_ms: float


class Method:
    """Cycles on one model; call ``prepare`` before the first."""

    def __init__(self, device: Device, model: SyntheticModel, timeline: Timeline) -> None:
        self._device, self._model, self._timeline = device, model, timeline
        self._root = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

    def prepare(self) -> float:
        """Compile, then capture a graph for each level of the draft.

        Returns:
            Seconds that the draft takes without graphs.
        """
        for _ in range(2):
            start = time.monotonic()
            eager = self._new_growth()
            for _ in range(self._model.plan.depth):
                eager.step()
            self._device.synchronize()
            eager_s = time.monotonic() - start
        self._growth = self._new_growth()
        # A growth has other shapes on every level, so each level is a graph of its own.
        self._levels: list[Call] = self._device.capture(
            [self._growth.step] * self._model.plan.depth
        )
        return eager_s

    def cycle(self) -> Phases:
        """Draft, verify, walk, compact."""
        began = time.monotonic()
        for replay in self._levels:
            replay()
        [tree] = self._growth.trees()
        drafted = time.monotonic()
        self._timeline.record("draft", began, drafted)
        walk = self._verify(tree)
        verified = time.monotonic()
        self._timeline.record("target", drafted, verified)
        self._compact(walk)
        self._device.synchronize()
        return Phases(began, drafted, verified, time.monotonic(), self._compute_ms())

    def plain(self) -> Phases:
        """One token, without a draft."""
        began = time.monotonic()
        self._draws(Tree.empty())
        ended = time.monotonic()
        self._timeline.record("target", began, ended)
        return Phases(began, began, ended, ended, self._compute_ms())

    def _new_growth(self) -> Growth:
        return Growth(self._model.draft, self._root, self._model.plan.width)

    def _verify(self, tree: Tree) -> Walk:
        draws = forced_draws(tree, self._model.plan.tau)
        assert self._draws(tree).shape == draws.shape
        return walk_trees([tree], draws)

    def _draws(self, tree: Tree) -> torch.Tensor:
        """The target's own, on the host."""
        place = self._device.torch_device
        tokens = torch.cat([self._root, tree.tokens.to(place)])
        levels = torch.cat([torch.zeros(1, dtype=torch.int64), tree.levels]).to(place)
        words = pack_mask(tree.ancestor_mask().to(place))[None]
        rows = torch.arange(len(tokens), device=place)
        return self._model.target(tokens, levels, words, self._slots(rows)).cpu()

    def _slots(self, rows: torch.Tensor) -> torch.Tensor:
        positions = rows + self._model.plan.context
        return self._model.block_table[0][positions // PAGE].long() * PAGE + positions % PAGE

    def _compact(self, walk: Walk) -> None:
        moves = compaction_moves(walk.rows)
        source, target = (
            self._slots(part.to(self._device.torch_device))[None] for part in (moves.src, moves.dst)
        )
        kv_compact(self._model.caches, source, target)

    def _compute_ms(self) -> float:
        self._device.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._model.marks)


def measure_method(device: Device, shape: ModelShape, plan: Plan) -> Tables:
    """Plain streaming and the method, at the same residents and slots."""
    timeline = Timeline()
    model = SyntheticModel(device, shape, plan, timeline)
    try:
        method = Method(device, model, timeline)
        eager_s = method.prepare()
        modes = {}
        for name, cycle in (("plain streaming", method.plain), ("SubSpec", method.cycle)):
            cycle()
            timeline.start()
            phases = [cycle() for _ in range(_PASSES)]
            timeline.stop()
            modes[name] = phases, timeline.spans()
    finally:
        model.close()
    streamed = model.streamed * shape.layer_bytes
    reads = [span for _, spans in modes.values() for span in spans if span.lane == "link"]
    # Others may have waited for compute to leave their slot.
    fastest_s = min(span.end - span.start for span in reads)
    setting = {
        "model": shape.name, "layers": shape.layers, "streamed": model.streamed,
        "streamed_MB_per_pass": streamed // 10**6, "slots": plan.slots, "shadow_bits": plan.bits,
        "tree": f"{plan.width} x {plan.depth}", "context": plan.context, "forced_tau": plan.tau,
    }  # fmt: skip
    speeds = _speeds(modes, plan, 1 / (model.streamed * fastest_s))
    level_ms = _draft_s(modes["SubSpec"][0]) / plan.depth * 1e3
    graphs: Rows = [
        {"launched": "as one graph", "ms": level_ms},
        {"launched": "one by one", "ms": eager_s / plan.depth * 1e3},
    ]
    return {
        "Setting": [setting],
        "Speed (acceptance is forced, not measured)": speeds,
        "A cycle's time, by who works": _shares(modes),
        "Last cycle": _pictures(device, *modes["SubSpec"]),
        "A level of the draft": graphs,
    }


Modes = dict[str, tuple[list[Phases], list[Span]]]


def _cycle_s(phases: list[Phases]) -> float:
    return (phases[-1].ended - phases[0].began) / len(phases)


def _draft_s(phases: list[Phases]) -> float:
    return sum(phase.drafted - phase.began for phase in phases) / len(phases)


def _speeds(modes: Modes, plan: Plan, passes_per_s: float) -> Rows:
    """Tokens a second against the link's bound, tau * bandwidth / streamed bytes."""
    rows: Rows = []
    for name, (phases, spans) in modes.items():
        tau = plan.tau if name == "SubSpec" else 1
        cycle_s = _cycle_s(phases)
        busy_s = sum(end - start for start, end in _within(merged(spans, "link"), phases))
        rows.append({
            "mode": name, "tau": tau, "cycle_ms": cycle_s * 1e3, "tokens_per_s": tau / cycle_s,
            "link_bound_tokens_per_s": tau * passes_per_s,
            "share_of_link_bound": 1 / cycle_s / passes_per_s,
            "link_utilisation": busy_s / (cycle_s * len(phases)),
            "speedup": tau / cycle_s * _cycle_s(modes["plain streaming"][0]),
        })  # fmt: skip
    return rows


def _within(
    intervals: list[tuple[float, float]], phases: list[Phases]
) -> list[tuple[float, float]]:
    began, ended = phases[0].began, phases[-1].ended
    cut = [(max(start, began), min(end, ended)) for start, end in intervals]
    return [(start, end) for start, end in cut if end > start]


def _shares(modes: Modes) -> Rows:
    """Milliseconds a cycle: its phases, and what ran while the link idled."""
    rows: Rows = []
    for name, (phases, spans) in modes.items():
        count = len(phases)
        idle = link_shares(spans, phases[0].began, phases[-1].ended)
        rows.append({
            "mode": name,
            "draft_ms": _draft_s(phases) * 1e3,
            "target_ms": sum(p.verified - p.drafted for p in phases) / count * 1e3,
            "target_compute_ms": sum(p.compute_ms for p in phases) / count,
            "compaction_ms": sum(p.ended - p.verified for p in phases) / count * 1e3,
            "link_busy_ms": idle["link"] / count * 1e3,
            "link_idle_in_draft_ms": idle["draft"] / count * 1e3,
            "link_idle_in_target_ms": idle["target"] / count * 1e3,
            "link_idle_else_ms": idle["other"] / count * 1e3,
        })  # fmt: skip
    return rows


def _pictures(device: Device, phases: list[Phases], spans: list[Span]) -> Rows:
    """When the link, the draft and the target worked: a line each, as long as the cycle."""
    last = phases[-1:]
    length = last[0].ended - last[0].began
    lanes: tuple[Lane, ...] = ("link", "draft", "target")
    rows: Rows = []
    for lane in lanes:
        line = [" "] * _PICTURE
        for start, end in _within(merged(spans, lane), last):
            first, stop = ((t - last[0].began) / length * _PICTURE for t in (start, end))
            line[int(first) : max(int(first) + 1, int(stop))] = "#" * max(1, int(stop) - int(first))
        picture = None if device.is_dry else f"`{''.join(line)}`"
        rows.append({"lane": lane, f"{_PICTURE} parts of the cycle": picture})
    return rows
