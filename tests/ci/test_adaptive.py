"""What the proof of adaptive depth makes of its measurements; the measuring itself is by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from vllm_subspec.statistics import Statistics

SCRIPT = Path(__file__).parents[2] / "ci/long/adaptive.py"


@pytest.fixture(scope="module")
def adaptive():
    spec = importlib.util.spec_from_file_location("adaptive", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["adaptive"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["adaptive"]


def test_figures_are_of_all_answers_and_gains_of_each(adaptive):
    deep = Statistics(target_passes=2, committed_tokens=8, drafted_by_level=(2, 2, 1, 1))
    flat = Statistics(target_passes=4, committed_tokens=10, drafted_by_level=(4, 2), draft_steps=6)
    base = adaptive.Answers([4.0, 8.0, 6.0], [deep, flat, flat], [[1, 2], [3, 4], [5, 6]])
    ours = adaptive.Answers([2.0, 6.0, 6.0], [deep, deep, flat], [[1, 2], [3, 9], [5, 6]])
    assert base.figures(base)["gain"] == 1.0
    assert base.figures(base)["other_answers"] == 0
    found = ours.figures(base)
    assert found["tokens_per_s"] == 6 / 14
    assert found["tau"] == 26 / 8
    assert found["depth"] == 18 / 8
    assert found["steps"] == 6 / 8
    assert found["gain"] == pytest.approx(8 / 6)  # of 2, 4 / 3 and 1
    assert found["other_answers"] == 1
