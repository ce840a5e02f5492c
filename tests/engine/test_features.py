"""Every sampling feature answers as plain vLLM does, also where a path runs through its effect."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine

DRAFT = {"width": 4, "depth": 8, "bits": 8, "stream": "off"}
LENGTH = 32
SEEDED = {"temperature": 0.9, "seed": 11}


def repetition_detection():
    """Make the model repeat itself, and stop it when it does so for the third time."""
    from vllm.sampling_params import RepetitionDetectionParams

    limits = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    return {"frequency_penalty": -2.0, "repetition_detection": limits}


# Parameters from the greedy answer to the same prompt, so that each has something to change.
# Features that change the tokens of greedy answers:
ALTERING = {
    "logit-bias": lambda free: {"logit_bias": {free.tokens[2]: -100.0, free.tokens[9]: -4.0}},
    "bad-word": lambda free: {"bad_words": [free.words(3, 4)]},
    "bad-words-of-several-tokens": lambda free: {
        "bad_words": [free.words(2, 4), free.words(5, 8), free.words(10, 12)]
    },
    "allowed-tokens": lambda free: {
        "allowed_token_ids": sorted({*free.tokens[1::2], *range(100, 3000)} - {free.tokens[4]})
    },
    "min-tokens": lambda free: {
        "min_tokens": 13,
        "stop_token_ids": [free.tokens[6], free.tokens[12], free.tokens[20]],
    },
    "end-of-sequence-after-min-tokens": lambda _: {
        "ignore_eos": False,
        "min_tokens": 7,
        "logit_bias": {2: 100.0},
    },
    "end-of-sequence-ignored": lambda _: {"ignore_eos": True, "logit_bias": {2: 9.0}},
    "repetition-penalty": lambda _: {"repetition_penalty": 1.3},
    "presence-penalty": lambda _: {"presence_penalty": -1.5},
    "frequency-penalty": lambda _: {"frequency_penalty": -1.5},
    "all-penalties": lambda _: {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.3,
    },
    "stop-token": lambda free: {"stop_token_ids": [free.tokens[13]]},
    "repetition-detection": lambda _: repetition_detection(),
    "stop-string": lambda free: {"stop": [free.words(14, 16)]},
    "stop-string-included": lambda free: {
        "stop": [free.words(11, 14)],
        "include_stop_str_in_output": True,
    },
    "stop-string-after-min-tokens": lambda _: {"stop": ["e"], "min_tokens": 9},
    "stop-string-logprobs": lambda free: {"stop": [free.words(9, 11)], "logprobs": 2},
    "stop-token-logprobs": lambda free: {"stop_token_ids": [free.tokens[10]], "logprobs": 2},
}
# Those that leave them alone, and sampled ones:
OTHERS = {
    "logprobs-0": lambda _: {"logprobs": 0},
    "logprobs-1": lambda _: {"logprobs": 1},
    "logprobs-5": lambda _: {"logprobs": 5},
    "logprobs-20": lambda _: {"logprobs": 20},
    "logprobs-of-given-tokens": lambda free: {"logprob_token_ids": [17, *free.tokens[:2]]},
    "prompt-logprobs": lambda _: {"prompt_logprobs": 2, "logprobs": 1},
    "sampled-logprobs": lambda _: {"logprobs": 3, "top_k": 40, **SEEDED},
    "sampled-penalties-logprobs": lambda _: {
        "logprobs": 2,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        **SEEDED,
    },
    "sampled-bad-words": lambda free: {"bad_words": [free.words(2, 4)], "min_p": 0.02, **SEEDED},
    "sampled-bias-and-min-tokens": lambda free: {
        "logit_bias": {free.tokens[2]: 3.0},
        "min_tokens": 11,
        "stop_token_ids": list(range(200)),
        **SEEDED,
    },
    "sampled-top-p-stop-tokens": lambda _: {
        "top_p": 0.8,
        "stop_token_ids": list(range(400)),
        **SEEDED,
    },
    "two-completions": lambda _: {"n": 2, **SEEDED},
    "three-completions-logprobs": lambda _: {"n": 3, "logprobs": 1, "top_k": 20, **SEEDED},
}
FEATURES = ALTERING | OTHERS


class Free:
    """An unrestricted greedy answer, as the features' parameters see it."""

    def __init__(self, answer, tokenizer):
        self.tokens = answer.tokens
        self._tokenizer = tokenizer

    def words(self, start: int, stop: int) -> str:
        """The text of these tokens, or of the next as many that hold a letter."""
        text = self._tokenizer.decode(self.tokens[start:stop]).strip()
        return text if any(map(str.isalpha, text)) else self.words(start + 1, stop + 1)


@pytest.fixture(scope="module")
def reference(open_engine, lively_model_dir, prompts):
    """Requests by feature, and plain vLLM's answers; "greedy" are those without any feature."""
    chosen = [prompts[0], prompts[3], prompts[5]]
    with open_engine(lively_model_dir) as plain:
        base = {"max_tokens": LENGTH}
        greedy = [(prompt, base) for prompt in chosen]
        answers = {"greedy": plain.batch(greedy)}
        free = [Free(answer, plain.llm.get_tokenizer()) for answer in answers["greedy"]]
        requests = {
            name: [(p, base | feature(f)) for p, f in zip(chosen, free, strict=True)]
            for name, feature in FEATURES.items()
        }
        answers |= {name: plain.batch(batch) for name, batch in requests.items()}
    return requests, answers


