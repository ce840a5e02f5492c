"""The checks of the losslessness protocol: pure judgement of what engines answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_subspec.tools.audit import Divergence, Noise, audit, sampling_noise
from vllm_subspec.tools.distribution import (
    Comparison,
    NextTokenLaw,
    Prefix,
    Sample,
    compare,
    rounding,
)
from vllm_subspec.tools.lossless_asks import ANSWER_TOKENS, SEED_TEMPERATURE, Plan
from vllm_subspec.tools.questions import PairedAccuracy, compare_accuracy, load_questions

ALPHA = 1e-3
"""Probability that a run fails although nothing is wrong, all its statistical tests together."""


@dataclass(frozen=True)
class Coverage:
    """How much of what was judged had passed through a tree.

    Attributes:
        tokens: committed by target passes, beyond each prompt's own.
        from_trees: of them, those that a drafted node held.
    """

    tokens: int
    from_trees: int

    def __str__(self) -> str:
        return f"{self.from_trees} of {self.tokens} tokens out of trees"

    @classmethod
    def of(cls, statistics: Mapping[str, Any]) -> Coverage:
        """From what SubSpec's counters grew by."""
        return cls(statistics["committed_tokens"], sum(statistics["accepted_by_level"]))


@dataclass(frozen=True)
class Agreement:
    """Token by token: answers of the judged engine against the reference's.

    Attributes:
        answers: compared.
        tokens: compared, up to each answer's first difference.
        divergences: each answer's first difference.
        wrong: how many of these are no near-ties; in float32 all of them are wrong.
        coverage: of the judged engine.
    """

    answers: int
    tokens: int
    divergences: tuple[Divergence, ...]
    wrong: int
    coverage: Coverage

    @property
    def found_fault(self) -> bool:
        """A token is wrong."""
        return self.wrong > 0

    def __str__(self) -> str:
        differ = len(self.divergences)
        return (
            f"{self.answers} answers, {self.tokens} tokens; {differ} answers differ, "
            f"{differ - self.wrong} by near-ties, {self.wrong} wrongly; {self.coverage}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; an answer that ended early has no gap, since JSON has no infinity."""
        told = asdict(self)
        for divergence in told["divergences"]:
            if divergence["gap"] == float("inf"):
                divergence["gap"] = None
        return told


@dataclass(frozen=True)
class Law:
    """Unseeded draws against the target's law.

    Attributes:
        comparison: all tests and distances.
        draws: requests.
        level: a test with a smaller p fails; the correction for multiple tests is in it.
        coverage: of the judged engine.
    """

    comparison: Comparison
    draws: int
    level: float
    coverage: Coverage

    @property
    def smallest(self) -> float:
        """The least p of all tests."""
        return min(test.p for test in self.comparison.tests)

    def __str__(self) -> str:
        return (
            f"{self.draws} draws, {len(self.comparison.tests)} tests, smallest p "
            f"{self.smallest:.2g} against {self.level:.2g}; {self.coverage}"
        )

    @property
    def found_fault(self) -> bool:
        """A test fails."""
        return self.smallest < self.level

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"smallest_p": self.smallest}


@dataclass(frozen=True)
class Tasks:
    """Questions with checkable answers.

    Attributes:
        accuracy: of both engines, paired.
        level: as in ``Law``.
        coverage: of the judged engine.
    """

    accuracy: PairedAccuracy
    level: float
    coverage: Coverage

    def __str__(self) -> str:
        found = self.accuracy
        low, high = found.interval
        return (
            f"{found.questions} questions, {found.found:.1%} right, reference "
            f"{found.reference:.1%}; difference {found.difference:+.1%} "
            f"[{low:+.1%}, {high:+.1%}]; {self.coverage}"
        )

    @property
    def found_fault(self) -> bool:
        """One engine is more often right than the other."""
        return self.accuracy.p < self.level

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


Check = Agreement | Law | Tasks


def passed(check: Check) -> bool:
    """It found no fault, and not for want of trees."""
    return not check.found_fault and check.coverage.from_trees > 0


