"""What a cycle's seconds are counted from, and what is told of its trees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from vllm_subspec.draft.acceptance import Outcome
from vllm_subspec.draft.pacing import Pacing
from vllm_subspec.draft.tree import Tree
from vllm_subspec.draft.tuning import Cut

FIXED = Cut(4, 8)


@dataclass
class Recorder:
    """Stands in for the tuner, and for the clock."""

    now: float = 100.0
    idle_s: float = 7.0
    pass_floor_s: float = 0.0
    told: list[tuple] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def observe_draft(self, *args):
        self.told.append(("draft", *args))

    def observe_prompts(self, *args):
        self.told.append(("prompts", *args))

    def observe_pass(self, *args):
        self.told.append(("pass", *args))

    def observe_trees(self, *args):
        self.told.append(("trees", *args))

    def look_again(self):
        self.told.append(("again",))

    def next_cut(self, sequences):
        return Cut(sequences, sequences)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def pacing(recorder):
    return Pacing(FIXED, recorder, lambda: recorder.idle_s, recorder)


# 5 has 6 and 7 below it, 6 has 8; best first: 5, 7, 6, 8.
TREE = Tree(
    torch.tensor([5, 6, 7, 8]),
    torch.tensor([-1, 0, 0, 1]),
    torch.tensor([1, 2, 2, 3]),
    torch.tensor([-0.1, -0.5, -0.4, -0.6]),
)


def test_a_cycle_counts_from_the_end_of_the_last_draft(pacing, recorder):
    pacing.end_draft(["a", "b"], 3, 0.6, 10)
    recorder.now = 100.5
    pacing.begin_pass({"a": 5, "b": 1}, {"a": TREE, "b": Tree.empty()})
    recorder.now = 102.0
    pacing.end_pass({"a": [5, 6, 1], "b": [3]}, 12)
    outcome = Outcome(depth=3, nodes=4, least_nodes=[1, 3])
    assert recorder.told == [("draft", 2, 3, 0.6), ("pass", 6, 2.0, 2, [outcome])]
    assert recorder.pass_floor_s == 0.0, "nothing was waited for"


def test_waits_for_weights_are_the_link_s_and_not_the_rows(pacing, recorder):
    for slow in (1.0, 3.0):  # the disk's, as it happens
        pacing.begin_pass({"a": 5}, {"a": TREE})
        recorder.now += 0.5 + slow
        recorder.idle_s += slow
        pacing.end_pass({"a": [7]}, 0)
        pacing.end_draft(["a"], 0, 0.0, 0)
    passes = [told for told in recorder.told if told[0] == "pass"]
    assert passes == [("pass", 5, 0.5, 0, [Outcome(3, 4, [])])] * 2
    assert 1.5 < recorder.pass_floor_s < 3.5
    floor = recorder.pass_floor_s
    pacing.begin_pass({"a": 5}, {"a": TREE})
    recorder.now += 9.0
    recorder.idle_s += 0.1
    pacing.end_pass({"a": [7]}, 0)
    assert recorder.pass_floor_s == floor, "it was the rows that took so long"


def test_a_rest_before_the_pass_is_not_its_own(pacing, recorder):
    pacing.end_draft(["a"], 1, 0.1, 0)
    recorder.now = 500.0
    pacing.begin_pass({"b": 1}, {"b": Tree.empty()})
    recorder.now = 501.0
    pacing.end_pass({"b": [3]}, 0)
    assert recorder.told[1:] == [("pass", 1, 1.0, 0, [])]


def test_nor_are_passes_that_no_draft_followed(pacing, recorder):
    """A chunk of a prompt, say: it drafts nothing."""
    pacing.end_draft(["a"], 1, 0.1, 0)
    pacing.begin_pass({"a": 2048}, {"a": Tree.empty()})
    recorder.now = 110.0
    pacing.begin_pass({"a": 1}, {"a": Tree.empty()})
    recorder.now = 111.0
    pacing.end_pass({"a": [3]}, 0)
    assert recorder.told[1:] == [("pass", 1, 1.0, 0, [])]


def test_a_pass_with_prompts_tells_little_of_seconds(pacing, recorder):
    pacing.begin_pass({"a": 5, "b": 700}, {"a": TREE, "b": Tree.empty()})
    recorder.now = 103.0
    pacing.end_pass({"a": [7], "b": [3]}, 0)
    assert recorder.told == [("prompts", 705, 3.0), ("trees", [Outcome(3, 4, [])])]


def test_without_a_pass_nothing_is_told(pacing, recorder):
    pacing.end_pass({"a": [1]}, 0)
    assert recorder.told == []


def test_the_tuner_hears_of_new_requests(pacing, recorder):
    assert pacing.next_cut(3, is_new=False) == Cut(3, 3)
    assert recorder.told == []
    assert pacing.next_cut(2, is_new=True) == Cut(2, 2)
    assert recorder.told == [("again",)]


def test_a_level_is_grown_where_it_promises_its_price(pacing, recorder):
    """Of two trees one is hopeless: the other must pay for both."""
    cut, doubts = Cut(9, 9, price=0.5), [0.1, math.inf]
    assert pacing.pays(cut, 1, doubts)
    assert pacing.pays(cut, 1, [2.0] * 9)
    assert not pacing.pays(cut, 1, doubts[1:])
    assert not pacing.pays(cut, 40, doubts)
    for _ in range(20):  # TREE is never accepted
        pacing.begin_pass({"a": 5}, {"a": TREE})
        pacing.end_pass({"a": [9]}, 0)
    assert not pacing.pays(cut, 1, doubts)


def test_a_fixed_cut_stays():
    pacing = Pacing(FIXED, None, lambda: 0.0)
    for sequences in (1, 8, 64):
        pacing.begin_pass({"a": 5}, {"a": TREE})
        pacing.end_pass({"a": [9]}, 0)
        assert pacing.next_cut(sequences, is_new=True) == FIXED
        pacing.end_draft(["a"], 4, 100.0, 0)
