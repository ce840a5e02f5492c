"""Acceptance without a target: trees along a text that the target has already written.

The target's tokens do not depend on drafts (design D4), greedy or seeded. So what a pass commits is
known as soon as its tree is: the longest path from the root that the text follows. And since a
tree grows level by level, each level by the scores of the last, the first d levels of a deep tree
are the tree of depth d: one deep tree at a root serves all depths that pass there. A tree need not
grow below the level at which the text leaves it.

Exact for trees that are verified whole (no ``max_nodes``) and grown from their root (no
post-speculation, which begins with what was left below the accepted path).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_subspec.draft.growth import Growth


class Pass(NamedTuple):
    """One verification: levels that the tree had, and how many of them were accepted."""

    levels: int
    accepted: int


def replay(
    text: Sequence[int], depths: Sequence[int], growth: Callable[[int], Growth]
) -> list[list[Pass]]:
    """The passes of a request over its text, by trees of each of ``depths`` levels.

    As in serving, the prompt's own pass gives the first token, and no tree is deeper than what the
    request may still commit before its last pass.

    Args:
        text: tokens that the target wrote.
        depths: of the trees.
        growth: makes a tree, of which nothing is grown yet, below a token of the text.

    Returns:
        In the order of ``depths``.
    """
    known: dict[int, tuple[int, int]] = {}  # by root: levels tried, levels that the text follows

    def reach(root: int, levels: int) -> int:
        tried, reached = known.get(root, (0, 0))
        if reached == tried < levels:
            reached = _reach(growth(root), text[root + 1 :], levels)
            known[root] = levels, reached
        return min(reached, levels)

    # The deepest first: what they tried serves the others, and those try few levels elsewhere.
    passes = {depth: _walk(len(text), depth, reach) for depth in sorted(depths, reverse=True)}
    return [passes[depth] for depth in depths]


def _walk(num_tokens: int, depth: int, reach: Callable[[int, int], int]) -> list[Pass]:
    passes, root = [], 0
    while root < num_tokens - 1:
        levels = min(depth, num_tokens - root - 2)
        passes.append(Pass(levels, reach(root, levels)))
        root += passes[-1].accepted + 1
    return passes


def _reach(growth: Growth, following: Sequence[int], levels: int) -> int:
    """Grow a tree as long as the text stays in it; how many levels it does, ``levels`` at most."""
    while growth.holds(following[: growth.depth]):
        if growth.depth == levels:
            return levels
        growth.step()
    return growth.depth - 1
