"""How often levels are accepted, in trees of any number of nodes: learnt live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_subspec.draft.averages import MEMORY, Values

_RETRY = 64  # passes after which levels that no tree reached any more are forgotten: drafts change
_START = 0.95  # a level is accepted so often where nothing is known
_START_WEIGHT = 2.0
_FADED_WEIGHT = 4.0  # a few passes shall tell then


@dataclass(frozen=True)
class Outcome:
    """What became of one tree.

    Attributes:
        depth: levels verified.
        nodes: nodes verified.
        least_nodes: for each accepted level, from the root down, how few nodes the tree could
            have been pruned to and still hold the accepted one; the bonus token is not among them.
    """

    depth: int
    nodes: int
    least_nodes: Sequence[int]


class Acceptance:
    """Shares of accepted levels by node count; a tree tells of every smaller one within it.

    Args:
        most: levels of the deepest tree to know of.
        width: nodes that a level grows.
        max_nodes: of the largest tree to know of.

    Attributes:
        node_counts: float64 [c], ascending: those of the trees that it knows of.
        num_levels: that some tree had; deeper ones are taken to be like the last of these.
    """

    def __init__(self, most: int, width: int, max_nodes: int) -> None:
        self._most, self._width = most, width
        self.node_counts = _node_counts(max_nodes)
        self.num_levels = 0
        # By level (one more than a tree may have) and node count: accepted, if its parent was.
        self._accepted = np.full((most + 1, len(self.node_counts)), _START)
        self._weight = np.full(self._accepted.shape, _START_WEIGHT)
        self._is_tried = np.zeros(self._accepted.shape, dtype=bool)
        self._untried = 0
        self._survival: Values | None = None

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the trees of one pass."""
        if not outcomes:
            return
        reached, held = np.zeros_like(self._weight), np.zeros_like(self._weight)
        for outcome in outcomes:
            self._count(outcome, reached, held)
        seen = reached > 0
        self._weight[seen] = MEMORY * self._weight[seen] + reached[seen]
        self._accepted[seen] += (held - reached * self._accepted)[seen] / self._weight[seen]
        self._is_tried |= seen
        self._survival = None
        depth = min(self._most, max(outcome.depth for outcome in outcomes))
        self._untried = self._untried + 1 if depth < self.num_levels else 0
        self.num_levels = max(self.num_levels, depth)
        if self._untried == _RETRY:
            self.num_levels, self._untried = max(1, depth), 0
            self._accepted[self.num_levels :] = _START
            self._weight[self.num_levels :] = _START_WEIGHT
            self._is_tried[self.num_levels :] = False

    def fade(self) -> None:
        """Let what comes next count for much more than what is known."""
        np.minimum(self._weight, _FADED_WEIGHT, out=self._weight)

    def survival(self) -> Values:
        """float64 [most, c]: share of passes that accept levels 1 to i + 1, all of them."""
        if self._survival is None:
            accepted = self._by_level()
            self._survival = np.zeros((self._most, len(self.node_counts)))
            share = np.ones(len(self.node_counts))
            for level in range(self._most):
                share = share * accepted[level]
                share[self.node_counts <= level] = 0.0  # a path needs as many nodes as levels
                # What was seen of fewer nodes lately holds of more, which hold no less.
                share = np.maximum.accumulate(share)
                self._survival[level] = share
        return self._survival

    def below(self) -> Values:
        """float64 [most, 1]: how often, where levels 1 to i + 1 were accepted, one more would be
        that was grown and not verified."""
        return self._by_level()[1:, -1:]

    def _count(self, outcome: Outcome, reached: Values, held: Values) -> None:
        depth, accepted = min(outcome.depth, self._most), len(outcome.least_nodes)
        whole = outcome.nodes >= self._width * outcome.depth  # no larger tree differs from it
        alive = self.node_counts <= (self.node_counts[-1] if whole else outcome.nodes)
        for level in range(min(depth, accepted + 1)):
            reached[level] += alive  # its parent was accepted
            if level < accepted:
                alive = alive & (self.node_counts >= outcome.least_nodes[level])
                held[level] += alive

    def _by_level(self) -> Values:
        """Of each level whose parent was accepted; those below the known ones are like the last.

        What no tree has told yet of a node count is taken from the next larger one.
        """
        last = len(self.node_counts) - 1
        own = np.where(self._is_tried, np.arange(last + 1), last + 1)
        larger = np.minimum.accumulate(own[:, ::-1], 1)[:, ::-1]
        theirs = np.take_along_axis(self._accepted, larger.clip(0, last), 1)
        accepted: Values = np.where(larger <= last, theirs, self._accepted)
        accepted[self.num_levels :] = accepted[max(self.num_levels, 1) - 1]
        return accepted


def _node_counts(most: int) -> Values:
    """Node counts to choose from: a power of two or halfway between two, and ``most``."""
    counts = {most}
    for exponent in range(most.bit_length()):
        counts |= {1 << exponent, 3 << exponent >> 1}
    return np.array(sorted(count for count in counts if 1 <= count <= most), dtype=float)
