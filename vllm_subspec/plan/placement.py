"""What the planner decides: which layer is what, at which bits, and what that is good for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import BudgetError, ConfigError
from vllm_subspec.plan.values import check_keys


@dataclass(frozen=True)
class Prediction:
    """What the cycle model expects of one sequence.

    Attributes:
        tau: tokens committed per target pass, bonus token included; 1 without speculation.
        draft_step_s: one level of the draft, 0 without speculation.
        target_pass_s: one pass of the target, its streaming included.
        cycle_s: drafting that no pass hides, and a pass.
        tokens_per_s: tau / cycle_s.
        link_utilization: share of the cycle in which the link is busy, 0 to 1.
        streamed_bytes: over the link in each pass.
    """

    tau: float
    draft_step_s: float
    target_pass_s: float
    cycle_s: float
    tokens_per_s: float
    link_utilization: float
    streamed_bytes: int


NOT_PREDICTED = Prediction(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
"""That of a placement by count."""


@dataclass(frozen=True)
class MemoryItem:
    """One use of the budget, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Placement:
    """Which decoder layers are resident and which are streamed, and all that goes with it.

    Attributes:
        num_layers: decoder layers of the target.
        streamed: indices of the streamed layers, ascending; the others are resident.
        num_slots: fast-tier buffers, one streamed unit each.
        bits: of each layer's shadow; None where it has none: drafts share a resident layer, or
            nothing is drafted. Empty in a placement by count.
        head: whether the language model head is kept in full or streamed behind the layers.
        head_bits: of the head's shadow; None where it has none.
        tree: what is drafted; None without speculation or in a placement by count.
        prediction: what the planner expects.
        memory: the ledger of the budget.
    """

    num_layers: int
    streamed: tuple[int, ...]
    num_slots: int
    bits: tuple[int | str | None, ...] = ()
    head: Literal["resident", "streamed"] = "resident"
    head_bits: int | None = None
    tree: TreeShape | None = None
    prediction: Prediction = NOT_PREDICTED
    memory: tuple[MemoryItem, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole ledger."""
        return sum(item.bytes for item in self.memory)

    def is_streamed(self, layer: int) -> bool:
        """Whether ``layer`` is fetched in each target pass."""
        return layer in self.streamed

    def to_json(self) -> dict[str, Any]:
        """The placement as a JSON object; it travels to the workers like this."""
        value = asdict(self)
        return value | {name: list(value[name]) for name in ("streamed", "bits", "memory")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Placement:
        """What ``to_json`` gave.

        Raises:
            ConfigError: a key is unknown or missing, or the layers do not fit together.
        """
        parts = dict(check_keys(cls, value))
        parts["streamed"], parts["bits"] = tuple(parts["streamed"]), tuple(parts["bits"])
        if parts["tree"] is not None:
            parts["tree"] = TreeShape(**check_keys(TreeShape, parts["tree"]))
        parts["prediction"] = Prediction(**check_keys(Prediction, parts["prediction"]))
        parts["memory"] = tuple(
            MemoryItem(**check_keys(MemoryItem, item)) for item in parts["memory"]
        )
        placement = cls(**parts)
        if len(placement.bits) not in (0, placement.num_layers) or any(
            not 0 <= layer < placement.num_layers for layer in placement.streamed
        ):
            raise ConfigError(
                f"Placement of {placement.num_layers} layers has bits for {len(placement.bits)} "
                f"and streams {list(placement.streamed)}: make it anew with this release"
            )
        return placement


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
