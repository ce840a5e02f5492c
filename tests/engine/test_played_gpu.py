"""The path of a GPU, played on a CPU: layers in host RAM with a copy stream, draft steps by graph,
static scratch and packed masks, in a whole engine. Only the launches themselves are missing."""

from __future__ import annotations

import pytest
import torch
from played_graphs import PlayedGraphs

from vllm_subspec.draft.static_scratch import StaticScratch
from vllm_subspec.integration import attention, runner
from vllm_subspec.integration.cuda_attention import PackedTreeRows
from vllm_subspec.integration.device import CpuDevice
from vllm_subspec.integration.tier import HostTier

pytestmark = pytest.mark.engine

WHOLE = {"max_tokens": 48}
SEEDED = {"max_tokens": 32, "temperature": 0.8, "top_k": 50, "seed": 3}
SETTINGS = {"width": 3, "depth": 10, "bits": 8, "resident_layers": 1, "slots": 2}
CAPTURED = 2  # requests at once


class Point:
    """An event: where compute's stream was, in slots released."""

    def synchronize(self):
        pass


class PlayedCopies:
    """A ``CopyDevice`` whose memory is RAM."""

    def __init__(self):
        self.num_copies = 0
        self.points = []

    def allocate(self, nbytes):
        return torch.empty(nbytes + 64, dtype=torch.uint8)[:nbytes]

    def allocate_host(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def compute_event(self):
        self.points.append(Point())
        return self.points[-1]

    def copy_after(self, event, pieces):
        assert event is self.points.pop(0), "behind its own point, in order"
        for target, source in pieces:
            target.copy_(source)
        self.num_copies += 1
        return Point()


class PlayedGpu(CpuDevice):
    maps_tables = False
    captures_drafts = True

    def __init__(self, torch_device):
        super().__init__(torch_device)
        self.played = PlayedGraphs()
        self.copies = PlayedCopies()

    def with_trees(self, metadata, trees):
        packed = [PackedTreeRows.of(rows, self.torch_device) for rows in trees]
        return attention.with_trees(metadata, packed)

    def open_tier(self, config, vllm_config, layout):
        return HostTier(config, layout, self.copies)

    def scratch(self, dtype):
        return StaticScratch(dtype, self.torch_device)

    def graphs(self):
        return self.played


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, prompts):
    with open_engine(lively_model_dir) as plain:
        return [
            plain.batch([(prompt, params) for prompt in prompts[:4]]) for params in (WHOLE, SEEDED)
        ]


@pytest.fixture(scope="module")
def engine(open_engine, lively_model_dir, expected):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "device_for", PlayedGpu)
        patch.setattr(runner, "_MOST_CAPTURED", CAPTURED)
        with open_engine(lively_model_dir, SETTINGS) as engine:
            engine.num_graphs = engine.runner.fast_tier.played.captures
            yield engine


@pytest.fixture
def graphs(engine):
    return engine.runner.speculation.drafter.forward._graphs


def test_shapes_are_captured_before_the_first_request(engine, graphs):
    # The root's, and levels up to 8, 16 and 20 (an extension grows beside the tree), by requests.
    assert engine.num_graphs == len(graphs) == 4 * CAPTURED


def test_requests_alone_are_drafted_by_replays_only(engine, graphs, prompts, expected, monkeypatch):
    pauses, eager, replayed = [], graphs.eager_steps, graphs.replayed_steps
    monkeypatch.setattr(engine.runner.offloader, "between_draft_layers", lambda: pauses.append(1))
    buffer = engine.runner.speculation.drafter.forward._scratch._static.data_ptr()
    for answers, params in zip(expected, (WHOLE, SEEDED), strict=True):
        assert engine.singly([(prompt, params) for prompt in prompts[:4]]) == answers
    assert pauses == [], "a replay runs no layer of Python's"
    assert graphs.eager_steps == eager
    statistics = engine.statistics()
    assert graphs.replayed_steps - replayed > statistics["target_passes"]
    assert statistics["committed_tokens"] > 1.5 * statistics["target_passes"]
    assert engine.runner.fast_tier.played.captures == engine.num_graphs, "nothing later"
    assert engine.runner.speculation.drafter.forward._scratch._buffer.data_ptr() == buffer


def test_more_requests_than_were_captured_draft_eagerly(engine, graphs, prompts, expected):
    eager = graphs.eager_steps
    requests = [(prompt, WHOLE) for prompt in prompts[:4]]
    assert engine.batch(requests) == expected[0]
    assert engine.staggered(requests, every=3) == expected[0]
    assert graphs.eager_steps > eager
    assert engine.runner.fast_tier.played.captures == engine.num_graphs
    assert engine.singly(requests[:1]) == expected[0][:1], "and alone again by replays"


def test_layers_come_from_host_ram(engine, prompts):
    copies, before = engine.runner.fast_tier.copies, engine.statistics()
    engine.singly([(prompts[0], WHOLE)])
    after = engine.statistics()
    assert copies.num_copies >= after["stream_reads"] > before["stream_reads"]
    assert "from host RAM" in engine.runner.offloader.placement_line()


def test_drafts_leave_vllms_blocks_alone(engine, prompts, monkeypatch):
    caches, wrote = engine.runner.kv_caches, []
    draft = engine.runner.propose_draft_token_ids

    def watched(*args, **kwargs):
        before = [cache.clone() for cache in caches]
        drafts = draft(*args, **kwargs)
        wrote.append(not all(map(torch.equal, caches, before)))
        return drafts

    monkeypatch.setattr(engine.runner, "propose_draft_token_ids", watched)
    engine.batch([(prompt, {"max_tokens": 12}) for prompt in prompts[:2]])
    assert wrote
    assert not any(wrote)
