"""Growth against an exhaustive reference that knows paths, not slots, and sums in float64."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft import growth
from vllm_subspec.draft.growth import grow
from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.errors import ConfigError

FIXED = settings(deadline=None, max_examples=60, derandomize=True)
Path = tuple[int, ...]


class PathModel:
    """A draft whose logits are a random function of the path that the mask lets it see.

    It stores a token per scratch slot as the contract says, so a wrong mask, slot or level
    gives other logits than the reference's.
    """

    def __init__(self, vocab: int, seed: int, barred: float = 0.0):
        self.vocab, self.seed, self.barred = vocab, seed, barred
        self.slots: torch.Tensor | None = None
        self.calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def logits(self, path: Path) -> list[float]:
        """Of the token after ``path``, root first; some are -inf where tokens are barred."""
        random = Random(f"{self.seed} {path}")
        values = [random.gauss(0, 2) for _ in range(self.vocab)]
        return [-math.inf if random.random() < self.barred else value for value in values]

    def forward(self, tokens, level, mask):
        self.calls.append((level, tuple(tokens.shape), tuple(mask.shape)))
        self.slots = tokens if level == 0 else torch.cat([self.slots, tokens], 1)
        rows = [
            [
                self.logits(tuple(self.slots[request][mask[request, row]].tolist()))
                for row in range(tokens.shape[1])
            ]
            for request in range(tokens.shape[0])
        ]
        return torch.tensor(rows, dtype=torch.float32)


def log_softmax(values: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in values]
    peak = max(scaled)
    if peak == -math.inf:
        return scaled
    total = math.log(sum(math.exp(value - peak) for value in scaled))
    return [value - peak - total for value in scaled]


def reference(model, root: int, shape: TreeShape, temperature: float) -> list[tuple[Path, float]]:
    """(path without root, score) of every node, in order, by trying every child of a level."""
    nodes: list[tuple[Path, float]] = []
    level: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(shape.depth):
        children = [
            ((*path, token), score + value)
            for path, score in level
            for token, value in enumerate(log_softmax(model.logits((root, *path)), temperature))
        ]
        alive = [child for child in children if child[1] > -math.inf]
        level = sorted(alive, key=lambda child: -child[1])[: shape.width]
        nodes += level
    if shape.max_nodes is not None:
        best = sorted(nodes, key=lambda node: -node[1])[: shape.max_nodes]
        nodes = [node for node in nodes if node in best]
    return nodes


def paths_of(tree: Tree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def check(tree: Tree, expected: list[tuple[Path, float]]) -> None:
    tree.check_integrity()
    assert paths_of(tree) == [path for path, _ in expected]
    assert tree.levels.tolist() == [len(path) for path, _ in expected]
    assert tree.scores.tolist() == pytest.approx([score for _, score in expected], abs=1e-4)


shapes = st.builds(TreeShape, st.integers(1, 5), st.integers(1, 5), st.none() | st.integers(1, 20))


@FIXED
@given(
    shape=shapes,
    vocab=st.integers(1, 7),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    barred=st.sampled_from([0.0, 0.5, 0.8]),
    seed=st.integers(0, 10**6),
)
def test_grow_equals_exhaustive_search(shape, vocab, temperature, barred, seed):
    model = PathModel(vocab, seed, barred)
    roots = [0, seed % vocab, vocab - 1]
    trees = grow(model.forward, torch.tensor(roots), shape, temperature)
    assert len(trees) == len(roots)
    for root, tree in zip(roots, trees, strict=True):
        check(tree, reference(model, root, shape, temperature))


@FIXED
@given(shape=shapes, seed=st.integers(0, 10**6))
def test_rank_sees_each_nodes_own_path_and_decides(shape, seed):
    """With blank logits the tree must come from the ranks alone, so from ``history``."""
    model = PathModel(5, seed)
    root = 3

    def rank(logits, level, history):
        assert history.shape == (1, logits.shape[1], level)
        assert history.dtype == torch.int64
        rows = [model.logits((root, *path)) for path in history[0].tolist()]
        return torch.tensor([rows])

    def blank(tokens, level, mask):
        return torch.zeros(1, tokens.shape[1], 5)

    tree = grow(blank, torch.tensor([root]), shape, 0.5, rank)[0]
    check(tree, reference(model, root, shape, 0.5))


@pytest.mark.parametrize("width", [1, 3])
def test_forward_runs_once_a_level_on_the_promised_shapes(width):
    model = PathModel(7, seed=1)
    grow(model.forward, torch.tensor([1, 2]), TreeShape(width, 4))
    assert model.calls == [
        (0, (2, 1), (2, 1, 1)),
        (1, (2, width), (2, width, 1 + width)),
        (2, (2, width), (2, width, 1 + 2 * width)),
        (3, (2, width), (2, width, 1 + 3 * width)),
    ]


def test_equal_scores_go_to_the_lower_parent_then_the_lower_token():
    def flat(tokens, level, mask):
        return torch.zeros(*tokens.shape, 50)

    tree = grow(flat, torch.tensor([9]), TreeShape(3, 2))[0]
    assert paths_of(tree) == [(0,), (1,), (2,), (0, 0), (0, 1), (0, 2)]
    pruned = grow(flat, torch.tensor([9]), TreeShape(3, 2, max_nodes=4))[0]
    assert paths_of(pruned) == [(0,), (1,), (2,), (0, 0)]


def test_sharpening_follows_the_better_path_deeper():
    """Below token 0 a crowd of rivals spoils every probability, until sharpening thins it."""
    after = {
        7: [1.0, 0.0] + [-9.0] * 48,  # the root prefers 0 to 1
        0: [1.0, 0.5] + [0.0] * 48,
        1: [9.0, 0.0] + [0.0] * 48,
    }

    def forward(tokens, level, mask):
        return torch.tensor([[after[token] for token in tokens[0].tolist()]])

    def last_level(temperature):
        return paths_of(grow(forward, torch.tensor([7]), TreeShape(2, 2), temperature)[0])[2:]

    assert last_level(1.0) == [(1, 0), (0, 0)]
    assert last_level(0.2) == [(0, 0), (0, 1)]


def test_all_tokens_barred_gives_an_empty_tree():
    def forward(tokens, level, mask):
        return torch.full((*tokens.shape, 40), -math.inf)

    tree = grow(forward, torch.tensor([0]), TreeShape(2, 3))[0]
    assert len(tree) == 0
    tree.check_integrity()


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(1, 1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tree = grow(lambda tokens, level, mask: logits, torch.tensor([0]), TreeShape(4, 1), 0.2)[0]
    expected = (logits[0, 0].double() / 0.2).log_softmax(-1)
    assert tree.scores.tolist() == pytest.approx(expected[tree.tokens].tolist(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bad_draft_temperature_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"draft temperature .* above 0"):
        grow(PathModel(3, 0).forward, torch.tensor([0]), TreeShape(1, 1), temperature)


@FIXED
@given(
    vocab=st.integers(1, 700),
    count=st.integers(1, 32),
    grain=st.sampled_from([0.01, 0.5, 2.0]),
    barred=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_best_of_rows_equals_a_stable_sort(vocab, count, grain, barred, seed):
    """Coarse values make ties common, which only a search with a fixed order settles."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(2, 3, vocab, generator=generator) / grain).round() * grain
    values[torch.rand(values.shape, generator=generator) < barred] = -math.inf
    best, ids = growth._best_of_rows(values, count)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    held = min(vocab, count)
    assert torch.equal(best[..., :held], ordered.values[..., :held])
    assert torch.equal(ids[..., :held], ordered.indices[..., :held])
    assert (best[..., held:] == -math.inf).all()
    assert best.shape == ids.shape == (2, 3, count)