def to_json(checks: Mapping[str, Check]) -> dict[str, Any]:
    """Plain values, by name; ``told`` is for people."""
    return {
        name: check.to_json()
        | {"passed": passed(check), "found_fault": check.found_fault, "told": str(check)}
        for name, check in checks.items()
    }


Results = Mapping[str, Mapping[str, Any]]
"""By name of the ask, what a worker told (see ``lossless_worker.Told``)."""


@dataclass(frozen=True)
class Truth:
    """What the reference told, and how to judge others by it.

    Attributes:
        model: folder of the target.
        plan: what was asked.
        exact: every difference is wrong, since all engines compute in float32.
        num_dtypes: of the run; they share the level of the tests.
        told: by the reference.
        laws: by opening and drawn prefix.
    """

    model: Path
    plan: Plan
    exact: bool
    num_dtypes: int
    told: Results
    laws: Mapping[str, Mapping[Prefix, NextTokenLaw]]

    @property
    def rounding_per_draw(self) -> float:
        """See ``distribution.rounding``; of the reference's greedy answers."""
        laws, rescored = (
            [
                NextTokenLaw.from_logprobs(*law)
                for answer in self.told["greedy"][key]
                for law in answer
            ]
            for key in ("laws", "rescored")
        )
        return rounding(laws, rescored)

    @property
    def gaps(self) -> list[float]:
        """Logit of the best token minus that of the second, over the greedy answers."""
        greedy = self.told["greedy"]["laws"]
        return [logprobs[0] - logprobs[1] for laws in greedy for _, logprobs in laws]

    def checks(self, judged: Results, answer_tokens: int = ANSWER_TOKENS) -> dict[str, Check]:
        """Of every ask that there is an answer to.

        Args:
            answer_tokens: that the greedy and seeded answers were limited to.
        """
        found: dict[str, Check] = {}
        for name, answers in judged.items():
            if name == "greedy":
                found[name] = self._agreement(name, answers, answer_tokens, None)
            elif name == "seeded":
                noise = sampling_noise(self.plan.seeds, SEED_TEMPERATURE)
                found[name] = self._agreement(name, answers, answer_tokens, noise)
            else:
                found[name] = (
                    self._unseeded(answers) if name == "unseeded" else self._tasks(answers)
                )
        return found

    def _agreement(
        self, name: str, judged: Mapping[str, Any], answer_tokens: int, noise: Noise | None
    ) -> Agreement:
        found = judged["tokens"]
        expected = [tokens[:answer_tokens] for tokens in self.told[name]["tokens"]]
        divergences = tuple(audit(self.model, self.plan.texts.chats, expected, found, noise))
        lengths = [len(answer) for answer in expected]
        for divergence in divergences:
            lengths[divergence.prompt] = divergence.position
        return Agreement(
            answers=len(found),
            tokens=sum(lengths),
            divergences=divergences,
            wrong=sum(self.exact or not divergence.is_near_tie for divergence in divergences),
            coverage=Coverage.of(judged["statistics"]),
        )

    def _unseeded(self, judged: Mapping[str, Any]) -> Law:
        samples = [
            Sample(opening, draws, self.laws[opening])
            for opening, draws in self.plan.by_opening(judged["tokens"]).items()
        ]
        comparison = compare(samples, self.rounding_per_draw)
        return Law(
            comparison=comparison,
            draws=len(judged["tokens"]),
            level=self._level(len(comparison.tests)),
            coverage=Coverage.of(judged["statistics"]),
        )

    def _tasks(self, judged: Mapping[str, Any]) -> Tasks:
        right = [
            [
                question.is_right(text.strip())
                for question, text in zip(load_questions(), texts, strict=True)
            ]
            for texts in (self.told["tasks"]["texts"], judged["texts"])
        ]
        coverage = Coverage.of(judged["statistics"])
        return Tasks(compare_accuracy(*right), self._level(1), coverage)

    def _level(self, num_tests: int) -> float:
        """Of one test: half of ``ALPHA`` for all tests of draws, half for tasks (Bonferroni)."""
        return ALPHA / 2 / self.num_dtypes / num_tests