@pytest.fixture(scope="module")
def engine(open_engine, lively_model_dir, reference):
    with open_engine(lively_model_dir, DRAFT) as engine:
        yield engine


def assert_same(found, expected):
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        if other.logprobs is not None or other.prompt_logprobs is not None:
            one.assert_same_logprobs(other)


@pytest.mark.parametrize("name", FEATURES)
def test_feature(engine, reference, name):
    requests, answers = reference
    assert_same(engine.batch(requests[name]), answers[name])
    if name in ALTERING:
        assert answers[name] != answers["greedy"]


@pytest.mark.parametrize(
    "name", [name for name in ALTERING if "stop" in name or "repetition-d" in name]
)
def test_reference_ends_for_the_reason_given(reference, name):
    _, answers = reference
    reason = "repetition" if name == "repetition-detection" else "stop"
    assert [answer.finish_reason for answer in answers[name]] == [reason] * 3


def test_all_features_in_one_batch(engine, reference):
    requests, answers = reference
    names = [name for name in FEATURES if "completions" not in name]
    mixed = [requests[name][i] for i in range(3) for name in names]
    assert_same(engine.batch(mixed), [answers[name][i] for i in range(3) for name in names])


def test_logprobs_end_where_the_answer_was_cut(engine, reference):
    requests, _ = reference
    for name in ("stop-string-logprobs", "stop-token-logprobs"):
        for answer in engine.batch(requests[name]):
            assert len(answer.logprobs) == len(answer.tokens) < LENGTH


def test_several_unseeded_completions(engine, prompts):
    """Best effort: nothing says which ones they are."""
    found = engine.batch([(prompts[0], {"n": 4, "max_tokens": LENGTH, "temperature": 1.0})])
    assert len({answer.tokens for answer in found}) == 4
    assert [len(answer.tokens) for answer in found] == [LENGTH] * 4


STRUCTURES = {
    "choice": {"choice": ["rivers and lakes", "rivers and mountains", "mountains"]},
    "regex": {"regex": r"[A-Za-z ,.']{30,200}"},
    "json": {
        "json": {
            "type": "object",
            "properties": {
                "name": {"enum": ["red", "green"]},
                "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def structured(open_engine, lively_model_dir, prompts):
    """Requests for structured output, greedy and seeded, and plain vLLM's answers."""
    from vllm.sampling_params import StructuredOutputsParams

    requests = {
        name: [
            (
                prompt,
                {
                    "max_tokens": 40,
                    "structured_outputs": StructuredOutputsParams(**structure),
                    **sampling,
                },
            )
            for prompt in (prompts[0], prompts[4])
            for sampling in ({}, SEEDED)
        ]
        for name, structure in STRUCTURES.items()
    }
    with open_engine(lively_model_dir) as plain:
        return requests, {name: plain.batch(batch) for name, batch in requests.items()}


@pytest.fixture(scope="module")
def structured_engine(open_engine, lively_model_dir, structured):
    with open_engine(lively_model_dir, DRAFT) as engine:
        yield engine


@pytest.mark.parametrize("name", STRUCTURES)
def test_structured_output_runs_as_a_chain(structured_engine, structured, name):
    requests, answers = structured
    before = structured_engine.statistics()
    assert structured_engine.batch(requests[name]) == answers[name]
    after = structured_engine.statistics()
    assert after["drafted_nodes"] == sum(after["drafted_by_level"])  # one node a level
    if name == "regex":  # the others bar all that this draft, which knows no grammar, proposes
        assert after["drafted_nodes"] > before["drafted_nodes"]


def test_structured_output_beside_free_requests(structured_engine, structured, prompts):
    requests, answers = structured
    free = [(prompt, {"max_tokens": 40}) for prompt in prompts[:4]]
    alone = structured_engine.batch(free)
    mixed = [request for pair in zip(free, requests["regex"], strict=True) for request in pair]
    found = structured_engine.staggered(mixed)
    assert found[::2] == alone
    assert found[1::2] == answers["regex"]


def test_processed_logprobs(open_engine, lively_model_dir, prompts):
    requests = [
        (prompts[0], {"max_tokens": 16, "logprobs": 3}),
        (prompts[3], {"max_tokens": 16, "logprobs": 2, "repetition_penalty": 1.2}),
        (prompts[5], {"max_tokens": 16, "logprobs": 4, "top_k": 30, "min_p": 0.01, **SEEDED}),
        (prompts[6], {"max_tokens": 16, "top_p": 0.9, **SEEDED}),
    ]
    mode = {"logprobs_mode": "processed_logprobs"}
    with open_engine(lively_model_dir, **mode) as plain:
        expected = plain.batch(requests)
    with open_engine(lively_model_dir, DRAFT, **mode) as engine:
        assert_same(engine.batch(requests), expected)
        assert_same(engine.singly(requests[:1]), expected[:1])
