"""What a worker counted; plain numbers, so that it travels through any RPC."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from vllm_subspec.draft.tree import Tree
from vllm_subspec.stream import StreamStatistics

Fallback = Literal["grammar", "thinking_budget", "unscheduled", "opted_out", "stepped_aside"]
"""Why a request got less than a tree for its next pass: a chain because of its grammar; nothing
because of a thinking budget, because the scheduler had no room for its drafts, because it asked
for none, or because speculation does not pay at the time."""


@dataclass
class DraftCounters:
    """What a drafter did since start.

    Attributes:
        draft_steps: levels drafted between target passes (draft forwards).
        draft_seconds: time spent there, the load of contexts and the ranking included.
        overlapped_draft_steps: levels drafted within target passes, in waits for weights.
        overlapped_draft_seconds: time spent there.
        followed_drafts: drafts that went on below the path just accepted.
        started_drafts: drafts that began at a root alone.
        stopped_drafts: drafts that stopped since another level promised less than its price.
        fallbacks: how often a request got less than a tree, by reason; all reasons are there.
    """

    draft_steps: int = 0
    draft_seconds: float = 0.0
    overlapped_draft_steps: int = 0
    overlapped_draft_seconds: float = 0.0
    followed_drafts: int = 0
    started_drafts: int = 0
    stopped_drafts: int = 0
    fallbacks: dict[Fallback, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(Fallback), 0)
    )

    def count_fallback(self, reason: Fallback) -> None:
        """A request's next pass verifies less than a tree, for this reason."""
        self.fallbacks[reason] += 1


class WorkClock:
    """How long there was work: engine steps, and what lies between steps of requests that go on.

    Attributes:
        engine_steps: steps with tokens, those of prompts included.
        busy_seconds: see above.
    """

    def __init__(self) -> None:
        self.engine_steps = 0
        self.busy_seconds = 0.0
        self._since = 0.0  # when the work began that is not counted yet

    def begin_step(self, now: float, goes_on: bool) -> None:
        """A step begins; ``goes_on`` says that it has requests of the last one."""
        if not goes_on:
            self._since = now

    def end_step(self, now: float) -> None:
        """The step that began last is over, its drafting included."""
        self.engine_steps += 1
        self.busy_seconds += now - self._since
        self._since = now


@dataclass
class SpeculationCounters:
    """Counts since start, over decode steps only (a prompt's own pass is none).

    Attributes:
        target_passes: verification passes, one per request and step.
        undrafted_passes: those that verified no draft.
        committed_tokens: tokens those passes committed, bonus tokens included.
        drafted_nodes: nodes those passes verified.
        accepted_by_level: how often a node of level i + 1 was accepted.
        drafted_by_level: how often such a level was verified.
        decode_steps: engine steps without prompt tokens.
        target_seconds: time those steps spent in the target and its sampler, draft steps within
            the waits for its weights included.
    """

    target_passes: int = 0
    undrafted_passes: int = 0
    committed_tokens: int = 0
    drafted_nodes: int = 0
    accepted_by_level: list[int] = field(default_factory=list)
    drafted_by_level: list[int] = field(default_factory=list)
    decode_steps: int = 0
    target_seconds: float = 0.0

    def count_pass(self, tree: Tree, committed: int) -> None:
        """Count one request's pass over ``tree`` that committed ``committed`` tokens."""
        self.target_passes += 1
        self.undrafted_passes += not len(tree)
        self.committed_tokens += committed
        self.drafted_nodes += len(tree)
        while len(self.drafted_by_level) < tree.depth:
            self.drafted_by_level.append(0)
            self.accepted_by_level.append(0)
        for level in range(tree.depth):
            self.drafted_by_level[level] += 1
        for level in range(committed - 1):
            self.accepted_by_level[level] += 1

    def report(
        self, draft: DraftCounters, stream: StreamStatistics | None, bytes_per_pass: int
    ) -> dict[str, Any]:
        """Everything as a flat JSON-serialisable dictionary, drafts and stream included."""
        numbers = asdict(self) | asdict(draft)
        fallbacks = numbers.pop("fallbacks")
        numbers |= {f"fallback_{reason}": count for reason, count in fallbacks.items()}
        numbers["streamed_bytes_per_pass"] = bytes_per_pass
        if stream is not None:
            numbers |= {f"stream_{name}": value for name, value in asdict(stream).items()}
        return numbers
