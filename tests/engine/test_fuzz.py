"""A few of the cases of ``ci/soak fuzz``: SubSpec answers, or refuses, as plain vLLM does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

from proofs.fuzz_cases import ENGINE, SUBSPEC, cases
from proofs.fuzz_runs import differences, run

pytestmark = pytest.mark.engine

CASES = 40


def test_random_requests(open_engine, lively_model_dir):
    drawn = cases(CASES, seed=1)
    assert drawn == cases(CASES, seed=1)
    with open_engine(lively_model_dir, **ENGINE) as plain:
        expected = [run(plain.llm, case, str(i)) for i, case in enumerate(drawn)]
    with open_engine(lively_model_dir, SUBSPEC, **ENGINE) as engine:
        found = [run(engine.llm, case, str(i)) for i, case in enumerate(drawn)]
        assert engine.statistics()["drafted_nodes"] > 0
    for i, case in enumerate(drawn):
        assert differences(case, expected[i], found[i]) == [], case
    outcomes = [outcome for case in expected for outcome in case]
    answers = [outcome for outcome in outcomes if outcome.finished]
    assert len(outcomes) > len(answers) > CASES / 2  # both kinds are there
