"""Requests out of the ordinary: options of their own, beam search, priorities, prompts of
embeddings, thinking budgets. The link is throttled: trees grow while a pass waits for weights."""

from __future__ import annotations

import pytest

from vllm_subspec.errors import ConfigError

pytestmark = pytest.mark.engine

DRAFT = {"width": 4, "depth": 8, "bits": 8, "stream": "disk", "slots": 2, "emulate_link": 3e8}
OPTIONS = {
    "scheduling_policy": "priority",
    "enable_prompt_embeds": True,
    "max_num_seqs": 4,
    "reasoning_config": {"reasoning_start_str": "Q:", "reasoning_end_str": "\nA: so"},
}
SEEDED = {"temperature": 0.8, "top_k": 40, "seed": 3}
OPTED_OUT = {"extra_args": {"subspec": False}}


def capped(depth: int) -> dict:
    return {"extra_args": {"subspec_depth": depth}}


@pytest.fixture(scope="module")
def requests(prompts):
    """Greedy, sampled, and penalised."""
    params = [{}, SEEDED, {"repetition_penalty": 1.2, "logprobs": 3}, SEEDED]
    return [(p, {"max_tokens": 40} | q) for p, q in zip(prompts[:4], params, strict=True)]


@pytest.fixture(scope="module")
def embeddings(lively_model_dir, prompts):
    """The prompts as rows of the model's own embedding table."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    table = load_file(lively_model_dir / "model.safetensors")["model.embed_tokens.weight"]
    encode = AutoTokenizer.from_pretrained(lively_model_dir).encode
    return [table[encode(prompt)] for prompt in prompts[:3]]


def of_embeddings(engine, embeddings, words):
    """Two answers to embeddings, one to words and one to embeddings again, all at once."""
    from vllm import SamplingParams

    asked = [{"prompt_embeds": rows} for rows in embeddings[:2]]
    asked += [words, {"prompt_embeds": embeddings[2]}]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, **(SEEDED if i % 2 else {"temperature": 0}))
        for i in range(len(asked))
    ]
    outputs = engine.llm.generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def thinking(prompts):
    """Two greedy ones that think and one whose budget never begins; then two that are altered and
    sampled, beside one without a budget."""
    budget = {"max_tokens": 24, "thinking_token_budget": 9}
    first = [
        (f"{prompts[1]}\nQ: {prompts[0]}", budget),
        (f"Q: {prompts[5]}", budget),
        (prompts[2], budget),
    ]
    altered = {"repetition_penalty": 1.2, "min_tokens": 3}
    second = [
        (f"Q: {prompts[5]}", budget | SEEDED | altered),
        (prompts[3], {"max_tokens": 24} | altered),
        (f"{prompts[1]}\nQ: {prompts[0]}", budget | SEEDED),
    ]
    return first, second


def beams(engine, prompts):
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
    found = engine.llm.beam_search([{"prompt": p} for p in prompts[:2]], params)
    return [[(beam.tokens, beam.text) for beam in output.sequences] for output in found]


def by_priority(engine, prompts):
    """Answers to eight requests, the last the most urgent, and the order in which they end."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    for i in range(8):
        engine.llm.llm_engine.add_request(str(i), prompts[i], params, priority=8 - i)
    outputs = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += engine.step()
    answers = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
    return answers, [output.request_id for output in outputs]


@pytest.fixture(scope="module")
def expected(open_engine, lively_model_dir, requests, prompts, embeddings):
    with open_engine(lively_model_dir, **OPTIONS) as plain:
        return {
            "answers": plain.batch(requests),
            "embeddings": of_embeddings(plain, embeddings, prompts[4]),
            "beams": beams(plain, prompts),
            "thinking": [plain.batch(batch) for batch in thinking(prompts)],
            "priorities": by_priority(plain, prompts),
        }


