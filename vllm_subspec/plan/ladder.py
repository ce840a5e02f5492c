"""Where more bits pay most: all assignments of bits worth looking at, from cheap to rich."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_subspec.plan.alignment import Sensitivity, Values
from vllm_subspec.plan.ledger import shadow_bytes
from vllm_subspec.plan.shapes import Unit


@dataclass(frozen=True)
class _Step:
    """One unit goes up to ``bits``: what that costs in bytes and saves in nats of divergence."""

    unit: int
    bits: int
    extra_bytes: int
    saved_kl: float

    @property
    def saved_per_byte(self) -> float:
        return self.saved_kl / self.extra_bytes


@dataclass(frozen=True)
class Rungs:
    """Assignments side by side.

    Attributes:
        kl: float64 [n], nats, summed over the units.
        bytes: float64 [n], of all shadows; whole numbers, exact below 2 ** 53.
    """

    kl: Values
    bytes: Values


class Ladder:
    """The greedy order in which a model's units go up from the fewest bits to the most.

    The rungs for a set of units are the prefixes of that order, which does not depend on a budget,
    and the uniform assignments. So a larger budget reaches all rungs of a smaller one.

    Args:
        units: in the order of ``sensitivity``, the head last.
        sensitivity: divergences.
        available_bits: widths, ascending.
    """

    def __init__(
        self, units: Sequence[Unit], sensitivity: Sensitivity, available_bits: Sequence[int]
    ) -> None:
        self._bits = tuple(available_bits)
        self._kl = {b: np.array(sensitivity.kl[b][: len(units)]) for b in self._bits}
        self._bytes = {b: np.array([shadow_bytes(unit, b) for unit in units]) for b in self._bits}
        steps = [step for unit in range(len(units)) for step in self._steps(unit)]
        self._order = sorted(steps, key=lambda step: -step.saved_per_byte)

    def rungs(self, units: Sequence[int]) -> Rungs:
        """Every assignment for ``units``; index i is what ``assignment(units, i)`` gives."""
        steps, chosen = self._steps_of(units), list(units)
        low = self._bits[0]
        saved = np.cumsum([0.0, *(step.saved_kl for step in steps)])
        extra = np.cumsum([0.0, *(step.extra_bytes for step in steps)])
        uniform = [(self._kl[b][chosen].sum(), self._bytes[b][chosen].sum()) for b in self._bits]
        kl = np.concatenate([uniform[0][0] - saved, [kl for kl, _ in uniform]])
        total = np.concatenate([self._bytes[low][chosen].sum() + extra, [n for _, n in uniform]])
        return Rungs(np.maximum(kl, 0.0), total)  # differences of rounded sums may miss 0

    def assignment(self, units: Sequence[int], index: int) -> dict[int, int]:
        """Unit -> bits at rung ``index``."""
        steps = self._steps_of(units)
        if index > len(steps):
            return dict.fromkeys(units, self._bits[index - len(steps) - 1])
        bits = dict.fromkeys(units, self._bits[0])
        return bits | {step.unit: step.bits for step in steps[:index]}

    def _steps_of(self, units: Sequence[int]) -> list[_Step]:
        chosen = set(units)
        return [step for step in self._order if step.unit in chosen]

    def _steps(self, unit: int) -> list[_Step]:
        """One unit's way up by the best saving per byte; that falls from step to step."""
        steps: list[_Step] = []
        now = self._bits[0]
        while True:
            ways = [
                _Step(
                    unit,
                    bits,
                    int(self._bytes[bits][unit] - self._bytes[now][unit]),
                    float(self._kl[now][unit] - self._kl[bits][unit]),
                )
                for bits in self._bits
                if bits > now
            ]
            best = max(ways, key=lambda step: step.saved_per_byte, default=None)
            if best is None:
                return steps
            steps.append(best)
            now = best.bits
