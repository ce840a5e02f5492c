"""Replayed trees against the passes that an engine takes over the same texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_subspec.errors import ConfigError

pytestmark = pytest.mark.engine

NEW_TOKENS = 40
DEPTHS = (1, 3, 8)
SUBSPEC = {
    "width": 3, "depth": 8, "stream": "off", "bits": 4, "quantizer": "rtn",
    "post_speculation": False,
}  # fmt: skip
EXTENSION = "vllm_subspec.integration.replay.ReplayExtension"
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 7})


@pytest.fixture(scope="module")
def engine(open_engine: Any, lively_model_dir: Path) -> Iterator[Any]:
    with open_engine(lively_model_dir, SUBSPEC, worker_extension_cls=EXTENSION) as engine:
        yield engine


def replayed(engine: Any, texts: list[tuple[list[int], int]], way: dict[str, Any]) -> Any:
    """What `subspec_replay` says of texts, by depth."""
    params = way | {"max_tokens": 8, "extra_args": {"subspec": False}}
    ids = engine.add([(tokens, params) for tokens, _ in texts])
    engine.step()
    (found,) = engine.llm.collective_rpc("subspec_replay", args=(texts, 3, 0.2, DEPTHS))
    engine.llm.llm_engine.abort_request(ids)
    engine.step()
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "seeded"])
def test_an_engine_takes_the_same_passes(
    engine: Any, prompts: tuple[str, ...], way: dict[str, Any]
) -> None:
    asked = [engine.llm.get_tokenizer().encode(prompt) for prompt in prompts[:3]]
    taken, texts = {}, []
    for depth in DEPTHS:
        engine.llm.collective_rpc("set_draft_policy", args=({"depth": depth},))
        before = engine.statistics()["target_passes"]
        answers = engine.singly([(tokens, way | {"max_tokens": NEW_TOKENS}) for tokens in asked])
        taken[depth] = engine.statistics()["target_passes"] - before
        texts = [
            ([*tokens, *answer.tokens], len(tokens))
            for tokens, answer in zip(asked, answers, strict=True)
        ]
    for depth, of_texts in zip(DEPTHS, replayed(engine, texts, way), strict=True):
        passes = [one for of_text in of_texts for one in of_text]
        assert len(passes) == taken[depth]
        assert sum(one.accepted + 1 for one in passes) == 3 * (NEW_TOKENS - 1)
    assert taken[1] > taken[3] > taken[8]


@torch.inference_mode()
def test_scores_are_those_of_transformers_and_the_shadow_alone_does_worse(
    engine: Any, prompts: tuple[str, ...], lively_model_dir: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lively_model_dir, dtype=torch.float32)
    asked = [engine.llm.get_tokenizer().encode(prompt) for prompt in prompts[2:4]]
    written = engine.batch([(tokens, {"max_tokens": 40}) for tokens in asked])
    texts = [[*tokens, *answer.tokens] for tokens, answer in zip(asked, written, strict=True)]
    (target,) = engine.llm.collective_rpc("subspec_score", args=(texts, False))
    (shadow,) = engine.llm.collective_rpc("subspec_score", args=(texts, True))
    for tokens, prompt, (surprises, best), (more, others) in zip(
        texts, asked, target, shadow, strict=True
    ):
        ids = torch.tensor(tokens)
        logits = model(ids[None]).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        torch.testing.assert_close(torch.tensor(surprises), expected, rtol=1e-3, atol=1e-3)
        assert best[len(prompt) - 1 :] == tokens[len(prompt) :]  # greedy
        answer = slice(len(prompt) - 1, None)
        assert sum(more[answer]) > sum(surprises[answer])
        assert others != best


def test_a_text_that_nobody_asks_for_is_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match="no running request has this prompt of 5 tokens"):
        engine.llm.collective_rpc("subspec_replay", args=([([1, 2, 3, 4, 5], 1)], 3, 0.2, DEPTHS))
