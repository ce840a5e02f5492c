"""Replay against whole trees, walked as verification walks them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subspec_kernels.grow_mask import unpack_mask

from vllm_subspec.draft.growth import Growth
from vllm_subspec.draft.replay import Pass, replay
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.loop import Model, Sampler, draft, generate_plain, generate_subspec


class Toy:
    """A growth on the model of ``loop``, one tree a call, its forwards counted."""

    def __init__(self, model: Model, tokens: list[int], num_prompt: int, width: int) -> None:
        self.model, self.tokens, self.num_prompt, self.width = model, tokens, num_prompt, width
        self.steps = 0

    def growth(self, root: int) -> Growth:
        context = self.tokens[: self.num_prompt + root + 1]
        scratch = list(self.model.prefill(context))

        def forward(tokens: torch.Tensor, level: int, words: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            mask = unpack_mask(words[0], 1 + level * tokens.shape[1])
            positions = torch.full_like(tokens[0], len(context) - 1 + level)
            return self.model.forward(tokens[0], positions, mask, scratch, draft=True)[None]

        return Growth(forward, torch.tensor(context[-1:]), self.width)


@pytest.mark.parametrize("width", [1, 4])
def test_every_depth_takes_the_passes_of_a_real_run(width: int) -> None:
    model, prompt, count = Model(seed=1), [1, 2, 3], 60
    text = generate_plain(model, prompt, count, Sampler()).tokens
    toy = Toy(model, [*prompt, *text], len(prompt), width)
    depths, taus = (2, 12, 5, 1), {}
    for depth, passes in zip(depths, replay(text, depths, toy.growth), strict=True):
        # `loop` drafts from the prompt on; a served request gets its first token by the prompt.
        run = generate_subspec(
            model, [*prompt, text[0]], count - 1, Sampler(), TreeShape(width, depth)
        )
        assert run.tokens == text[1:]
        assert len(passes) == run.passes
        assert sum(one.accepted + 1 for one in passes) == count - 1
        taus[depth] = (count - 1) / len(passes)
    assert taus[12] >= taus[5] > taus[2] > taus[1]


def test_a_tree_grows_no_further_than_the_text_stays_in_it() -> None:
    model, prompt = Model(seed=1), [1, 2, 3]
    text = generate_plain(model, prompt, 20, Sampler()).tokens
    tree = draft(model, text[0], model.prefill([*prompt, text[0]]), Sampler(), TreeShape(3, 12))
    follows = len(tree.least_nodes(text[1:13]))
    assert 0 < follows < 12
    toy = Toy(model, [*prompt, *text], len(prompt), 3)
    first = replay(text, [12], toy.growth)[0][0]
    assert first == Pass(12, follows)
    alone = Toy(model, [*prompt, *text[:14]], len(prompt), 3)
    shallow, deep = replay(text[:14], [follows, 12], alone.growth)
    assert shallow[0] == Pass(follows, follows)
    assert deep[0] == Pass(12, follows)
    committed = sum(one.accepted + 1 for one in deep)
    assert alone.steps <= committed + len(shallow) * (follows + 1)


def test_the_end_of_a_text_bounds_its_trees() -> None:
    class Oracle:
        """A growth that holds whatever it is asked for, or nothing."""

        def __init__(self, follows: bool) -> None:
            self.depth, self.follows = 0, follows

        def step(self) -> None:
            self.depth += 1

        def holds(self, tokens: list[int]) -> bool:
            return self.follows or not tokens

    def passes(count: int, follows: bool) -> list[Pass]:
        oracles: Any = Oracle
        return replay(list(range(count)), [4], lambda root: oracles(follows))[0]

    assert passes(1, True) == []
    assert passes(2, True) == [Pass(0, 0)]
    assert passes(8, True) == [Pass(4, 4), Pass(1, 1)]
    assert passes(5, False) == [Pass(3, 0), Pass(2, 0), Pass(1, 0), Pass(0, 0)]
