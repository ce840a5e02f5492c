"""The points of a sweep: what was accepted, and how fast the cycle model says that would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_subspec.draft.replay import Pass
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.plan import MachineFigures, ModelShape, Placement
from vllm_subspec.plan.alignment import loss_of
from vllm_subspec.plan.cycle import Trees, Work, decode_cycle, plain_pass_s
from vllm_subspec.shadow import available_bits
from vllm_subspec.tools.sweep_grid import PLANNED, Setting

_RESAMPLES = 1000


@dataclass(frozen=True)
class Shadows:
    """What an engine made of a setting's shadow.

    Attributes:
        placement: which layers stream.
        nbytes: of all shadows, the head's too.
    """

    placement: Placement
    nbytes: int

    def bytes_per_weight(self, shape: ModelShape) -> float:
        """Of everything that has a shadow, scales included."""
        weights = sum(shape.layers[layer].num_weights for layer in self.placement.streamed)
        if self.placement.head_bits is not None and shape.head is not None:
            weights += shape.head.num_weights
        return self.nbytes / weights

    def draft_bytes(self, shape: ModelShape) -> int:
        """Weights that a draft step reads: shadows, and what has none in full."""
        streamed = set(self.placement.streamed)
        full = sum(u.weight_bytes for n, u in enumerate(shape.layers) if n not in streamed)
        if self.placement.head_bits is None and shape.head is not None:
            full += shape.head.weight_bytes
        return self.nbytes + full


def point(
    setting: Setting,
    depth: int,
    texts: Sequence[Sequence[Pass]],
    shadows: Shadows,
    shape: ModelShape,
    machine: MachineFigures,
) -> dict[str, Any]:
    """One line of the results.

    ``tau`` is measured, with a 95 % interval from drawing whole texts again (bootstrap).
    ``predicted`` is the cycle model's, given that tau, for whole trees and post-speculation:
    tokens/s and milliseconds; plain streaming keeps the same layers. Where there is no kernel
    (``has_kernel``) it is for one that would read its bytes as fast as others do.
    """
    tau, interval = _tau(texts)
    chosen = setting.to_json() | {"resident_layers": _residents(shadows.placement)}
    return {
        "kind": "point",
        **chosen,
        "depth": depth,
        "tau": tau,
        "tau_interval": interval,
        "passes": sum(len(passes) for passes in texts),
        "acceptance_by_level": _by_level(texts, depth),
        "bytes_per_weight": shadows.bytes_per_weight(shape),
        "has_kernel": setting.bits == PLANNED or setting.bits in available_bits(),
        "predicted": _predicted(tau, TreeShape(setting.width, depth), shadows, shape, machine),
    }


def _residents(placement: Placement) -> int:
    return placement.num_layers - len(placement.streamed)


def _tau(texts: Sequence[Sequence[Pass]]) -> tuple[float, list[float]]:
    counts = np.array([[sum(p.accepted + 1 for p in text), len(text)] for text in texts])
    draws = np.random.default_rng(0).integers(len(texts), size=(_RESAMPLES, len(texts)))
    committed, passes = counts[draws].sum(1).T
    ends = np.quantile(committed / passes, [0.025, 0.975])
    return float(counts[:, 0].sum() / counts[:, 1].sum()), [float(end) for end in ends]


def _by_level(texts: Sequence[Sequence[Pass]], depth: int) -> list[float]:
    """Share of trees with such a level that had it accepted, all levels above included."""
    passes = [p for text in texts for p in text]
    levels = np.array([p.levels for p in passes])
    accepted = np.array([p.accepted for p in passes])
    found = []
    for level in range(1, depth + 1):
        grown = levels >= level
        if not grown.any():
            break
        found.append(float((accepted[grown] >= level).mean()))
    return found


def _predicted(
    tau: float, tree: TreeShape, shadows: Shadows, shape: ModelShape, machine: MachineFigures
) -> dict[str, float]:
    placement = shadows.placement
    work = Work.of(
        shape, len(placement.streamed), placement.head == "streamed", placement.num_slots
    )
    width, depth, nodes = (
        np.array(float(value)) for value in (tree.width, tree.depth, tree.node_count)
    )
    # The model's own tau is this one then; it needs the loss for what post-speculation hides.
    loss = np.array(loss_of(tau, tree))
    draft_bytes = np.array(float(shadows.draft_bytes(shape)))
    cycle = decode_cycle(work, machine, Trees(width, depth, nodes), draft_bytes, loss, True)
    plain_s = plain_pass_s(work, machine)
    seconds = float(cycle.cycle_s)
    return {
        "tokens_per_s": tau / seconds,
        "plain_tokens_per_s": 1 / plain_s,
        "speedup": tau * plain_s / seconds,
        "draft_step_ms": 1e3 * float(cycle.step_s),
        "target_pass_ms": 1e3 * float(cycle.pass_s),
        "cycle_ms": 1e3 * seconds,
    }
