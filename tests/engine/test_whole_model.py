"""All 30 layers of a model that writes sensible English, streamed, against plain vLLM."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine


def test_whole_model(open_engine, example_model_dir, prompts):
    greedy = {"max_tokens": 48}
    seeded = greedy | {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    requests = [(prompt, greedy) for prompt in prompts[:6]]
    requests += [(prompt, seeded) for prompt in prompts[6:]]
    chat = "<|im_start|>user\nIs water wet? Say yes or no.<|im_end|>\n<|im_start|>assistant\n"
    requests.append((chat, {"max_tokens": 60, "ignore_eos": False}))
    with open_engine(example_model_dir, max_num_seqs=12) as plain:
        expected = plain.batch(requests)
    assert "Paris" in expected[0].text
    assert expected[-1].finish_reason == "stop"
    # Rounding to nearest instead of HQQ: 106 million weights in seconds, not in half a minute.
    subspec = {"width": 4, "depth": 12, "stream": "disk", "quantizer": "rtn"}
    with open_engine(example_model_dir, subspec, max_num_seqs=12) as engine:
        assert engine.batch(requests) == expected
        statistics = engine.statistics()
    assert statistics["committed_tokens"] > 3 * statistics["target_passes"]
