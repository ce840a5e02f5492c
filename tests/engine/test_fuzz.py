"""A few of the cases of ``ci/soak fuzz``: SubSpec answers, or refuses, as plain vLLM does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

CASES = 40


@pytest.fixture(scope="module")
def fuzz():
    """The module `ci/long/fuzz.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "ci" / "long"))
        import fuzz

        yield fuzz
    del sys.modules["fuzz"]


def test_random_requests(fuzz, open_engine, lively_model_dir):
    cases = fuzz.cases(CASES, seed=1)
    assert cases == fuzz.cases(CASES, seed=1)
    with open_engine(lively_model_dir, **fuzz.ENGINE) as plain:
        expected = [fuzz.run(plain.llm, case, str(i)) for i, case in enumerate(cases)]
    with open_engine(lively_model_dir, fuzz.SUBSPEC, **fuzz.ENGINE) as engine:
        found = [fuzz.run(engine.llm, case, str(i)) for i, case in enumerate(cases)]
        assert engine.statistics()["drafted_nodes"] > 0
    compared = [
        (fuzz.difference(request, a, b), case, request)
        for case, *outcomes in zip(cases, expected, found, strict=True)
        for request, a, b in zip(case, *outcomes, strict=True)
    ]
    assert [problem for problem in compared if problem[0] is not None] == []
    answers = [outcome for case in expected for outcome in case if outcome.finished]
    assert len(compared) > len(answers) > CASES / 2  # both kinds are there
