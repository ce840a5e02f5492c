"""How fast this machine streams, drafts and verifies, as plain figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from vllm_subspec.plan.values import check_keys, check_number


@dataclass(frozen=True)
class MachineFigures:
    """Figures that the cycle model needs; all are those of one rank.

    Attributes:
        link_bytes_per_s: streamed weights, from the slow tier into a slot.
        draft_bytes_per_s: weights that the draft reads from the fast tier, low-bit or not.
        target_flops_per_s: the target's matrix products over many rows.
        step_overhead_s_per_layer: what a draft step costs in each layer beside reading weights.
        pass_overhead_s_per_layer: what a target pass costs in each layer beside its products.
        draft_flops_per_s: the draft's matrix products over few rows; a wide level may be bound by
            these instead of by reading.

    Raises:
        ConfigError: a rate is below 1, or an overhead is negative.
    """

    link_bytes_per_s: float
    draft_bytes_per_s: float
    target_flops_per_s: float
    step_overhead_s_per_layer: float
    pass_overhead_s_per_layer: float
    draft_flops_per_s: float = 4e11

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 1.0 if field.name.endswith("_per_s") else 0.0
            check_number(MachineFigures, field.name, getattr(self, field.name), low=low)

    def throttled(self, link_bytes_per_s: float | None) -> MachineFigures:
        """The same machine with no faster a link than that (``emulate_link``)."""
        if link_bytes_per_s is None:
            return self
        return replace(self, link_bytes_per_s=min(self.link_bytes_per_s, link_bytes_per_s))

    def to_json(self) -> dict[str, float]:
        """The figures as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MachineFigures:
        """What ``to_json`` gave (raises ConfigError where it is not that)."""
        return cls(**check_keys(cls, value))


DEFAULT = MachineFigures(
    link_bytes_per_s=1.0e9,
    draft_bytes_per_s=1.0e10,
    target_flops_per_s=1.0e11,
    step_overhead_s_per_layer=2e-4,
    pass_overhead_s_per_layer=2e-4,
    draft_flops_per_s=2e11,
)
"""A slow laptop of today: for a plan made before anything was measured."""
