"""Ranks that share each layer take every step together: nothing is decided by one rank's clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

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


def test_all_ranks_plan_by_the_first_ones_figures(monkeypatch, tmp_path):
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration import placing
    from vllm_subspec.plan.machine import DEFAULT

    sent = []
    measured = []

    class Group:
        def __init__(self, rank):
            self.rank_in_group = rank

        def broadcast_object(self, value, src):
            assert src == 0
            if self.rank_in_group == src:
                sent.append(value)
            return sent[0]

    def load_or_measure(directory, dtype):
        measured.append(directory)
        return DEFAULT

    monkeypatch.setattr(placing, "load_or_measure", load_or_measure)
    config = SubSpecConfig(stream_dir=tmp_path, memory_budget="1GiB")
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    for rank in (0, 1):
        monkeypatch.setattr(placing, "get_tp_group", lambda rank=rank: Group(rank))
        assert placing._machine(config, vllm_config) == DEFAULT
    assert measured == [tmp_path]
