"""A draft tree as flat tensors, and the mask under which the target verifies it in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_subspec.errors import ConfigError

MAX_WIDTH = 32
MAX_DEPTH = 256


@dataclass(frozen=True)
class TreeShape:
    """The static shape in which a draft grows (arXiv 2509.18344 uses 6 x 48).

    Args:
        width: nodes a level keeps, 1..32; 1 is a chain.
        depth: levels, 1..256; each costs one draft forward.
        max_nodes: nodes verified at most, >= 1; None verifies all that grew.

    Raises:
        ConfigError: a value is no integer or out of range.
    """

    width: int
    depth: int
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        _check_range("tree width", self.width, MAX_WIDTH)
        _check_range("tree depth", self.depth, MAX_DEPTH)
        if self.max_nodes is not None:
            _check_range("max_nodes", self.max_nodes, None)

    @property
    def node_count(self) -> int:
        """Most nodes that one tree of this shape hands to verification."""
        grown = self.width * self.depth
        return grown if self.max_nodes is None else min(grown, self.max_nodes)


def _check_range(name: str, value: int, high: int | None) -> None:
    allowed = "at least 1" if high is None else f"between 1 and {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, not an integer: choose one {allowed}")
    if value < 1 or (high is not None and value > high):
        raise ConfigError(f"{name} {value} is out of range: choose a value {allowed}")


@dataclass(frozen=True, eq=False)
class Tree:
    """One request's draft. The root (last committed token) is not a node.

    Nodes come in level order: levels never decrease and a parent precedes its children, so any
    head of the arrays is again a tree. That is what the scheduler leaves when it cuts the tail.

    Attributes:
        tokens: int64 [n], token ids; siblings hold distinct ones.
        parents: int64 [n], index among the nodes, -1 for the root.
        levels: int64 [n], 1 for children of the root.
        scores: float32 [n], sharpened log-probability summed from the root, finite and
            never above the parent's.
    """

    tokens: Tensor
    parents: Tensor
    levels: Tensor
    scores: Tensor

    @classmethod
    def empty(cls) -> Tree:
        """The tree of a request without a draft: verification sees its root alone."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none, none, torch.empty(0))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def depth(self) -> int:
        """Levels below the root, 0 if there is no node."""
        return int(self.levels[-1]) if len(self) else 0

    @property
    def is_chain(self) -> bool:
        """Whether every level holds one node: then ordinary causal attention serves it."""
        return self.depth == len(self)

    def truncate(self, count: int) -> Tree:
        """The first ``count`` nodes, all of them if there are fewer."""
        assert count >= 0, count
        return Tree(
            self.tokens[:count], self.parents[:count], self.levels[:count], self.scores[:count]
        )

    def limit_depth(self, depth: int) -> Tree:
        """The nodes at most ``depth`` levels below the root."""
        return self.truncate(int((self.levels <= depth).sum()))

    def prune(self, max_nodes: int) -> Tree:
        """The ``max_nodes`` best nodes by cumulative score (EAGLE-2's rerank, arXiv 2406.16858).

        Scores never rise along a path and ties go to the lower index, so ancestors outrank
        their descendants and the best nodes are a tree.
        """
        if len(self) <= max_nodes:
            return self
        ranked = self._best_first()
        kept = torch.zeros(len(self), dtype=torch.bool, device=ranked.device)
        kept[ranked[:max_nodes]] = True
        return self.select(kept)

    def least_nodes(self, tokens: Sequence[int]) -> list[int]:
        """For each node on the path ``tokens``, how many nodes ``prune`` must keep to keep it.

        They grow along the path, which ends where the tree does.
        """
        ranks = torch.empty_like(self.tokens)
        ranks[self._best_first()] = torch.arange(1, len(self) + 1, device=ranks.device)
        children = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        found = dict(zip(children, zip(range(len(self)), ranks.tolist(), strict=True), strict=True))
        at, least = -1, []
        for token in tokens:
            if (at, token) not in found:
                break
            at, rank = found[at, token]
            least.append(rank)
        return least

    def _best_first(self) -> Tensor:
        return self.scores.sort(descending=True, stable=True).indices

    def select(self, kept: Tensor) -> Tree:
        """The nodes where ``kept`` (bool [n]) is true; a kept node's parent must be kept too."""
        renumbered = kept.cumsum(0) - 1
        parents = self.parents[kept]
        parents = torch.where(parents < 0, -1, renumbered[parents])
        return Tree(self.tokens[kept], parents, self.levels[kept], self.scores[kept])

    def doubts(self) -> list[float]:
        """For each level, -log of the sum of its nodes' sharpened probabilities: nats, >= 0."""
        masses = torch.zeros(self.depth, dtype=torch.float64)
        masses.index_add_(0, self.levels - 1, self.scores.double().exp())
        return (-masses.log()).clamp(min=0).tolist()

    def best_path(self) -> Tree:
        """The chain that ends in the best node of the deepest level."""
        if not len(self):
            return self
        deepest = self.levels == self.depth
        best = torch.where(deepest, self.scores, -torch.inf).argmax()
        return self.select(self.ancestor_mask()[best + 1, 1:])

    def ancestor_mask(self) -> Tensor:
        """bool [n + 1, n + 1]: row i is true at i and at all its ancestors.

        Index 0 is the root, index i + 1 is node i.
        """
        mask = torch.eye(len(self) + 1, dtype=torch.bool, device=self.tokens.device)
        ancestor = torch.cat([self.parents.new_zeros(1), self.parents + 1])
        # Pointer doubling: a row that reaches 2^t generations up takes over what the row
        # 2^t generations up reaches, and the root is its own ancestor.
        for _ in range(self.depth.bit_length()):
            mask |= mask[ancestor]
            ancestor = ancestor[ancestor]
        return mask

    def check_integrity(self) -> None:
        """Assert every property that this class promises (for tests)."""
        count = len(self)
        for name in ("parents", "levels", "scores"):
            assert getattr(self, name).shape == (count,), name
        for name in ("tokens", "parents", "levels"):
            assert getattr(self, name).dtype == torch.int64, name
        assert self.scores.dtype == torch.float32
        rows = torch.arange(count, device=self.parents.device)
        assert bool(((self.parents >= -1) & (self.parents < rows)).all()), "parent after child"
        assert bool((self.levels.diff() >= 0).all()), "not in level order"
        levels = torch.cat([self.levels.new_zeros(1), self.levels])
        assert torch.equal(self.levels, levels[self.parents + 1] + 1), "level without parent"
        scores = torch.cat([self.scores.new_zeros(1), self.scores])
        assert bool(self.scores.isfinite().all()), "score is not finite"
        assert bool((self.scores <= scores[self.parents + 1]).all()), "score above the parent's"
        siblings = torch.stack([self.parents, self.tokens], 1)
        assert torch.unique(siblings, dim=0).shape[0] == count, "siblings hold the same token"
