"""Passes and drafts in turn, timed for live tuning, which says what to draft next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_subspec.draft.acceptance import Outcome
from vllm_subspec.draft.averages import Average
from vllm_subspec.draft.stopping import Reach
from vllm_subspec.draft.tree import Tree
from vllm_subspec.draft.tuning import Cut, DepthTuner

_WAITED = 0.02
"""Share of a pass above which its waits mean that it took as long as the link."""


@dataclass(frozen=True)
class _Drafted:
    """When the last draft was over, for which requests, and the steps hidden until then."""

    at: float = 0.0
    req_ids: frozenset[str] = frozenset()
    hidden_steps: int = 0


@dataclass(frozen=True)
class _Pass:
    """What the target looks at now.

    Attributes:
        since: the end of the draft before it, or where there was none, its own beginning.
        rows: tokens in it.
        trees: as scheduled, by request; empty ones too.
        hidden_before: steps that ran within passes until then.
        idle_before: seconds that the target had waited for weights until then.
    """

    since: float
    rows: int
    trees: Mapping[str, Tree]
    hidden_before: int
    idle_before: float

    @property
    def has_prompts(self) -> bool:
        """Whether there is more in it than roots and their nodes."""
        return self.rows > sum(1 + len(tree) for tree in self.trees.values())


class Pacing:
    """What each cycle drafts: a fixed cut, or the tuner's.

    Args:
        cut: the fixed one.
        tuner: chooses live; ``None``: always the fixed one.
        idle_s: seconds that the target has waited for weights since start, drafting or not.
        clock: seconds.
    """

    def __init__(
        self,
        cut: Cut,
        tuner: DepthTuner | None,
        idle_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cut, self.tuner = cut, tuner
        self._reach = Reach()
        self._idle_s, self._clock = idle_s, clock
        self._streamed_s = Average()  # of passes that waited
        self._drafted = _Drafted()
        self._pass: _Pass | None = None

    def begin_pass(self, num_tokens: Mapping[str, int], trees: Mapping[str, Tree]) -> None:
        """The target's pass begins, over so many tokens of each request, with these trees."""
        last, now = self._drafted, self._clock()
        # The time since the draft is the pass's, unless another pass or a rest lies between.
        goes_on = self._pass is None and not last.req_ids.isdisjoint(num_tokens)
        since = last.at if goes_on else now
        self._pass = _Pass(
            since, sum(num_tokens.values()), trees, last.hidden_steps, self._idle_s()
        )

    def end_pass(self, committed: Mapping[str, Sequence[int]], hidden_steps: int) -> None:
        """The pass is over.

        Args:
            committed: tokens of each request that goes on; its bonus token is the last.
            hidden_steps: draft steps that ran within passes since start.
        """
        last, self._pass = self._pass, None
        if self.tuner is None or last is None:
            return
        seconds, idle_s = self._clock() - last.since, self._idle_s() - last.idle_before
        if idle_s > _WAITED * seconds:
            self._streamed_s.add(seconds)
            self.tuner.pass_floor_s = self._streamed_s.value
        # A slow disk must not look like many rows: what the target computed is told.
        seconds -= idle_s
        outcomes = []
        for req_id, tokens in committed.items():
            tree = last.trees.get(req_id, Tree.empty())
            if len(tree):
                least_nodes = tree.least_nodes(tokens[:-1])
                outcomes.append(Outcome(tree.depth, len(tree), least_nodes))
                self._reach.observe(tree.doubts(), len(least_nodes))
        if last.has_prompts:
            self.tuner.observe_prompts(last.rows, seconds)
            self.tuner.observe_trees(outcomes)
        else:
            hidden = hidden_steps - last.hidden_before
            self.tuner.observe_pass(last.rows, seconds, hidden, outcomes)

    def next_cut(self, sequences: int, is_new: bool) -> Cut:
        """What each of so many requests drafts now; ``is_new``: one of them has just begun."""
        if self.tuner is None:
            return self._cut
        if is_new:
            self.tuner.look_again()
        return self.tuner.next_cut(sequences)

    def pays(self, cut: Cut, depth: int, doubts: Iterable[float]) -> bool:
        """Whether one level more is worth its price.

        Args:
            cut: of this draft.
            depth: levels grown so far.
            doubts: of the last one, in each tree that may have another.
        """
        # A path gets to the next level at most as often as to this one.
        return sum(self._reach.chance(depth, doubt) for doubt in doubts) >= cut.price

    def end_draft(
        self, req_ids: Sequence[str], steps: int, seconds: float, hidden_steps: int
    ) -> None:
        """The draft is over; its steps took ``seconds``. ``hidden_steps``: as in ``end_pass``."""
        if self.tuner is not None:
            self.tuner.observe_draft(len(req_ids), steps, seconds)
        self._drafted = _Drafted(self._clock(), frozenset(req_ids), hidden_steps)
