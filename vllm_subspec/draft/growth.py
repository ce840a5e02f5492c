"""Growth: a draft model extends a batch of trees level by level (arXiv 2509.18344, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from subspec_kernels.grow_mask import WORD_BITS, grow_mask, pack_mask, unpack_mask
from subspec_kernels.sharpened_topk import sharpened_topk
from torch import Tensor
from torch.nn.functional import pad

from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.errors import ConfigError

DEAD = -math.inf  # score of a place in a level that no candidate could fill


class DraftForward(Protocol):
    """Runs the draft model on one level of every request's tree."""

    def __call__(self, tokens: Tensor, level: int, words: Tensor) -> Tensor:
        """Return the draft's logits, float [B, m, V].

        The callee keeps keys and values in scratch slots: slot 0 is the root's, slot
        1 + (l - 1) * width + j that of node j of level l. It attends to the request's context
        and, among the slots, to what ``words`` allow.

        Args:
            tokens: int64 [B, m]; level 0 holds the roots (m = 1), later levels m = width nodes.
            level: how far below the root the tokens are; their position is the root's + level.
            words: int64 [B, m, ceil(s / 64)], s = 1 + level * m slots filled, this level's own
                included (the last m). Packed as ``subspec_kernels.grow_mask`` has it, the bits
                set at the node itself and at its ancestors, root included.
        """


class DraftRank(Protocol):
    """Turns draft logits into what the request's own sampler would compare.

    Here go temperature, top-k, top-p, penalties and the target's noise of the position: then
    the draft proposes what the target is going to draw, not merely what is likely.
    """

    def __call__(self, logits: Tensor, level: int, history: Tensor) -> Tensor:
        """Return float [B, m, V]; -inf bars a token. ``logits`` may be changed in place.

        Args:
            logits: float [B, m, V], the draft forward's result.
            level: level of the nodes that gave the logits; the candidates sit one below.
            history: int64 [B, m, level], tokens from level 1 down to the node itself.
        """


