"""Model, budget and machine in, the placement with the most tokens a second out.

The planner looks at every number of resident layers (the last ones: they pay most), at the head
resident or streamed, at every rung of the bit ladder (most divergence saved per byte first), at 2
to 4 slots and at a grid of trees; it drops what the budget cannot hold and keeps the fastest by the
cycle model. What it looks at does not depend on the budget, so more budget is never worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.draft.tuning import deepest
from vllm_subspec.errors import BudgetError, ConfigError
from vllm_subspec.plan import ledger
from vllm_subspec.plan.alignment import LOSS_FLOOR, LOSS_PER_ROOT_KL, Sensitivity, Values
from vllm_subspec.plan.cycle import Cycle, Trees, Work, decode_cycle, hidden_nodes, plain_pass_s
from vllm_subspec.plan.ladder import Ladder
from vllm_subspec.plan.machine import MachineFigures
from vllm_subspec.plan.placement import MemoryItem, Placement, Prediction
from vllm_subspec.plan.shapes import ModelShape
from vllm_subspec.plan.wishes import Wishes


def plan(
    shape: ModelShape,
    budget_bytes: int,
    kv_bytes: int,
    machine: MachineFigures,
    sensitivity: Sensitivity,
    *,
    sequences: int = 1,
    bits: int | str | None = None,
    resident_layers: int | None = None,
    slots: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    max_nodes: int | None = None,
    node_limit: int | None = None,
    available_bits: tuple[int, ...] = (4, 6, 8),
    speculate: bool = True,
    post_speculation: bool = True,
    share_layers: bool = True,
) -> Placement:
    """The placement with the most predicted tokens a second that fits; explicit values win.

    Args:
        shape: sizes of the model (of one rank).
        budget_bytes: for everything in ``Placement.memory``.
        kv_bytes: KV cache wanted, context times sequences.
        machine: measured, or ``machine.DEFAULT``.
        sensitivity: measured, or ``Sensitivity.prior``.
        sequences: drafted for at once; each needs scratch. The prediction is for one alone.
        bits: the same for every shadow; None spreads ``available_bits``.
        resident_layers: exactly so many, from the last one back.
        slots: as many, unless fewer units are streamed.
        width: nodes per level.
        depth: levels.
        max_nodes: nodes verified at most; None verifies what hides under the stream.
        node_limit: most nodes that the engine can verify at once; None: any number.
        available_bits: widths for which this machine has kernels.
        speculate: false streams without a draft, and needs no shadow.
        post_speculation: draft in the waits of a pass.
        share_layers: false gives resident units a shadow too, for drafts of a model apart.

    Raises:
        BudgetError: no placement fits; it names the smallest budget and what eats it.
        ConfigError: an explicit value is out of range, or ``sensitivity`` is of another model.
    """
    wishes = Wishes(
        sequences, bits, resident_layers, slots, width, depth, max_nodes, node_limit,
        available_bits, speculate, post_speculation, share_layers,
    )  # fmt: skip
    if sensitivity.num_layers != len(shape.layers):
        raise ConfigError(
            f"sensitivity covers {sensitivity.num_layers} layers, the model has "
            f"{len(shape.layers)}: measure it on this model, or use the prior"
        )
    return _Search(shape, kv_bytes, machine, sensitivity, wishes).run(budget_bytes)


@dataclass(frozen=True)
class _Frame:
    """All of a placement but bits and tree."""

    num_streamed: int
    head_streamed: bool
    num_slots: int


@dataclass(frozen=True)
class _Choice:
    """A frame, a rung of the ladder and a tree; what they need and yield."""

    frame: _Frame
    rung: int
    tree: TreeShape | None
    draft_bytes: int
    total_bytes: int
    tokens_per_s: float


class _Search:
    def __init__(
        self,
        shape: ModelShape,
        kv_bytes: int,
        machine: MachineFigures,
        sensitivity: Sensitivity,
        wishes: Wishes,
    ) -> None:
        self._shape, self._kv_bytes, self._machine = shape, kv_bytes, machine
        self._sensitivity, self._wishes = sensitivity, wishes
        units = [*shape.layers, *([shape.head] if shape.head else [])]
        missing = [b for b in wishes.bit_choices if b not in sensitivity.kl]
        if missing and wishes.speculate:
            raise ConfigError(
                f"sensitivity has no divergences for {missing[0]} bits: measure them, or leave "
                "these bits out"
            )
        self._ladder = Ladder(units, sensitivity, wishes.bit_choices) if wishes.speculate else None

    def run(self, budget_bytes: int) -> Placement:
        best: _Choice | None = None
        least: _Choice | None = None
        for frame in self._frames():
            for choice in self._choices(frame, budget_bytes):
                if least is None or choice.total_bytes < least.total_bytes:
                    least = choice
                fits = choice.total_bytes <= budget_bytes
                if fits and (best is None or choice.tokens_per_s > best.tokens_per_s):
                    best = choice
        assert least is not None
        if best is None:
            raise _too_small(budget_bytes, least.total_bytes, self._placement(least).memory)
        return self._placement(best)

    def _frames(self) -> Iterator[_Frame]:
        shape = self._shape
        for num_streamed in self._wishes.streamed_choices(len(shape.layers)):
            for head_streamed in (False, True) if shape.head else (False,):
                pieces = 0
                if shape.head and head_streamed:
                    pieces = -(-shape.head.weight_bytes // ledger.slot_bytes(shape, num_streamed))
                for slots in self._wishes.slot_choices(num_streamed + pieces):
                    yield _Frame(num_streamed, head_streamed, slots)

    def _choices(self, frame: _Frame, budget_bytes: int) -> Iterator[_Choice]:
        """The smallest of this frame, and the fastest that fits where one does."""
        fixed = sum(item.bytes for item in self._ledger(frame, {}, 0))
        if self._ladder is None:
            plain_rate = 1.0 / plain_pass_s(self._work(frame), self._machine)
            yield _Choice(frame, 0, None, 0, fixed, plain_rate)
            return
        rungs = self._ladder.rungs(self._shadowed(frame))
        trees = self._wishes.trees(hidden_nodes(self._work(frame), self._machine))
        scratch = self._scratch(trees)
        total = fixed + rungs.bytes[:, None] + scratch
        cycle = self._cycle(frame, trees, rungs.kl[:, None], rungs.bytes[:, None])
        rate = cycle.tau / cycle.cycle_s
        picks = [int(total.argmin())]
        if (fits := total <= budget_bytes).any():
            picks.append(int(np.where(fits, rate, -np.inf).argmax()))
        for pick in picks:
            rung, at = divmod(pick, len(trees.width))
            width, depth, nodes = (int(a[at]) for a in (trees.width, trees.depth, trees.nodes))
            tree = TreeShape(width, depth, None if nodes == width * depth else nodes)
            yield _Choice(
                frame, rung, tree, int(scratch[at]), int(total[rung, at]), float(rate[rung, at])
            )

    def _shadowed(self, frame: _Frame) -> list[int]:
        """Units with a shadow, by their index in the ladder."""
        if not self._wishes.share_layers:
            return list(range(len(self._shape.layers) + (self._shape.head is not None)))
        head = [len(self._shape.layers)] if frame.head_streamed else []
        return [*range(frame.num_streamed), *head]

    def _work(self, frame: _Frame) -> Work:
        return Work.of(self._shape, frame.num_streamed, frame.head_streamed, frame.num_slots)

    def _scratch(self, trees: Trees) -> Values:
        wishes = self._wishes
        # Of one sequence alone, an extension grows beside the tree that the pass verifies.
        trees_at_once = max(wishes.sequences, 2 if wishes.post_speculation else 1)
        deepest_of = deepest if wishes.depth is None else int
        depths = np.array([deepest_of(int(depth)) for depth in trees.depth])
        grown = trees_at_once * trees.width * depths
        return np.array(
            [
                ledger.scratch_bytes(self._shape, int(g), int(n), wishes.sequences)
                for g, n in zip(grown, trees.nodes, strict=True)
            ]
        )

    def _cycle(self, frame: _Frame, trees: Trees, kl: Values, shadows: Values) -> Cycle:
        work = self._work(frame)
        full = work.weight_bytes - work.streamed_bytes if self._wishes.share_layers else 0
        loss = LOSS_PER_ROOT_KL * np.sqrt(kl) + LOSS_FLOOR
        return decode_cycle(
            work, self._machine, trees, full + shadows, loss, self._wishes.post_speculation
        )

    def _ledger(
        self, frame: _Frame, bits: dict[int, int], draft_bytes: int
    ) -> tuple[MemoryItem, ...]:
        layers = len(self._shape.layers)
        return ledger.ledger(
            self._shape,
            [bits.get(layer) for layer in range(layers)],
            frame.num_streamed,
            bits.get(layers),
            frame.head_streamed,
            frame.num_slots,
            draft_bytes,
            self._kv_bytes,
        )

    def _placement(self, choice: _Choice) -> Placement:
        frame, layers = choice.frame, len(self._shape.layers)
        bits: dict[int, int] = {}
        if self._ladder is not None:
            bits = self._ladder.assignment(self._shadowed(frame), choice.rung)
        memory = self._ledger(frame, bits, choice.draft_bytes)
        return Placement(
            num_layers=layers,
            streamed=tuple(range(frame.num_streamed)),
            num_slots=frame.num_slots,
            bits=tuple(bits.get(layer) for layer in range(layers)),
            head="streamed" if frame.head_streamed else "resident",
            head_bits=bits.get(layers),
            tree=choice.tree,
            prediction=self._prediction(frame, bits, choice.tree),
            memory=memory,
        )

    def _prediction(
        self, frame: _Frame, bits: dict[int, int], tree: TreeShape | None
    ) -> Prediction:
        work = self._work(frame)
        link_s = work.streamed_bytes / self._machine.link_bytes_per_s
        if tree is None:
            cycle_s = plain_pass_s(work, self._machine)
            return Prediction(
                1.0, 0.0, cycle_s, cycle_s, 1 / cycle_s, link_s / cycle_s, work.streamed_bytes
            )
        trees = Trees(*(np.array(float(n)) for n in (tree.width, tree.depth, tree.node_count)))
        units = [*self._shape.layers, *([self._shape.head] if self._shape.head else [])]
        kl = sum(self._sensitivity.at(unit, b) for unit, b in bits.items())
        shadows = sum(ledger.shadow_bytes(units[unit], b) for unit, b in bits.items())
        cycle = self._cycle(frame, trees, np.array(kl), np.array(float(shadows)))
        tau, step_s, pass_s, cycle_s = (
            float(value) for value in (cycle.tau, cycle.step_s, cycle.pass_s, cycle.cycle_s)
        )
        return Prediction(
            tau, step_s, pass_s, cycle_s, tau / cycle_s, link_s / cycle_s, work.streamed_bytes
        )


def _too_small(budget: int, least: int, memory: tuple[MemoryItem, ...]) -> BudgetError:
    largest = sorted(memory, key=lambda item: -item.bytes)[:3]
    eaters = ", ".join(f"{item.name} {item.bytes}" for item in largest if item.bytes)
    return BudgetError(
        f"memory_budget of {budget} bytes is too small: the smallest that works here is {least} "
        f"bytes, most of it for {eaters}; raise the budget, or ask for less context or fewer "
        "sequences"
    )
