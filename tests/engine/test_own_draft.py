"""A draft that shares nothing with the target, as a model apart: own layers, own context."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine

SETTINGS = {
    "bits": 8,
    "width": 2,
    "depth": 6,
    "resident_layers": 2,
    "slots": 2,
    "stream": "disk",
    "share_layers": False,
    "share_kv": False,
}
ROOM = {"max_model_len": 320}
WHOLE = {"max_tokens": 64}


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, prompts):
    with open_engine(lively_model_dir) as plain:
        return plain.batch([(prompt, WHOLE) for prompt in prompts])


@pytest.fixture(scope="module")
def engine(open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, SETTINGS, **ROOM) as engine:
        yield engine


def test_tokens_are_plain_vllms_and_drafts_are_good(engine, prompts, expected):
    before = engine.statistics()
    assert engine.staggered([(prompt, WHOLE) for prompt in prompts]) == expected
    after = engine.statistics()
    committed, passes = (
        after[name] - before[name] for name in ("committed_tokens", "target_passes")
    )
    assert committed / passes > 4  # of 7: what is drafted without its context agrees seldom


def test_resident_layers_have_shadows_of_their_own(engine):
    assert engine.placement()["bits"] == [8] * 4
    method = engine.runner.model.model.layers[3].mlp.down_proj.quant_method
    assert not method.streamed
    assert method.shadow is not None


def test_the_context_in_pieces_is_the_context_at_once(engine, prompts, monkeypatch):
    drafter = engine.runner.speculation.drafter
    own, last = drafter.forward._own, []
    draft = drafter.draft

    def watch(requests, *args):
        last[:] = requests
        return draft(requests, *args)

    monkeypatch.setattr(drafter, "draft", watch)
    engine.add([(prompts[3], WHOLE)])
    for _ in range(6):
        engine.step()
    [request] = last
    positions = torch.arange(request.num_context)

    def kept(caches):
        blocks, found = request.block_tables[0], []
        for layer, cache in zip(own._layers, caches, strict=True):
            for view in layer.impl.cache_views(cache):
                size = view.shape[1]
                found.append(view[blocks[positions // size].long(), positions % size])
        return torch.stack(found)

    def off(a, b):
        return float((a - b).norm() / b.norm())

    in_pieces = kept(own.caches)
    own.forget(request.req_id)
    for cache in own.caches:
        cache.zero_()
    drafter.forward._compute_context(own, request)
    assert off(in_pieces, kept(own.caches)) < 0.02  # activations are rounded to int8
    of_target = kept([layer.kv_cache for layer in own._layers])
    assert 1e-3 < off(in_pieces, of_target) < 0.1  # what 8 bits make of them: no copy
    engine.finish()
    assert own.requests == {request.req_id}  # until the next step, which tells the runner
