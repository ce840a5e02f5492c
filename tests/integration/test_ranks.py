"""Ranks that share each layer take every step together: nothing is decided by one rank's clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine


def test_a_lone_rank_drafts_within_passes_and_tunes_its_depth():
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration.drafter import DraftPolicy

    policy = DraftPolicy.of(SubSpecConfig(), 1)
    assert policy.post_speculation
    assert policy.most_depth > policy.shape.depth


def test_several_ranks_do_neither():
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration.drafter import DraftPolicy

    policy = DraftPolicy.of(SubSpecConfig(post_speculation=True), 2)
    assert not policy.post_speculation
    assert policy.most_depth is None


class Group:
    """A tensor-parallel group of which one rank is looked at after the other."""

    def __init__(self):
        self.rank_in_group = 0
        self.sent = None

    def broadcast_object(self, value, src):
        assert src == 0
        if self.rank_in_group == src:
            self.sent = value
        return self.sent


@pytest.fixture
def place(monkeypatch):
    """The placement of each of two ranks, whose machines have other figures."""
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration import placing

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))

    def on_both(place_model):
        group, outcomes = Group(), []
        monkeypatch.setattr(placing, "get_tp_group", lambda: group)
        monkeypatch.setattr(placing, "place_model", lambda *_: place_model(group.rank_in_group))
        for group.rank_in_group in (0, 1):
            try:
                outcomes.append(placing.place_on_ranks(SubSpecConfig(), vllm_config, [], [], 0))
            except ValueError as error:
                outcomes.append(error)
        return outcomes

    return on_both


def test_all_ranks_take_the_first_ones_placement(place):
    from vllm_subspec.plan import place as place_by_count

    first, second = place(lambda rank: place_by_count(4, 1 + rank, 2))
    assert first == second == place_by_count(4, 1, 2)


def test_all_ranks_refuse_what_the_first_one_refuses(place):
    from vllm_subspec.errors import BudgetError

    def refuse(rank):
        assert rank == 0
        raise BudgetError("too small")

    outcomes = place(refuse)
    assert [type(outcome) for outcome in outcomes] == [BudgetError] * 2
    assert [str(outcome) for outcome in outcomes] == ["too small"] * 2
