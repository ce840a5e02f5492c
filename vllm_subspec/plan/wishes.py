"""What the user fixed of a plan, and what is left for the planner to choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import BudgetError, ConfigError
from vllm_subspec.plan.cycle import Trees
from vllm_subspec.plan.ledger import SHADOW_BITS

_WIDTHS = (1, 2, 4, 8)
_DEPTHS = (*range(4, 24, 2), *range(24, 49, 4))
_SLOTS = (2, 3, 4)


@dataclass(frozen=True)
class Wishes:
    """Explicit values; None leaves one to the planner. See ``plan`` for their meaning.

    Raises:
        ConfigError: a value is unknown or out of range, or available_bits lack ``bits``.
    """

    sequences: int
    bits: int | str | None
    resident_layers: int | None
    slots: int | None
    width: int | None
    depth: int | None
    max_nodes: int | None
    node_limit: int | None
    available_bits: tuple[int, ...]
    speculate: bool
    post_speculation: bool
    share_layers: bool

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ConfigError(f"sequences {self.sequences}: plan for one at least")
        known = ", ".join(map(str, SHADOW_BITS))
        if not self.available_bits or set(self.available_bits) - set(SHADOW_BITS):
            raise ConfigError(f"available_bits {self.available_bits!r}: choose some of {known}")
        if self.bits is not None and self.bits not in self.available_bits:
            have = ", ".join(map(str, self.available_bits))
            raise ConfigError(f"bits {self.bits!r} is not available here: use one of {have}")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"slots {self.slots} hold no streamed layer: use 2 or more")
        given = {"width": self.width, "depth": self.depth, "max_nodes": self.max_nodes}
        explicit = {name: value for name, value in given.items() if value is not None}
        TreeShape(**{"width": 1, "depth": 1, **explicit})  # raises what is out of range

    @property
    def bit_choices(self) -> tuple[int, ...]:
        """Widths that shadows may have, ascending."""
        return tuple(bits for bits in sorted(self.available_bits) if self.bits in (None, bits))

    def streamed_choices(self, num_layers: int) -> Sequence[int]:
        """How many layers, from the first on, may be streamed; one at least.

        Raises:
            BudgetError: ``resident_layers`` leaves none.
        """
        if self.resident_layers is None:
            return range(1, num_layers + 1)
        if not 0 <= self.resident_layers < num_layers:
            raise BudgetError(
                f"resident_layers={self.resident_layers}, but the model has {num_layers} layers "
                f"and one at least is streamed: choose 0 to {num_layers - 1}, or run vLLM without "
                "SubSpec"
            )
        return (num_layers - self.resident_layers,)

    def slot_choices(self, num_streamed_units: int) -> Sequence[int]:
        """How many slots; never more than there are units to stream."""
        wanted = _SLOTS if self.slots is None else (self.slots,)
        return sorted({min(slots, num_streamed_units) for slots in wanted})

    def trees(self, hidden_nodes: float) -> Trees:
        """The trees to compare; none verifies more than ``hidden_nodes``, save a bare chain.

        A chain deeper than ``node_limit`` keeps its first nodes.
        """
        widths = _WIDTHS if self.width is None else (self.width,)
        depths = _DEPTHS if self.depth is None else (self.depth,)
        width, depth = (a.ravel().astype(float) for a in np.meshgrid(widths, depths))
        most = np.maximum(hidden_nodes, depth) if self.max_nodes is None else self.max_nodes
        limit = np.inf if self.node_limit is None else self.node_limit
        return Trees(width, depth, np.minimum(np.minimum(width * depth, most), limit))