class Growth:
    """A batch of trees that grows by one level a step, and may go on below an accepted path.

    A level divides the draft's values by ``draft_temperature`` (sharpening), takes the
    log-softmax over the whole vocabulary, adds the parent's score, and keeps the ``width`` best
    candidates; ties go to the lower parent, then to the lower token id.

    Args:
        forward: the draft model.
        roots: int64 [B], last committed tokens.
        width: nodes a level keeps.
        draft_temperature: > 0; below 1 it makes trees deeper and narrower.
        rank: maps logits to values; None ranks the logits themselves.

    Attributes:
        rank: see above; replace it after ``follow``, since levels count from the new root.
        is_exhausted: the last level holds nothing below the root that was followed to: the tree
            is good for verification, and cannot grow on.

    Raises:
        ConfigError: ``draft_temperature`` is not a positive finite number.
    """

    def __init__(
        self,
        forward: DraftForward,
        roots: Tensor,
        width: int,
        draft_temperature: float = 0.2,
        rank: DraftRank | None = None,
    ) -> None:
        _check_temperature(draft_temperature)
        self.rank = rank
        self.width = width
        self._forward = forward
        self._temperature = draft_temperature
        self._restart(roots)

    def _restart(self, roots: Tensor) -> None:
        batch = roots.shape[0]
        self.is_exhausted = False
        self._levels: list[_Level] = []
        self._root = _Level(
            roots[:, None],
            torch.zeros_like(roots[:, None]),  # the root's own parent is never seen
            torch.zeros(batch, 1, device=roots.device),
        )
        self._words = torch.zeros(batch, 1, 0, dtype=torch.int64, device=roots.device)
        self._path = roots.new_empty(batch, 1, 0)

    @property
    def depth(self) -> int:
        """Levels grown so far."""
        return len(self._levels)

    @property
    def _num_slots(self) -> int:
        """Scratch slots filled so far: the last level has still to go through the forward."""
        return 1 + (self.depth - 1) * self.width if self._levels else 0

    def doubts(self) -> list[float]:
        """Of each request's last level, as ``Tree.doubts`` has it; 0 at the root.

        Here the host waits for the device.
        """
        last = self._levels[-1] if self._levels else self._root
        return (-last.scores.logsumexp(1)).clamp(min=0).tolist()

    def step(self) -> None:
        """Grow one level, by one forward for the whole batch."""
        level = self.depth
        last = self._levels[-1] if self._levels else self._root
        path = torch.cat([_of_parents(self._path, last.parents), last.tokens[..., None]], -1)
        words = self._words_below(last)
        values = self._forward(last.tokens, level, words)
        if self.rank is not None:
            values = self.rank(values, level, path[..., 1:])
        best = sharpened_topk(values, last.scores, self.width, self._temperature)
        self._levels.append(_Level(*best))
        self._words, self._path = words, path

    def _words_below(self, last: _Level) -> Tensor:
        first = self._num_slots
        num_words = -(-(first + last.tokens.shape[1]) // WORD_BITS)
        above = pad(self._words, (0, num_words - self._words.shape[2]))
        return grow_mask(above, last.parents, first)

    def trees(self, max_nodes: int | None = None) -> list[Tree]:
        """The trees so far, each cut to its ``max_nodes`` best nodes; on the CPU.

        The scheduler takes lists, so this is where the host waits for the device. Only barred
        candidates make a tree smaller than its levels.
        """
        if not self._levels:
            return [Tree.empty() for _ in self._root.tokens]
        width, depth = self.width, self.depth
        tokens = torch.cat([level.tokens for level in self._levels], 1).cpu()
        scores = torch.cat([level.scores for level in self._levels], 1).cpu()
        # Static parents, by row of the level above, become indices among all nodes.
        starts = [max((level - 1) * width, -1) for level in range(depth)]
        rows = [level.parents + start for level, start in zip(self._levels, starts, strict=True)]
        rows[0] = torch.full_like(rows[0], -1)
        parents = torch.cat(rows, 1).cpu()
        levels = torch.arange(1, depth + 1).repeat_interleave(width)
        grown = [
            Tree(token, parent, levels, score).select(score > DEAD)
            for token, parent, score in zip(tokens, parents, scores, strict=True)
        ]
        return grown if max_nodes is None else [tree.prune(max_nodes) for tree in grown]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether ``follow`` would find the path ``tokens``."""
        return self._find(tokens) is not None

    def follow(self, tokens: Sequence[int]) -> Rerooting | None:
        """Go on below the node that ``tokens`` lead to from the root (post-speculation).

        What was grown below that node stays and counts from it; all else is dropped. For a batch
        of one.

        Args:
            tokens: committed after the root, at least one.

        Returns:
            How scratch slots move, or ``None`` where the tree holds no such path: nothing
            changed then, and another growth is due.
        """
        found = self._find(tokens)
        if found is None:
            return None
        row, visited = found
        if visited == self.depth:  # its own forward is still to come: nothing below it is known
            self._restart(torch.tensor(tokens[-1:], device=self._root.tokens.device))
            return Rerooting(visited, None)
        slot = 1 + (visited - 1) * self.width + row
        first = 1 + visited * self.width
        mask = unpack_mask(self._words, self._num_slots)
        self._words = pack_mask(torch.cat([mask[..., slot : slot + 1], mask[..., first:]], -1))
        self._keep_below(visited, row)
        self._path = self._path[..., visited:]
        return Rerooting(visited, slot)

    def _find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(row, level) of the node that ``tokens`` lead to, in a batch of one."""
        row, visited = 0, 0
        if len(tokens) > self.depth:
            return None
        for level, token in zip(self._levels, tokens, strict=False):
            same = (level.tokens[0] == token) & (level.scores[0] > DEAD)
            if visited:
                same &= level.parents[0] == row
            found = same.nonzero()
            if not len(found):
                return None
            row, visited = int(found[0]), visited + 1
        return row, visited

    def _keep_below(self, visited: int, row: int) -> None:
        new_root = self._levels[visited - 1]
        score = new_root.scores[:, row : row + 1]
        alive = torch.zeros_like(new_root.scores, dtype=torch.bool)
        alive[:, row] = True
        kept = []
        for level in self._levels[visited:]:
            alive = alive.gather(1, level.parents)
            scores = torch.where(alive, level.scores - score, DEAD)
            kept.append(_Level(level.tokens, level.parents, scores))
        while kept and not bool((kept[-1].scores > DEAD).any()):
            kept.pop()
            self.is_exhausted = True
        self._root = _Level(new_root.tokens[:, row : row + 1], self._root.parents, score * 0)
        self._levels = kept


class _Level(NamedTuple):
    """Nodes of one level, each [B, m]: tokens, parents as rows of the level above, scores."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Rerooting:
    """How a growth moved down.

    Attributes:
        levels: how many levels lie above the new root now, committed all.
        slot: scratch slot that the new root's keys and values had; they belong in slot 0, and
            those of slot ``1 + levels * width`` and on in slot 1 and on. ``None``: the new root
            has none yet, and nothing of the scratch stays.
    """

    levels: int
    slot: int | None


def grow(
    forward: DraftForward,
    roots: Tensor,
    shape: TreeShape,
    draft_temperature: float = 0.2,
    rank: DraftRank | None = None,
) -> list[Tree]:
    """Grow one tree of ``shape`` per request, with ``shape.depth`` forwards for the whole batch.

    See ``Growth``.
    """
    growth = Growth(forward, roots, shape.width, draft_temperature, rank)
    for _ in range(shape.depth):
        growth.step()
    return growth.trees(shape.max_nodes)


def _check_temperature(value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(
            f"draft temperature {value} cannot divide logits: choose a finite value above 0, "
            "such as 0.2"
        )


def _of_parents(state: Tensor, parents: Tensor) -> Tensor:
    """[B, m, s] by parent row -> [B, width, s] by node."""
    width, length = parents.shape[1], state.shape[2]
    if state.shape[1] == 1:  # below the root and in a chain there is one parent only
        return state.expand(-1, width, -1)
    return state.gather(1, parents[..., None].expand(-1, -1, length))
