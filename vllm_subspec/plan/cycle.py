"""The time of one decode cycle of one sequence, from counts of bytes, weights and nodes.

A cycle drafts a tree, then one target pass verifies it.

- A draft step reads every shadow, every resident weight and the head's draft from the fast tier
  once, whatever the width; a wide level may be bound by its products instead. Each layer adds a
  fixed overhead. ``depth`` steps make a tree.
- In a pass the link brings every streamed unit while the target computes on those that are there:
  it costs the longer of the two. Only what follows the last streamed unit (the *tail*: that unit
  itself and, where the head is resident, the resident layers) can hide behind no transfer.
- While no pass reads the slots (drafting, tail), the link fills them for the next pass. So at most
  the slots' bytes leave the pass's transfer.
- Post-speculation: where the link is the longer, compute waits, and drafting goes on below the best
  leaf in these waits. That is of use if the whole best path is accepted and the bonus token is a
  root of the extension: chance h = exp(-loss * depth) (a chain's) * exp(-tree loss). Then the next
  tree needs that much less drafting. A step makes way between two layers, so the slots need not
  hold one whole.

    cycle = (1 - h) * (depth * step + pass) + h * (max(0, depth * step - wait) + pass)
    pass = max(link, compute) + tail

All arguments broadcast as numpy arrays, so the planner evaluates thousands of plans at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_subspec.plan import ledger
from vllm_subspec.plan.alignment import Values, acceptance, width_factor
from vllm_subspec.plan.machine import MachineFigures
from vllm_subspec.plan.shapes import ModelShape

WAIT_SHARE = 0.9
"""Of the time that compute waits, what draft steps can use: a guess, nobody measured it alone."""


@dataclass(frozen=True)
class Work:
    """What a placement asks of the machine.

    Attributes:
        num_layers: decoder layers.
        streamed_bytes: over the link in each pass.
        slot_bytes: of all slots together; at most ``streamed_bytes``.
        num_weights: that each row of a pass or a draft step is multiplied by.
        weight_bytes: of the same, in full precision.
        tail_share: of a pass's compute that follows the last streamed unit, 0 to 1.
    """

    num_layers: int
    streamed_bytes: int
    slot_bytes: int
    num_weights: int
    weight_bytes: int
    tail_share: float

    @classmethod
    def of(cls, shape: ModelShape, num_streamed: int, head_streamed: bool, num_slots: int) -> Work:
        """Of a placement that streams the first ``num_streamed`` layers, at least one."""
        layers, head = shape.layers, shape.head
        units = [*layers, *([head] if head else [])]
        num_weights = sum(unit.num_weights for unit in units)
        streamed = sum(unit.weight_bytes for unit in layers[:num_streamed])
        last = layers[num_streamed - 1].num_weights
        if head and head_streamed:
            streamed += head.weight_bytes
            tail = min(last, head.num_weights)
        else:
            tail = last + sum(unit.num_weights for unit in layers[num_streamed:])
            tail += head.num_weights if head else 0
        slots = num_slots * ledger.slot_bytes(shape, num_streamed)
        return cls(
            num_layers=len(layers),
            streamed_bytes=streamed,
            slot_bytes=min(slots, streamed),
            num_weights=num_weights,
            weight_bytes=sum(unit.weight_bytes for unit in units),
            tail_share=tail / num_weights,
        )


@dataclass(frozen=True)
class Trees:
    """Trees side by side, each a float64 array of the same shape: width, depth, nodes verified."""

    width: Values
    depth: Values
    nodes: Values


@dataclass(frozen=True)
class Cycle:
    """Expected tokens of a pass, and seconds of a draft step, a pass and a whole cycle."""

    tau: Values
    step_s: Values
    pass_s: Values
    cycle_s: Values


def compute_s(work: Work, machine: MachineFigures, rows: Values) -> Values:
    """Seconds the target computes on ``rows`` (nodes and root): products or reading, overhead."""
    products = 2.0 * work.num_weights * rows / machine.target_flops_per_s
    reading = work.weight_bytes / machine.draft_bytes_per_s
    return np.maximum(products, reading) + machine.pass_overhead_s_per_layer * work.num_layers


def hidden_nodes(work: Work, machine: MachineFigures) -> float:
    """Most nodes whose verification the link outlasts, slots prefetched; may be negative."""
    room_s = (work.streamed_bytes - work.slot_bytes) / machine.link_bytes_per_s
    room_s -= machine.pass_overhead_s_per_layer * work.num_layers
    return float(np.floor(room_s * machine.target_flops_per_s / (2.0 * work.num_weights)) - 1)


def plain_pass_s(work: Work, machine: MachineFigures) -> float:
    """Seconds of a pass that follows another at once, without any draft: one token."""
    none = np.zeros(())
    return float(_pass_s(work, machine, compute_s(work, machine, none + 1.0), none))


def decode_cycle(
    work: Work,
    machine: MachineFigures,
    trees: Trees,
    draft_bytes: Values,
    loss: Values,
    post_speculation: bool,
) -> Cycle:
    """The cycle of every combination that the arguments broadcast to.

    Args:
        work: the placement's.
        machine: figures of the machine.
        trees: what is drafted and verified.
        draft_bytes: weights that a draft step reads.
        loss: of a chain, per level.
        post_speculation: draft in the waits of a pass.
    """
    tree_loss = loss / width_factor(trees.nodes, trees.depth)
    tau = acceptance(tree_loss, np.minimum(trees.depth, trees.nodes))
    products = 2.0 * work.num_weights * trees.width / machine.draft_flops_per_s
    step_s = np.maximum(draft_bytes / machine.draft_bytes_per_s, products)
    step_s = step_s + machine.step_overhead_s_per_layer * work.num_layers
    compute = compute_s(work, machine, trees.nodes + 1.0)
    draft_s = trees.depth * step_s
    pass_s = _pass_s(work, machine, compute, draft_s)
    if post_speculation:
        hit = np.exp(-loss * trees.depth - tree_loss)
        usable_s = WAIT_SHARE * np.maximum(0.0, pass_s - compute)
        wait_s = np.minimum(draft_s, usable_s)
        hit_pass_s = _pass_s(work, machine, compute, draft_s - wait_s)
        pass_s = pass_s + hit * (hit_pass_s - pass_s)
        cycle_s = draft_s - hit * wait_s + pass_s
    else:
        cycle_s = draft_s + pass_s
    return Cycle(tau, step_s, pass_s, cycle_s)


def _pass_s(work: Work, machine: MachineFigures, compute: Values, before_s: Values) -> Values:
    """Seconds of a pass with ``compute`` seconds of its own, ``before_s`` after the last one."""
    tail_s = work.tail_share * compute
    prefetched = np.minimum(work.slot_bytes, (before_s + tail_s) * machine.link_bytes_per_s)
    link_s = (work.streamed_bytes - prefetched) / machine.link_bytes_per_s
    return np.asarray(np.maximum(link_s, compute - tail_s) + tail_s)
