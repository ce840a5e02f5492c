"""What a step may touch in the KV pool, and what requests leave behind."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine

SETTINGS = {
    "tree-4x12": {"width": 4, "depth": 12, "bits": 8, "stream": "off"},
    "chain-16": {"width": 1, "depth": 16, "bits": 8, "stream": "disk"},
}
BLOCK = 32
SAMPLED = {"temperature": 0.9}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def engine(request, open_engine, lively_model_dir):
    options = {"block_size": BLOCK, "num_gpu_blocks_override": 48}
    with open_engine(lively_model_dir, request.param, **options) as engine:
        yield engine


class PoolWatch:
    """Looks at each step's writes to the KV pool.

    ``left`` holds keys and values of all committed positions, [layers, positions, ...], by id;
    ``strays`` the slots that changed though no token of the step was theirs.
    """

    def __init__(self, runner, monkeypatch):
        self.runner = runner
        self.num_steps = 0
        self.left = {}
        self.strays = []
        self.drafts_wrote = False
        for name in ("execute_model", "sample_tokens", "propose_draft_token_ids"):
            original = getattr(runner, name)
            watched = getattr(self, name)
            monkeypatch.setattr(
                runner, name, lambda *a, watched=watched, original=original: watched(original, *a)
            )

    def pool(self):
        """Keys and values of every slot, [layers, blocks, block size, ...]."""
        from subspec_kernels.kv_cache.reference import cache_halves

        halves = [cache_halves(cache) for cache in self.runner.kv_caches]
        keys = torch.stack([keys for keys, _ in halves]).permute(0, 1, 4, 2, 3)
        values = torch.stack([values for _, values in halves]).permute(0, 1, 3, 2, 4)
        return torch.cat([keys, values], -1).flatten(3)

    def execute_model(self, original, scheduler_output, *args):
        self.before = self.pool()
        self.num_tokens = scheduler_output.total_num_scheduled_tokens
        return original(scheduler_output, *args)

    def sample_tokens(self, original, *args):
        output = original(*args)
        batch = self.runner.input_batch
        slots = batch.block_table[0].slot_mapping.gpu[: self.num_tokens].long()
        changed = (self.pool() != self.before).any(-1).any(0).flatten()
        assert bool(changed.any())
        changed[slots] = False
        self.strays += changed.nonzero().flatten().tolist()
        for row, req_id in enumerate(batch.req_ids):
            count = int(batch.num_tokens_no_spec[row]) - 1  # nobody looked at the last token yet
            blocks = batch.block_table[0].block_table.gpu[row, : -(-count // BLOCK)].tolist()
            self.left[req_id] = self.pool()[:, blocks].flatten(1, 2)[:, :count]
        self.num_steps += 1
        return output

    def propose_draft_token_ids(self, original, *args):
        before = self.pool()
        drafts = original(*args)
        self.drafts_wrote |= not torch.equal(self.pool(), before)
        return drafts


def test_a_step_writes_its_own_slots_and_what_it_leaves_is_the_answers(
    engine, prompts, monkeypatch
):
    """Neither drafts, nor rejected nodes, nor compaction reach any other slot of the pool, and
    committed positions hold what an ordinary prefill of the same tokens computes."""
    engine.llm.reset_prefix_cache()
    engine.batch([(prompts[3], {"max_tokens": 40})])  # its cached blocks must survive
    watch = PoolWatch(engine.runner, monkeypatch)
    requests = [
        (prompts[0], {"max_tokens": 60}),
        (prompts[7], {"max_tokens": 45, **SAMPLED}),
        (prompts[5], {"max_tokens": 50, "seed": 1, **SAMPLED}),
    ]
    answers = engine.staggered(requests, every=2)
    assert watch.num_steps > 10
    assert watch.strays == []
    assert not watch.drafts_wrote
    drafted = list(watch.left.values())
    tokenizer = engine.llm.get_tokenizer()
    for (prompt, _), answer, left in zip(requests, answers, drafted, strict=True):
        assert engine.llm.reset_prefix_cache()
        watch.left.clear()
        ids = [*tokenizer.encode(prompt), *answer.tokens]
        engine.batch([(ids[:-1], {"max_tokens": 1})])
        (prefilled,) = watch.left.values()
        assert left.shape == prefilled.shape
        assert torch.allclose(left, prefilled, rtol=1e-3, atol=1e-3)


def test_finished_requests_leave_nothing(engine, prompts):
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    engine.batch([(prompt, {"max_tokens": 20, **SAMPLED}) for prompt in prompts])
    engine.batch([(prompts[0], {"max_tokens": 1})])  # the runner hears of the end in the next step
    assert engine.runner.speculation._trees == {}
    assert engine.runner.speculation._generators == {}
    assert pool.get_num_free_blocks() == free


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_aborted_requests_leave_nothing(engine, prompts, num_steps):
    pool = engine.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    requests = [(prompt, {"max_tokens": 100, **SAMPLED}) for prompt in prompts[:4]]
    ids = engine.add(requests)
    for _ in range(num_steps):
        assert engine.step() == []
    assert len(engine.runner.speculation._trees) == len(engine.runner.speculation._generators) == 4
    assert pool.get_num_free_blocks() < free
    engine.llm.llm_engine.abort_request(ids[1:])
    kept = engine.finish()
    assert len(kept) == 1
    engine.batch([(prompts[0], {"max_tokens": 1})])
    assert engine.runner.speculation._trees == {}
    assert engine.runner.speculation._generators == {}
    assert pool.get_num_free_blocks() == free
