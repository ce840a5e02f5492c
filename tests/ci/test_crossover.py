"""What the crossover proof makes of its measurements; the measuring itself is by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci/long/crossover.py"


@pytest.fixture(scope="module")
def crossover():
    spec = importlib.util.spec_from_file_location("crossover", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crossover"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["crossover"]


@pytest.fixture
def table(crossover):
    """Two rounds; the fixed tree loses at 4 clients, the tuned one stands aside at 8."""
    rates = {
        "plain": {1: 1.0, 4: 4.0, 8: 8.0},
        "fixed": {1: 5.0, 4: 3.0, 8: 2.0},
        "tuned": {1: 5.0, 4: 6.0, 8: 7.9},
    }
    cells = [
        crossover.Cell(mode, clients, rate + extra, 2.0, 9.0, float(mode == "tuned") * clients / 9)
        for extra in (-0.05, 0.05)
        for mode, line in rates.items()
        for clients, rate in line.items()
    ]
    return crossover.summary(cells)


def test_medians_and_points(crossover, table):
    assert table["fixed"][4]["tokens_per_s"] == pytest.approx(3.0)
    assert crossover.points(table) == {
        "steps_aside_at": 8,
        "plain_beats_fixed_at": 4,
        "plain_beats_tuned_at": 8,
    }
    del table["tuned"][8]
    assert crossover.points(table)["steps_aside_at"] is None


def test_the_plot_shows_every_mode(crossover, table, tmp_path):
    path = tmp_path / "plots" / "crossover.svg"
    crossover.draw(table, "a model", path)
    picture = path.read_text()
    assert all(colour in picture for colour in crossover.COLOURS.values())


def test_clients_are_sorted_numbers(crossover):
    assert crossover.numbers("8,1,4,1") == [1, 4, 8]
    with pytest.raises(Exception, match="1 or more"):
        crossover.numbers("0,1")
