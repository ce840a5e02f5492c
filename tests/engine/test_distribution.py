"""Unseeded requests draw from the target's own distribution, whatever was drafted."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine

VOCAB = 16
PROMPT = [1, 2, 3]
TEMPERATURE = 0.9


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory):
    """A random model of 16 tokens whose shadow often, but not always, agrees with it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    directory = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def law(tiny_model_dir):
    """Probability of each three tokens after the prompt, float64 [16, 16, 16]."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    tokens = torch.cartesian_prod(*[torch.arange(VOCAB)] * 2)
    prompts = torch.tensor(PROMPT).expand(len(tokens), -1)
    with torch.no_grad():
        logits = model(torch.cat([prompts, tokens], 1)).logits[:, -3:].double()
    first, second, third = (logits / TEMPERATURE).softmax(-1).unbind(1)
    square = (VOCAB, VOCAB, VOCAB)
    return first[0][:, None, None] * second.view(square)[:, 0][:, :, None] * third.view(square)


@pytest.fixture(scope="module")
def engine(open_engine, tiny_model_dir, law):
    with open_engine(
        tiny_model_dir,
        {"width": 3, "depth": 2, "stream": "off", "quantizer": "rtn"},
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=512,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=16 << 20,
    ) as engine:
        yield engine


def draw(engine, num_requests: int) -> torch.Tensor:
    """Count what requests draw as their first three tokens, float64 [16, 16, 16]."""
    params = {"temperature": TEMPERATURE, "max_tokens": 3, "detokenize": False}
    torch.manual_seed(1)  # private generators are seeded from here: the draws are always the same
    answers = engine.batch([(PROMPT, params)] * num_requests)
    tokens = torch.tensor([answer.tokens for answer in answers])
    counts = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    return counts.index_put_(tuple(tokens.T), torch.ones(1, dtype=torch.float64), accumulate=True)


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square test; cells that expect fewer than 5 draws count as one."""
    expected = law.flatten() * counts.sum()
    rare = expected < 5
    pooled = [
        torch.cat([values[~rare], values[rare].sum()[None]])
        for values in (counts.flatten(), expected)
    ]
    statistic = ((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum()
    freedom = torch.tensor((len(pooled[0]) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize(
    ("coupled", "num_requests", "least", "most"),
    [(True, 20_000, 0.9, 1.0), (False, 8_000, 0.2, 0.8)],
    ids=["coupled", "uncoupled"],
)
def test_draws_follow_the_target(engine, law, coupled, num_requests, least, most):
    engine.llm.collective_rpc("set_draft_policy", args=({"noise_coupling": coupled},))
    before = engine.statistics()
    counts = draw(engine, num_requests)
    assert counts.sum() == num_requests
    for cells, wanted in (
        (counts.sum((1, 2)), law.sum((1, 2))),
        (counts.sum(2), law.sum(2)),  # the first two tokens
        (counts.sum(0), law.sum(0)),  # those that one tree committed
        (counts, law),
    ):
        assert p_value(cells, wanted) > 1e-3
    after = engine.statistics()
    accepted = sum(after["accepted_by_level"]) - sum(before["accepted_by_level"])
    assert least * num_requests < accepted < most * num_requests


def test_a_sampler_that_favours_the_draft_is_found(engine, law, monkeypatch):
    from vllm_subspec.integration import sampler

    draw_rows = sampler._Draw._draw_rows
    chance = torch.Generator().manual_seed(2)

    def biased(self, pending, paths):
        draw_rows(self, pending, paths)
        for request, row in pending:
            tree = self.verification.trees[request]
            children = tree.tokens[tree.parents == row - 1]
            if len(children) and torch.rand(1, generator=chance) < 0.3:
                self.drawn[self.starts[request] + row] = children[0]

    monkeypatch.setattr(sampler._Draw, "_draw_rows", biased)
    assert p_value(draw(engine, 8_000).sum(0), law.sum(0)) < 1e-6
