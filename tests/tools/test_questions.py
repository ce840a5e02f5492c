"""The questions that ship, their checkers, and the paired comparison."""

from __future__ import annotations

from collections import Counter

import pytest
from scipy.stats import binom

from vllm_subspec.tools.questions import Question, compare_accuracy, load_questions

CHECKS = [
    ({"number": 42}, ["42", "The answer is 42.", "15 + 27 = 42", "42.0"], ["", "24", "42 or 43"]),
    ({"number": 1000}, ["1,000", "10^3 = 1000"], ["100", "1,00"]),
    ({"words": ["Paris"]}, ["Paris.", "It is paris!"], ["Parisian food", "London"]),
    ({"words": ["H2O", "H₂O"]}, ["It is H₂O.", "H2O"], ["CH2O2"]),
    ({"pattern": r"(?i)\W*yes\W*"}, ["yes", "Yes."], ["yes, of course", "no"]),
    (
        {"json_keys": ["x", "y"]},
        ['{"x": 1, "y": 2}', '```json\n{"y": 0, "x": 1}\n```'],
        ['{"x": 1}', '{"x": 1, "y": 2, "z": 3}', "[1, 2]", "x, y", ""],
    ),
]


@pytest.mark.parametrize(("check", "right", "wrong"), CHECKS, ids=[str(c[0]) for c in CHECKS])
def test_checks(check: dict[str, object], right: list[str], wrong: list[str]) -> None:
    question = Question("fact", "?", check)
    assert [answer for answer in right if not question.is_right(answer)] == []
    assert [answer for answer in wrong if question.is_right(answer)] == []


def test_sixty_different_questions_ship() -> None:
    questions = load_questions()
    assert Counter(q.kind for q in questions) == {"arithmetic": 20, "fact": 20, "format": 20}
    assert len({question.question for question in questions}) == 60
    assert not any(question.is_right("I do not know that") for question in questions)


# One right answer to each question that a pattern judges: a pattern nobody can satisfy shows here.
WRITTEN = (
    "Yes.", "no", "HELLO", "12", "A, B, C", "1 2 3 4 5", "red, red, red", "Banana.", "Apple",
    "Red, blue.", "Is it going to rain?", "What a day!", "2024-03-05", "09:30",
    "- cat\n- dog\n- cow", "1. Carrot\n2. Leek", "cat-dog", '"moon"', '{"name": "Ann"}',
    '{"x": 1, "y": 2}',
)  # fmt: skip


def test_every_format_can_be_met() -> None:
    formats = [question for question in load_questions() if question.kind == "format"]
    for question, answer in zip(formats, WRITTEN, strict=True):
        assert question.is_right(answer), question.question


def test_equal_answers_leave_an_interval_around_nothing() -> None:
    found = compare_accuracy([True] * 20 + [False] * 40, [True] * 20 + [False] * 40)
    assert (found.reference, found.difference, found.p) == (1 / 3, 0.0, 1.0)
    low, high = found.interval
    assert -0.06 < low < 0 < high == pytest.approx(-low)


def test_a_loss_is_seen_however_much_both_fail() -> None:
    reference = [True] * 24 + [False] * 36
    found = compare_accuracy(reference, [True] * 4 + [False] * 56)
    assert (found.only_reference, found.only_found) == (20, 0)
    assert found.difference == pytest.approx(-1 / 3)
    assert found.interval[1] < -0.1
    assert found.p == pytest.approx(2 * binom.cdf(0, 20, 0.5))
    assert compare_accuracy(reference, reference[::-1]).p == 1.0  # as often right, elsewhere
