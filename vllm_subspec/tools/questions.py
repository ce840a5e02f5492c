"""Sixty short questions whose answers a program can check, shipped with the package.

Arithmetic, facts and formats, 20 each. A small model fails many of them: what counts is whether it
fails the same ones with and without speculation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from scipy.stats import binomtest, norm

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:json)?\n?|```")


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        kind: arithmetic, fact or format.
        question: the user's message.
        check: one of ``number`` (the last number of the answer), ``words`` (one of them is in the
            answer), ``pattern`` (a regular expression for the whole answer) or ``json_keys`` (the
            answer is a JSON object with exactly these keys), and what it compares with.
    """

    kind: str
    question: str
    check: Mapping[str, Any]

    def is_right(self, answer: str) -> bool:
        """Whether the answer passes the check."""
        [(name, wanted)] = self.check.items()
        if name == "number":
            numbers = _NUMBER.findall(answer)
            return bool(numbers) and float(numbers[-1].replace(",", "")) == wanted
        if name == "words":
            return any(re.search(rf"(?i)(?<!\w){re.escape(w)}(?!\w)", answer) for w in wanted)
        if name == "pattern":
            return re.fullmatch(wanted, answer) is not None
        assert name == "json_keys", name
        try:
            value = json.loads(_FENCE.sub("", answer))
        except ValueError:
            return False
        return isinstance(value, dict) and set(value) == set(wanted)


@dataclass(frozen=True)
class PairedAccuracy:
    """Accuracy of two ways to answer the same questions.

    Attributes:
        questions: how many.
        reference: share that the reference answers rightly.
        found: share that the other answers rightly.
        only_reference: questions that the reference alone answers rightly.
        only_found: questions that the other alone answers rightly.
        difference: ``found - reference``.
        interval: 95 %, of the difference, for paired shares (Bonett and Price 2012).
        p: McNemar's exact test, that both are equally often right where they differ.
    """

    questions: int
    reference: float
    found: float
    only_reference: int
    only_found: int
    difference: float
    interval: tuple[float, float]
    p: float


def load_questions() -> tuple[Question, ...]:
    """All of them, in their order."""
    text = files("vllm_subspec.tools").joinpath("data", "questions.json").read_text("utf-8")
    return tuple(Question(**question) for question in json.loads(text))


def compare_accuracy(reference: Sequence[bool], found: Sequence[bool]) -> PairedAccuracy:
    """Compare by question.

    Args:
        reference: whether each question was answered rightly.
        found: likewise, by what is judged.
    """
    pairs = list(zip(reference, found, strict=True))
    lost = sum(a and not b for a, b in pairs)
    won = sum(b and not a for a, b in pairs)
    total = len(pairs)
    # One pair added to each kind of difference keeps the interval honest where there is none.
    down, up = (lost + 1) / (total + 2), (won + 1) / (total + 2)
    spread = (down + up - (up - down) ** 2) / (total + 2)
    half = float(norm.ppf(0.975)) * spread**0.5
    return PairedAccuracy(
        questions=total,
        reference=sum(reference) / total,
        found=sum(found) / total,
        only_reference=lost,
        only_found=won,
        difference=(won - lost) / total,
        interval=(up - down - half, up - down + half),
        p=float(binomtest(won, won + lost).pvalue) if won + lost else 1.0,
    )
