"""The reference loop: same tokens as plain decoding, which equals decoding without a cache."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_subspec import loop
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.loop import Model, Sampler, generate_plain, generate_subspec
from vllm_subspec.verify.noise import gumbel_noise

PROMPTS = {"one_token": [5], "short": [1, 2, 3], "long": [(7 * i) % 96 for i in range(40)]}
SHAPES = {
    "chain": TreeShape(1, 6),
    "small_tree": TreeShape(3, 4),
    "wide_shallow": TreeShape(16, 2),
    "pruned": TreeShape(4, 8, max_nodes=11),
}
SAMPLERS = {"greedy": (0.0, 0), "sampled": (1.0, 3), "hot": (2.5, 4)}
COUNT = 32


@pytest.fixture(scope="module")
def model():
    return Model(layers=2)


@pytest.fixture(scope="module")
def plain_tokens(model):
    return {
        (prompt, sampler): generate_plain(model, PROMPTS[prompt], COUNT, Sampler(*settings)).tokens
        for prompt in PROMPTS
        for sampler, settings in SAMPLERS.items()
    }


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_plain_equals_decoding_without_a_cache(model, plain_tokens, sampler):
    """The reference recomputes the whole sequence and draws one integer a token."""
    temperature, seed = SAMPLERS[sampler]
    generator = torch.Generator().manual_seed(seed)
    tokens = list(PROMPTS["short"])
    for _ in range(COUNT):
        cache = [torch.empty(2, 2, 0, 16, dtype=torch.float64) for _ in model.target]
        rows = torch.arange(len(tokens))
        logits = model.forward(torch.tensor(tokens), rows, rows[:, None] >= rows, cache)[-1]
        if temperature:
            integer = torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
            logits = logits / temperature + gumbel_noise(integer, torch.arange(96))[0]
        tokens.append(int(logits.argmax()))
    assert tokens[3:] == plain_tokens["short", sampler]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_subspec_equals_plain(model, plain_tokens, shape, sampler, prompt):
    result = generate_subspec(
        model, PROMPTS[prompt], COUNT, Sampler(*SAMPLERS[sampler]), SHAPES[shape]
    )
    assert result.tokens == plain_tokens[prompt, sampler]
    assert result.passes < COUNT


@pytest.mark.parametrize("count", [1, 2, 7])
def test_subspec_stops_at_the_count(model, plain_tokens, count):
    result = generate_subspec(model, PROMPTS["short"], count, Sampler(), TreeShape(2, 5))
    assert result.tokens == plain_tokens["short", "greedy"][:count]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shadow_equal_to_the_target_is_accepted_whole(temperature):
    """Sampled too: the draft knows the noise, so only the shadow's rounding can cost tokens."""
    twin = Model(seed=1, layers=2)
    twin.shadow = twin.target
    result = generate_subspec(twin, [1, 2], 45, Sampler(temperature), TreeShape(2, 8))
    assert result.passes == 5
    assert result.tau == 9.0


def test_drafting_leaves_the_context_as_it_is(model):
    cache = model.prefill([1, 2, 3, 4])
    copies = [kv.clone() for kv in cache]
    tree = loop.draft(model, 4, cache, Sampler(), TreeShape(3, 3))
    tree.check_integrity()
    assert len(tree) == 9
    assert all(torch.equal(kv, copy) for kv, copy in zip(cache, copies, strict=True))


def test_the_cache_after_a_pass_is_that_of_the_committed_tokens(model, monkeypatch):
    """Compaction, seen from outside: the last cache equals a prefill of the same tokens."""
    caches = []
    compact = loop.compact

    def spy(cache, context, walk):
        compact(cache, context, walk)
        caches.append(cache)

    monkeypatch.setattr(loop, "compact", spy)
    shape = TreeShape(4, 6)
    result = generate_subspec(model, [1, 2, 3], 30, Sampler(1.0), shape)
    context = caches[-1][0].shape[2]
    prefilled = model.prefill([1, 2, 3, *result.tokens][: context + 1])
    held = min(context, prefilled[0].shape[2])
    assert held >= 30
    for ours, theirs in zip(caches[-1], prefilled, strict=True):
        torch.testing.assert_close(ours[:, :, :held], theirs[:, :, :held])


def test_demo_prints_a_worthwhile_tau_and_equal_tokens(capsys):
    loop.demo(count=40)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("same tokens as plain decoding: True") for line in lines)
    taus = [float(re.search(r"tau (\d+\.\d+)", line)[1]) for line in lines]
    assert min(taus) > 2
    assert taus[1] > taus[0]
    assert taus[4] > taus[3]


def test_core_rooms_import_without_vllm():
    program = (
        "import sys; sys.modules['vllm'] = None; import vllm_subspec.loop; "
        "assert not [name for name in sys.modules if name.startswith('vllm.')]"
    )
    root = Path(loop.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=root)
