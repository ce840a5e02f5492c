"""Requests that end while a tree is deep: model length, token budgets, stop tokens."""

from __future__ import annotations

import logging

import pytest

pytestmark = pytest.mark.engine

MODEL_LEN = 128
SETTINGS = {
    "tree-4x12": {"width": 4, "depth": 12, "bits": 8, "stream": "off"},
    "chain-16": {"width": 1, "depth": 16, "bits": 8, "stream": "off"},
    "160-nodes": {"width": 8, "depth": 20, "bits": 8, "stream": "off"},
}


@pytest.fixture(scope="module")
def cases(prompts):
    """Requests by name."""
    few = [prompts[0], prompts[2], prompts[3]]
    seeded = {"temperature": 0.9, "seed": 3}
    return {
        "model-length": [(prompt, {"max_tokens": None}) for prompt in prompts],
        "model-length-seeded": [(prompt, {"max_tokens": None} | seeded) for prompt in prompts[3:6]],
        "max-tokens": [(p, {"max_tokens": n}) for n in (1, 2, 3, 4, 7, 11) for p in few],
        "max-tokens-seeded": [(p, {"max_tokens": n} | seeded) for n in (1, 2, 3, 5) for p in few],
    }


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, cases):
    with open_engine(lively_model_dir, max_model_len=MODEL_LEN) as plain:
        return {name: plain.batch(requests) for name, requests in cases.items()}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS.keys())
def engine(request, open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, request.param, max_model_len=MODEL_LEN) as engine:
        yield engine


@pytest.mark.parametrize(
    "name", ["model-length", "model-length-seeded", "max-tokens", "max-tokens-seeded"]
)
def test_ends_as_plain(engine, cases, expected, name):
    assert engine.batch(cases[name]) == expected[name]


def test_one_request_to_the_end_of_the_model_length(engine, cases, expected):
    assert engine.singly(cases["model-length"][3:4]) == expected["model-length"][3:4]
    assert all(answer.finish_reason == "length" for answer in expected["model-length"])


def test_statistics_count_no_token_past_the_end(engine, cases, expected):
    stops = [
        (prompt, {"max_tokens": 40, "stop_token_ids": [answer.tokens[17]]})
        for (prompt, _), answer in zip(cases["model-length"], expected["model-length"], strict=True)
    ]
    before = engine.statistics()["committed_tokens"]
    answers = engine.batch([*cases["max-tokens"], *stops])
    committed = engine.statistics()["committed_tokens"] - before
    assert committed == sum(len(answer.tokens) - 1 for answer in answers)


def test_no_log_line_and_no_metric_holds_a_prompt_or_an_answer(engine, prompts, caplog):
    secret = "Zanzibar"
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_subspec")]
    with pytest.MonkeyPatch.context() as patch:
        for logger in loggers:  # vLLM's hands nothing on to the root, where pytest listens
            patch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
        loggers[1].setLevel(logging.DEBUG)
        (answer,) = engine.batch([(f"{secret} {prompts[3]}", {"max_tokens": 40, "seed": 3})])
        bad = {"bad_words": [secret], "structured_outputs": None, "max_tokens": 8, "stop": [secret]}
        engine.batch([(secret, bad)])
        logging.getLogger("vllm_subspec.test").info("heard")
    loggers[1].setLevel(logging.NOTSET)
    told = [record.getMessage() for record in caplog.records] + [repr(engine.llm.get_metrics())]
    assert "heard" in told
    for hidden in (secret, answer.text[:12], str(list(answer.tokens))[1:30]):
        assert [line for line in told if hidden in line] == []