@pytest.fixture(scope="module")
def engine(open_engine, lively_model_dir, expected):
    with open_engine(lively_model_dir, DRAFT, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def counted(engine):
    """``counted(name)``: what was counted since the test began, level by level where there are."""
    before = engine.statistics()

    def counted(name):
        after = engine.statistics()[name]
        if not isinstance(after, list):
            return after - before[name]
        earlier = before[name] + [0] * (len(after) - len(before[name]))
        return [b - a for a, b in zip(earlier, after, strict=True)]

    return counted


def with_options(requests, *options):
    return [(p, q | o) for (p, q), o in zip(requests, options, strict=True)]


def test_requests_that_opted_out_draft_nothing(engine, requests, expected, counted):
    out = with_options(requests, *[OPTED_OUT] * 4)
    assert engine.batch(out) == expected["answers"]
    assert engine.singly(out[1:2]) == expected["answers"][1:2]
    for name in ("drafted_nodes", "draft_steps", "started_drafts", "overlapped_draft_steps"):
        assert counted(name) == 0
    assert counted("committed_tokens") == counted("target_passes") > 0
    assert counted("fallback_opted_out") == 5 * 38  # not before the last token, which ends it


@pytest.mark.parametrize("zero", [0, False])
def test_how_to_opt_out(engine, requests, expected, counted, zero):
    request = with_options(requests[:1], {"extra_args": {"subspec": zero, "another": "one's"}})
    assert engine.batch(request) == expected["answers"][:1]
    assert counted("drafted_nodes") == 0


@pytest.mark.parametrize("one", [1, True])
def test_asking_for_drafts_is_the_default(engine, requests, expected, counted, one):
    request = with_options(requests[:1], {"extra_args": {"subspec": one}})
    assert engine.batch(request) == expected["answers"][:1]
    assert counted("drafted_nodes") > 0


def test_one_that_drafts_beside_one_that_opted_out(engine, requests, expected, counted):
    """Its tree still grows while the weights stream, as if it were alone."""
    pair = with_options(requests[:2], capped(3), OPTED_OUT)  # so short ones are passed at times
    assert engine.batch(pair) == expected["answers"][:2]
    assert counted("followed_drafts") > 0
    assert counted("overlapped_draft_steps") > 0
    assert counted("fallback_opted_out") > 0


def test_some_opted_out_among_arrivals_and_aborts(engine, requests, expected):
    mixed = with_options(requests, OPTED_OUT, {}, capped(3), {})
    given_up = engine.add(with_options(requests[:2], OPTED_OUT, capped(2)))
    engine.step()
    engine.llm.llm_engine.abort_request(given_up)
    assert engine.staggered(mixed, every=2) == expected["answers"]


def test_depth_of_a_request(engine, requests, expected, counted):
    alone = with_options(requests[:1], capped(3))
    assert engine.batch(alone) == expected["answers"][:1]
    levels = counted("drafted_by_level")
    assert levels[0] > 0
    assert levels[2] > 0
    assert not any(levels[3:])
    assert counted("overlapped_draft_steps") > 0  # what is verified is capped, not what grows


def test_depths_of_requests_in_one_batch(engine, requests, expected, counted):
    both = with_options(requests[:2], capped(1), capped(2))
    assert engine.batch(both) == expected["answers"][:2]
    first, second, *deeper = counted("drafted_by_level")
    assert first > second > 0
    assert not any(deeper)
    mixed = with_options(requests, capped(1), {}, capped(2), {})
    assert engine.batch(mixed) == expected["answers"]
    assert any(counted("drafted_by_level")[2:])


def test_live_tuning_does_not_learn_from_requests_with_a_depth_of_their_own(engine, requests):
    pacing = engine.runner.speculation.drafter.pacing
    learnt = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pacing, "end_pass", lambda committed, hidden: learnt.append(len(committed)))
        engine.singly(with_options(requests[:2], capped(2), OPTED_OUT))
        assert set(learnt) == {0}
        engine.batch(with_options(requests, {}, capped(2), {}, OPTED_OUT))
        assert max(learnt) == 2


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"subspec": "off"}, r"option 'subspec' of a request is 'off': give false \(or 0\)"),
        ({"subspec": 2}, "option 'subspec' of a request is 2"),
        ({"subspec": None}, "option 'subspec' of a request is None"),
        ({"subspec": {"depth": 2}}, "option 'subspec' of a request is {'depth': 2}"),
        ({"subspec_depth": 0}, "'subspec_depth' of a request is 0: .* 1 to 32"),
        ({"subspec_depth": 33}, "'subspec_depth' of a request is 33: .* at most 32 nodes"),
        ({"subspec_depth": 2.0}, "'subspec_depth' of a request is 2.0"),
        ({"subspec_depth": True}, "'subspec_depth' of a request is True"),
        ({"subspec_width": 2}, "unknown option 'subspec_width' .* subspec, subspec_depth"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_engine_has_them(engine, requests, extra, reason):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(ConfigError, match=reason) as refused:
        engine.batch(with_options(requests[:1], {"extra_args": extra}))
    assert isinstance(refused.value, VLLMValidationError)  # which a server answers by 400
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_beam_search(engine, prompts, expected):
    assert beams(engine, prompts) == expected["beams"]


def test_priorities(engine, prompts, expected):
    answers, order = by_priority(engine, prompts)
    assert answers == expected["priorities"][0]
    for ends in (order, expected["priorities"][1]):
        assert set(ends[:4]) == {"4", "5", "6", "7"}


def test_prompts_of_embeddings(engine, prompts, embeddings, expected, counted):
    assert of_embeddings(engine, embeddings, prompts[4]) == expected["embeddings"]
    assert counted("committed_tokens") > counted("target_passes") > 0


def test_thinking_budgets_draft_nothing(engine, requests, prompts, expected, counted):
    """Nor do the requests beside them: vLLM keeps the budgets by batch row."""
    found = [engine.batch(batch) for batch in thinking(prompts)]
    assert found == expected["thinking"]
    ends = [["\nA: so" in answer.text for answer in answers] for answers in found]
    assert ends == [[True, True, False], [True, False, True]]
    assert counted("drafted_nodes") == counted("draft_steps") == 0
    assert counted("fallback_thinking_budget") > 0


def test_a_thinking_budget_that_comes_while_others_draft(engine, requests, prompts, expected):
    _, second = thinking(prompts)
    found = engine.staggered([*requests, second[0], *requests], every=3)
    assert found == [*expected["answers"], expected["thinking"][1][0], *expected["answers"]]
