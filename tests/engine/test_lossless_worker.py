"""The losslessness protocol's worker on a real engine: right answers, and samplers gone wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vllm_subspec.errors import ConfigError
from vllm_subspec.tools.audit import sampling_noise
from vllm_subspec.tools.distribution import Comparison, NextTokenLaw, Sample, compare, rounding
from vllm_subspec.tools.lossless_asks import laws_by_prefix
from vllm_subspec.tools.lossless_checks import Coverage
from vllm_subspec.tools.lossless_control import MUST_FAIL, WRONG_SAMPLERS, wrong_sampler
from vllm_subspec.tools.lossless_worker import Ask, Teller

pytestmark = pytest.mark.engine

CHATS = [[1, 2, 3, 4, 5], [900, 7, 31]]
OPENING = [17, 4, 256]
TEMPERATURE = 0.8
ANSWER = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
GREEDY = Ask(CHATS, ANSWER | {"temperature": 0.0}, alone=True)
SEEDED = Ask(CHATS, ANSWER | {"temperature": TEMPERATURE}, seeds=[5, 6])
DRAWN_TOKENS = 3
UNSEEDED = Ask([OPENING] * 500, ANSWER | {"temperature": 1.0, "max_tokens": DRAWN_TOKENS})
ASKS = {"greedy": GREEDY, "seeded": SEEDED, "unseeded": UNSEEDED}


@pytest.fixture(scope="module")
def teller(open_engine, lively_model_dir):
    with open_engine(
        lively_model_dir,
        {"width": 3, "depth": 6, "bits": 4, "stream": "off"},
        max_num_seqs=64,
        max_logprobs=64,
    ) as engine:
        yield Teller(engine.llm, True)


@pytest.fixture(scope="module")
def logits_after(lively_model_dir):
    """The target's float32 logits at each token of an answer, [tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lively_model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(prompt: list[int], answer: list[int]) -> torch.Tensor:
        return model(torch.tensor([[*prompt, *answer]])).logits[0, -len(answer) - 1 : -1]

    return logits


def judge(teller: Teller, tokens: list[list[int]]) -> Comparison:
    """Draws against the laws that the engine itself tells; right ones, as its prompts are."""
    drawn = sorted({("a", tuple(draw)) for draw in tokens})
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 64, "detokenize": False}
    texts = [[*OPENING, *draw] for _, draw in drawn]
    told = teller.tell(Ask(texts, params, laws=DRAWN_TOKENS))
    laws = laws_by_prefix(drawn, told.laws)["a"]
    return compare([Sample("a", [tuple(draw) for draw in tokens], laws)], 0.0)


def test_greedy_answers_and_their_laws_are_the_targets(teller, logits_after) -> None:
    asked = Ask(CHATS, {**GREEDY.params, "logprobs": 20}, rescore=True)
    told = teller.tell(asked)
    assert Coverage.of(told.statistics).from_trees > 0
    for prompt, tokens, laws in zip(CHATS, told.tokens, told.laws, strict=True):
        best = logits_after(prompt, tokens).log_softmax(-1).topk(20)
        assert tokens == best.indices[:, 0].tolist()
        assert [law[0] for law in laws] == best.indices.tolist()
        given = torch.tensor([law[1] for law in laws])
        torch.testing.assert_close(given, best.values, rtol=0, atol=1e-3)
    laws, rescored = (
        [NextTokenLaw.from_logprobs(*law) for answer in answers for law in answer]
        for answers in (told.laws, told.rescored)
    )
    assert rounding(laws, rescored) < 1e-6


def test_seeded_answers_follow_the_noise_that_the_audit_adds(teller, logits_after) -> None:
    noise = sampling_noise(SEEDED.seeds, TEMPERATURE)
    told = teller.tell(SEEDED)
    for row, (prompt, tokens) in enumerate(zip(CHATS, told.tokens, strict=True)):
        logits = logits_after(prompt, tokens)
        for position, token in enumerate(tokens):
            assert token == int((logits[position] + noise(row, position, 4096)).argmax())


def test_draws_follow_the_law_and_wrong_samplers_do_not(teller) -> None:
    right = {name: teller.tell(ask) for name, ask in ASKS.items()}
    assert min(test.p for test in judge(teller, right["unseeded"].tokens).tests) > 1e-4
    assert Coverage.of(right["unseeded"].statistics).from_trees > 100
    for wrong in WRONG_SAMPLERS:
        for name in MUST_FAIL[wrong]:
            ask = ASKS[name]
            uncoupled = {"noise_coupling": False}  # as the protocol's control does
            told = teller.tell(replace(ask, policy=uncoupled, wrong=wrong))
            if name == "unseeded":
                tests = judge(teller, told.tokens).tests
                assert min(test.p for test in tests) < 1e-6, wrong
            else:
                assert told.tokens != right[name].tokens, (wrong, name)
    # What was wrong ended with its block.
    assert teller.tell(GREEDY).tokens == right["greedy"].tokens
    assert teller.tell(SEEDED).tokens == right["seeded"].tokens


def test_a_wrong_sampler_goes_by_a_known_name() -> None:
    with pytest.raises(ConfigError, match="accepting, cooler"), wrong_sampler("lenient"):
        pass
