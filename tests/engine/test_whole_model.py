"""All 30 layers of a model that writes sensible English, streamed, against plain vLLM."""

from __future__ import annotations

import pytest

from vllm_subspec.draft.tuning import Cut

pytestmark = pytest.mark.engine

GREEDY = {"max_tokens": 48}
SEEDED = GREEDY | {"temperature": 0.8, "top_p": 0.9, "seed": 1}
TEXTS = {
    "easy": ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,", GREEDY),
    "hard": ("Once upon a time", SEEDED | {"temperature": 1.2}),
}


@pytest.fixture(scope="module")
def requests(prompts):
    chat = "<|im_start|>user\nIs water wet? Say yes or no.<|im_end|>\n<|im_start|>assistant\n"
    found = [(prompt, GREEDY) for prompt in prompts[:6]]
    found += [(prompt, SEEDED) for prompt in prompts[6:]]
    found.append((chat, {"max_tokens": 60, "ignore_eos": False}))
    return [*found, *TEXTS.values()]


@pytest.fixture(scope="module")
def expected(open_engine, example_model_dir, requests):
    with open_engine(example_model_dir, max_num_seqs=12) as plain:
        return plain.batch(requests)


@pytest.fixture(scope="module")
def engine(open_engine, example_model_dir, expected):
    # Rounding to nearest instead of HQQ: 106 million weights in seconds, not in half a minute.
    subspec = {"width": 4, "depth": 12, "stream": "disk", "quantizer": "rtn"}
    with open_engine(example_model_dir, subspec, max_num_seqs=12) as engine:
        yield engine


def test_whole_model(engine, requests, expected):
    assert "Paris" in expected[0].text
    assert expected[8].finish_reason == "stop"
    assert engine.batch(requests) == expected
    statistics = engine.statistics()
    assert statistics["committed_tokens"] > 3 * statistics["target_passes"]


class Priced:
    """Stands in for the tuner: another level must be likelier than not."""

    pass_floor_s = 0.0
    nodes = 48

    def next_cut(self, sequences):
        return Cut(24, self.nodes, price=0.5)

    def look_again(self):
        pass

    observe_draft = observe_prompts = observe_pass = observe_trees = lambda *args: None


def test_trees_are_as_deep_as_their_text_is_easy(engine, expected, monkeypatch):
    engine.runner.set_draft_policy(depth=None, max_nodes=Priced.nodes)
    monkeypatch.setattr(engine.runner.speculation.drafter.pacing, "tuner", Priced())
    depths = {}
    for (name, request), answer in zip(TEXTS.items(), expected[-2:], strict=True):
        before = engine.statistics()
        assert engine.batch([request]) == [answer]
        after = engine.statistics()
        passes = after["target_passes"] - before["target_passes"]
        levels = sum(after["drafted_by_level"]) - sum(before["drafted_by_level"])
        depths[name] = levels / passes
        assert after["stopped_drafts"] > before["stopped_drafts"]
    assert depths["easy"] > 1.2 * depths["hard"]
