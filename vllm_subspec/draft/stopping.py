"""When to stop growing a tree: the chance that the accepted path gets to a level, learnt live.

The *doubt* of a level is what the scores of its nodes say that was lost on the way there: -log of
the sum of their sharpened probabilities (``Tree.doubts``). Where the draft is sure it hardly grows,
where several ways are open and the tree holds four of them it does.

The accepted path ends at some rate a level, since the shadow is not the target, and at some rate a
unit of doubt: it gets to level l of doubt x with chance exp(-per_level * l - per_doubt * x). The
likeliest rates are the ends that were seen over the levels and the doubt that were passed. A path
that was accepted to the tree's last level passed all of it and did not end: so it does not matter
to the rates where trees were stopped. Which of both rates ended a path nobody knows; each gets the
share that it has in their sum there, and time up to the end is what it is on average
(expectation-maximisation for interval-censored exponential times; Dempster, Laird, Rubin 1977).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEMORY = 0.99  # weight of what was known, per tree: about the last 100 count
_FIRST_PER_LEVEL, _FIRST_PER_DOUBT = 0.05, 1.0  # before anything is known
_FIRST_ENDS = 1.0  # ends of paths, of each kind, that these rates always stand for
_MOST_DOUBT = 20.0  # no level is less likely than that


class Reach:
    """How likely accepted paths get to a level of a tree.

    Attributes:
        per_level: ends of the accepted path a level, > 0.
        per_doubt: the same a unit (nat) of doubt, > 0.
    """

    def __init__(self) -> None:
        self.per_level, self.per_doubt = _FIRST_PER_LEVEL, _FIRST_PER_DOUBT
        self._level_ends = self._doubt_ends = self._levels = self._doubt = 0.0

    def chance(self, level: int, doubt: float) -> float:
        """That the accepted path gets to ``level``, given the level's doubt."""
        return math.exp(-self.per_level * level - self.per_doubt * min(doubt, _MOST_DOUBT))

    def observe(self, doubts: Sequence[float], accepted: int) -> None:
        """A tree was verified.

        Args:
            doubts: of its levels, from the root down.
            accepted: levels that the accepted path got to.
        """
        passed = min(accepted, len(doubts))
        levels, doubt = float(passed), min(doubts[passed - 1], _MOST_DOUBT) if passed else 0.0
        level_ends = doubt_ends = 0.0
        if passed < len(doubts):
            rise = max(0.0, min(doubts[passed], _MOST_DOUBT) - doubt)
            by_level, by_doubt = self.per_level, self.per_doubt * rise
            rate = by_level + by_doubt
            level_ends, doubt_ends = by_level / rate, by_doubt / rate
            share = 1 / rate + math.exp(-rate) / math.expm1(-rate)  # of the level, before the end
            levels, doubt = levels + share, doubt + share * rise
        self._levels = _MEMORY * self._levels + levels
        self._doubt = _MEMORY * self._doubt + doubt
        self._level_ends = _MEMORY * self._level_ends + level_ends
        self._doubt_ends = _MEMORY * self._doubt_ends + doubt_ends
        self.per_level = _rate(self._level_ends, self._levels, _FIRST_PER_LEVEL)
        self.per_doubt = _rate(self._doubt_ends, self._doubt, _FIRST_PER_DOUBT)


def _rate(ends: float, passed: float, first: float) -> float:
    return (ends + _FIRST_ENDS) / (passed + _FIRST_ENDS / first)
