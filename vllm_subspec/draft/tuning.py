"""How deep to draft: from what levels were accepted and what steps and passes took, live.

A deeper tree commits more tokens a pass and costs more steps. With S(l) the share of passes that
accept level l, one sequence commits tau = 1 + sum S(l) tokens in a cycle of one pass and the steps
that the pass does not hide. A tree that was followed (its best path accepted, and on into what grew
during the pass) begins with those levels; any other begins at its root.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_DEPTH = 48


def deepest(depth: int) -> int:
    """How deep a tree may be tuned that begins with ``depth`` levels; scratch is made for that."""
    return max(depth, min(MOST_DEPTH, depth + depth // 2))


_MEMORY = 0.97  # weight of what was known, per pass: about the last 30 passes count
_PATIENCE = 8  # passes between two changes
_SLACK = 1.02  # what the fastest depth may be ahead of the one that is taken
_RETRY = 64  # passes after which levels that no tree reached any more are forgotten: drafts change
_START = 0.95  # a level is accepted so often where nothing is known


@dataclass
class _Average:
    """Exponentially forgetting mean."""

    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = _MEMORY * self.weight + 1
        self.value += (value - self.value) / self.weight


@dataclass
class DepthTuner:
    """Chooses the shallowest depth with nearly the most expected tokens a second.

    The rate is flat about its maximum: the last few levels gain about what they cost, and that is
    time in which the link idles and no other request is served. Only speed depends on the depth:
    outputs are the target's whatever the tree.

    Args:
        depth: to begin with.
        most: deepest tree that may be chosen.
    """

    depth: int
    most: int
    _step_s: _Average = field(default_factory=_Average)
    _pass_s: _Average = field(default_factory=_Average)
    _hidden_steps: _Average = field(default_factory=_Average)
    _levels: list[_Average] = field(default_factory=list)
    _passes: int = 0
    _untried: int = 0

    def observe_draft(self, steps: int, seconds: float) -> None:
        """``steps`` draft steps took ``seconds``."""
        if steps:
            self._step_s.add(seconds / steps)

    def observe_pass(self, depth: int, accepted: int, seconds: float, hidden_steps: int) -> None:
        """A pass over a tree of ``depth`` levels accepted ``accepted`` of them.

        Args:
            depth: levels that were verified.
            accepted: levels along the accepted path; the bonus token is not among them.
            seconds: wall time of the pass, steps inside it included.
            hidden_steps: draft steps that ran inside it.
        """
        self._pass_s.add(seconds)
        self._hidden_steps.add(hidden_steps)
        while len(self._levels) < depth:
            self._levels.append(_Average(_START, 2.0))
        for level in range(min(depth, accepted + 1)):  # reached: its parent was accepted
            self._levels[level].add(float(level < accepted))
        self._untried = self._untried + 1 if depth < len(self._levels) else 0
        if self._untried == _RETRY:
            del self._levels[max(1, depth) :]
            self._untried = 0
        self._passes += 1
        if self._passes % _PATIENCE == 0 and self._step_s.weight:
            self._choose()

    def expected_rate(self, depth: int) -> float:
        """Tokens a second of one sequence with trees of ``depth`` levels."""
        survival, tau = 1.0, 1.0
        for level in range(depth):
            survival *= self._acceptance(level)
            tau += survival
        followed = survival * self._acceptance(depth) if self._hidden_steps.value else 0.0
        left = max(0.0, depth - self._hidden_steps.value)
        steps = (1 - followed) * depth + followed * left
        return tau / (self._pass_s.value + steps * self._step_s.value)

    def _acceptance(self, level: int) -> float:
        """Of a level whose parent was accepted; those below the known ones are like the last."""
        if not self._levels:
            return _START
        return self._levels[min(level, len(self._levels) - 1)].value

    def _choose(self) -> None:
        rates = [self.expected_rate(depth) for depth in range(1, self.most + 1)]
        enough = max(rates) / _SLACK
        shallowest = 1 + next(at for at, rate in enumerate(rates) if rate >= enough)
        # Levels beyond the tried ones are a guess: go there step by step.
        self.depth = min(shallowest, self.depth + max(2, self.depth // 2))
