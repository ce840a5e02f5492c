"""How much to draft for each running request: levels and nodes, perhaps none; learnt live.

A deeper tree commits more tokens a pass and costs more draft steps; more nodes commit more and cost
more of the target's products, which n requests share with the stream. With S(l, m) the share of
passes that accept level l of a tree cut to its m best nodes, n requests commit n * tau tokens,
tau = 1 + sum S(l, m), in a cycle of one pass over n * (1 + m) rows and the draft steps that the
pass does not hide. A lone tree that was followed (its best path accepted, and on into what grew
during the pass) begins with those levels; any other begins at its root. Without drafts n requests
commit n tokens in a pass over n rows: where that is faster, speculation steps aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vllm_subspec.draft.acceptance import Acceptance, Outcome
from vllm_subspec.draft.averages import Average, SecondsBySize, Values
from vllm_subspec.draft.stepping import StepAside

MOST_DEPTH = 48


def deepest(depth: int) -> int:
    """How deep a tree may be tuned that begins with ``depth`` levels; scratch is made for that."""
    return max(depth, min(MOST_DEPTH, depth + depth // 2))


_PATIENCE = 8  # cycles between two changes, once a number of requests is known
_SLACK = 1.02  # what the fastest cut may be ahead of the one that is taken
_LEAP = 2.0  # a pass may have so many times the rows of the largest one measured


@dataclass(frozen=True)
class Cut:
    """What each running request drafts.

    Attributes:
        depth: levels grown at most.
        nodes: kept for verification at most.
        price: tokens that a level must promise, all requests together, or no more are grown.
    """

    depth: int
    nodes: int
    price: float = 0.0


NOTHING = Cut(0, 0)
"""The cut of speculation that stepped aside."""


@dataclass(frozen=True)
class Change:
    """Speculation stepped aside, or came back.

    Attributes:
        is_aside: what it is now.
        sequences: running requests.
        plain_rate: expected tokens a second without drafts.
        drafting_rate: the same, drafting in the best way.
        tau: acceptance length expected of that.
        reason: ``batch``: too many requests share a pass, a lone one would draft; ``acceptance``:
            not even a lone one would.
    """

    is_aside: bool
    sequences: int
    plain_rate: float
    drafting_rate: float
    tau: float
    reason: Literal["batch", "acceptance"]

    def __str__(self) -> str:
        """What to log after the name of who does it."""
        what = "drafts again"
        if self.is_aside:
            whys = {
                "batch": "many requests share each pass",
                "acceptance": "drafts are accepted too seldom for what they cost",
            }
            what = f"steps aside, since {whys[self.reason]}"
        decode = "1 request decodes" if self.sequences == 1 else f"{self.sequences} requests decode"
        return (
            f"{what}: {decode} {self.plain_rate:.2f} tokens/s without drafts, and "
            f"{self.drafting_rate:.2f} with them at an acceptance length of {self.tau:.1f}"
        )


@dataclass
class _Standing:
    """The cut in use for a number of requests, and the cycles that it was looked at."""

    cut: Cut
    cycles: int = 0


class DepthTuner:
    """Chooses the shallowest cut with nearly the most expected tokens a second.

    The rate is flat about its maximum: the last few levels gain about what they cost, and that is
    time in which the link idles. Only speed depends on the cut: outputs are the target's whatever
    the trees.

    Args:
        depth: to begin with.
        most: deepest tree that may be chosen.
        width: nodes that a level grows.
        max_nodes: nodes verified at most, of each request.
        adaptive: trees stop by themselves, each where a step costs more than it promises; the cut
            then gives the price and leaves the depth open.
        on_change: told when speculation steps aside or comes back.

    Attributes:
        pass_floor_s: seconds that a pass of any size takes at least, since the link needs them.
    """

    def __init__(
        self,
        depth: int,
        most: int,
        width: int,
        max_nodes: int,
        on_change: Callable[[Change], None] = lambda change: None,
        adaptive: bool = False,
    ) -> None:
        self.pass_floor_s = 0.0
        self._adaptive = adaptive
        self._first, self._most, self._width = depth, most, width
        self._on_change = on_change
        self._acceptance = Acceptance(most, width, max_nodes)
        self._step_s, self._pass_s = SecondsBySize(), SecondsBySize()
        self._hidden_steps = Average()
        self._standing: dict[int, _Standing] = {}
        self._aside = StepAside()
        self._is_probing = False  # the next draft is a probe

    @property
    def is_aside(self) -> bool:
        """Whether speculation has stepped aside."""
        return self._aside.is_aside

    # -- learning --------------------------------------------------------------------------------

    def observe_draft(self, sequences: int, steps: int, seconds: float) -> None:
        """``steps`` draft steps of so many trees at once took ``seconds``."""
        if not steps:
            return
        if self._is_probing:  # what steps of other numbers of trees took is as old
            self._step_s, self._is_probing = SecondsBySize(), False
        self._step_s.add(sequences, seconds / steps)

    def observe_prompts(self, rows: int, seconds: float) -> None:
        """The target computed for ``seconds`` on ``rows``, prompts' among them."""
        self._pass_s.hint(rows, seconds)

    def observe_pass(
        self, rows: int, seconds: float, hidden_steps: int, outcomes: Sequence[Outcome]
    ) -> None:
        """A pass over ``rows``, one root a request and its nodes.

        Args:
            rows: tokens in the pass.
            seconds: that the target computed; its waits for weights are not among them.
            hidden_steps: draft steps that ran inside it.
            outcomes: of the trees that were in it.
        """
        self._pass_s.add(rows, seconds)
        if not self.is_aside:  # else probes look again
            self._pass_s.forget_larger(rows)
        if outcomes and rows == 1 + outcomes[0].nodes:  # one alone: only then are steps hidden
            self._hidden_steps.add(hidden_steps)
        self._acceptance.observe(outcomes)

    def observe_trees(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the trees in a pass, whatever it took."""
        self._acceptance.observe(outcomes)

    # -- choosing --------------------------------------------------------------------------------

    def next_cut(self, sequences: int) -> Cut:
        """What each of so many running requests drafts in the next cycle; to be asked once each.

        Until a draft step and a pass were measured, the first depth; several requests share the
        nodes of one then.
        """
        if not (self._step_s.is_known and self._pass_s.is_known):
            nodes = max(1, int(self._acceptance.node_counts[-1]) // sequences)
            return Cut(min(self._first, nodes), nodes)
        cut = self._best(sequences)
        drafting, plain = self.expected_rate(cut, sequences), self.plain_rate(sequences)
        was_aside = self.is_aside
        drafts = self._aside.drafts(drafting, plain)
        if self.is_aside != was_aside:
            tau = float(self._tau()[self._at(cut)])
            self._on_change(Change(self.is_aside, sequences, plain, drafting, tau, self._reason()))
        if drafts and self.is_aside:
            self._acceptance.fade()
            self._pass_s.fade()
            self._is_probing = True
        if not drafts:
            return NOTHING
        return self._opened(cut, sequences, drafting) if self._adaptive else cut

    def _opened(self, cut: Cut, sequences: int, rate: float) -> Cut:
        """The cut for trees that stop by themselves, worth as much as the fixed one at least."""
        price = rate * float(self._step_s.at(sequences))
        return Cut(min(self._most, cut.nodes), cut.nodes, price)

    def look_again(self) -> None:
        """A new request runs: if it was the text that did not pay, this one's may."""
        if self.is_aside and self._reason() == "acceptance":
            self._aside.look_again()

    def expected_rate(self, cut: Cut, sequences: int = 1) -> float:
        """Tokens a second of so many requests together."""
        return float(self._rates(sequences)[self._at(cut)])

    def plain_rate(self, sequences: int) -> float:
        """The same without drafts."""
        return float(sequences / self._pass_s.at(sequences, self.pass_floor_s))

    def _at(self, cut: Cut) -> tuple[int, int]:
        return cut.depth - 1, int(np.searchsorted(self._acceptance.node_counts, cut.nodes))

    def _reason(self) -> Literal["batch", "acceptance"]:
        """Why to step aside: would a lone request draft?"""
        return "batch" if self._rates(1).max() > self.plain_rate(1) else "acceptance"

    def _best(self, sequences: int) -> Cut:
        """The standing cut, looked at again in every eighth cycle, and sooner while it is new."""
        standing = self._standing.get(sequences)
        if standing is None:
            standing = self._standing[sequences] = _Standing(self._choose(sequences))
        elif standing.cycles in (1, 2, 4) or standing.cycles % _PATIENCE == 0:
            cut = self._choose(sequences)
            if cut != standing.cut:
                standing.cut, standing.cycles = cut, 0
        standing.cycles += 1
        return standing.cut

    def _choose(self, sequences: int) -> Cut:
        rates = self._rates(sequences)
        # Levels and passes beyond the tried ones are a guess: go there step by step.
        known = self._acceptance.num_levels
        rates[known + max(2, known // 2) if known else self._first :] = 0.0
        leap = self._rows(sequences) > _LEAP * self._pass_s.largest
        leap[0, 0] = False
        rates[leap] = 0.0
        depth = int((rates.max(1) >= rates.max() / _SLACK).argmax())
        return Cut(depth + 1, int(self._acceptance.node_counts[rates[depth].argmax()]))

    def _rates(self, sequences: int) -> Values:
        """Tokens a second of all requests together, by depth - 1 and node count."""
        tau = self._tau()
        depths = np.arange(1, self._most + 1)[:, None]
        steps = np.broadcast_to(depths, tau.shape).astype(float)
        if sequences == 1 and (hidden := self._hidden_steps.value):
            followed = self._acceptance.survival() * self._acceptance.below()
            steps = (1 - followed) * depths + followed * np.maximum(0.0, depths - hidden)
        pass_s = self._pass_s.at(self._rows(sequences), self.pass_floor_s)
        rates: Values = sequences * tau / (pass_s + steps * self._step_s.at(sequences))
        return rates

    def _rows(self, sequences: int) -> Values:
        """Of a pass, by depth - 1 and node count."""
        depths = np.arange(1, self._most + 1)[:, None]
        rows: Values = sequences * (
            1.0 + np.minimum(self._acceptance.node_counts, self._width * depths)
        )
        return rows

    def _tau(self) -> Values:
        """Tokens a request commits in a pass, by depth - 1 and node count."""
        tau: Values = 1 + np.cumsum(self._acceptance.survival(), 0)
        return tau
