"""Placement by count: the last layers stay, the others stream."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_subspec.errors import BudgetError


@dataclass(frozen=True)
class Placement:
    """Which decoder layers are resident and which are streamed.

    Attributes:
        num_layers: decoder layers of the target.
        streamed: indices of the streamed layers, ascending; the others are resident.
        num_slots: fast-tier buffers, one streamed layer each.
    """

    num_layers: int
    streamed: tuple[int, ...]
    num_slots: int

    def is_streamed(self, layer: int) -> bool:
        """Whether ``layer`` is fetched in each target pass."""
        return layer in self.streamed


def place(num_layers: int, resident_layers: int, slots: int) -> Placement:
    """Keep the last ``resident_layers`` layers resident: residents pay most at the end.

    Raises:
        BudgetError: more resident layers than the model has, or no layer left to draft cheaply.
    """
    if resident_layers > num_layers:
        raise BudgetError(
            f"resident_layers={resident_layers}, but the model has {num_layers} layers; "
            f"choose at most {num_layers - 1}"
        )
    if resident_layers == num_layers:
        raise BudgetError(
            f"resident_layers={resident_layers} keeps all {num_layers} layers on the fast tier: "
            f"nothing would be streamed and the draft would be the target itself; choose at most "
            f"{num_layers - 1}, or run vLLM without SubSpec"
        )
    streamed = tuple(range(num_layers - resident_layers))
    return Placement(num_layers, streamed, min(slots, len(streamed)))
