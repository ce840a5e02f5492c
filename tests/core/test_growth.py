"""Growth against an exhaustive reference that knows paths, not slots, and sums in float64."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.grow_mask import pack_mask, unpack_mask

from vllm_subspec.draft.growth import Growth, Rerooting, grow
from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.errors import ConfigError

FIXED = settings(deadline=None, max_examples=60, derandomize=True)
Path = tuple[int, ...]
Node = tuple[Path, float]  # path without root, score


class PathModel:
    """A draft whose logits are a random function of position and of the path that it may see.

    It stores a token per scratch slot and moves them as the contract says, so a wrong mask, slot
    or level gives other logits than the reference's. What lies above the root is its context.
    """

    def __init__(self, vocab: int, seed: int, barred: float = 0.0):
        self.vocab, self.seed, self.barred = vocab, seed, barred
        self.context: Path = ()
        self.slots: torch.Tensor | None = None
        self.calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def logits(self, path: Path, position: int | None = None) -> list[float]:
        """Of the token after ``path``, context first; some are -inf where tokens are barred."""
        position = len(path) - 1 if position is None else position
        random = Random(f"{self.seed} {position} {path}")
        values = [random.gauss(0, 2) for _ in range(self.vocab)]
        return [-math.inf if random.random() < self.barred else value for value in values]

    def forward(self, tokens, level, words):
        num_slots = 1 + level * tokens.shape[1]
        assert words.shape == (*tokens.shape, -(-num_slots // 64))
        mask = unpack_mask(words, num_slots)
        assert words.equal(pack_mask(mask)), "bits of slots that are not filled"
        self.calls.append((level, tuple(tokens.shape), tuple(mask.shape)))
        assert (self.slots is None) == (level == 0)
        self.slots = tokens if self.slots is None else torch.cat([self.slots, tokens], 1)
        assert mask.shape == (*tokens.shape, self.slots.shape[1])
        m = tokens.shape[1]
        for own in mask[..., -m:]:
            assert own.equal(torch.eye(m).bool()), "each node sees itself and none beside it"
        position = len(self.context) + level
        rows = [
            [
                self.logits((*self.context, *slots[seen].tolist()), position)
                for seen in mask[request]
            ]
            for request, slots in enumerate(self.slots)
        ]
        return torch.tensor(rows, dtype=torch.float32)

    def move_down(self, committed: Path, rerooting: Rerooting, width: int) -> None:
        """``committed`` holds the old root and the path, the new root being its last."""
        self.context += committed[:-1]
        assert rerooting.levels == len(committed) - 1
        if rerooting.slot is None:
            self.slots = None
        else:
            assert self.slots is not None
            first = 1 + rerooting.levels * width
            root = self.slots[:, rerooting.slot, None]
            self.slots = torch.cat([root, self.slots[:, first:]], 1)


def log_softmax(values: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in values]
    peak = max(scaled)
    if peak == -math.inf:
        return scaled
    total = math.log(sum(math.exp(value - peak) for value in scaled))
    return [value - peak - total for value in scaled]


class Search:
    """The same by trying every child of every node of a level."""

    def __init__(self, model: PathModel, root: int, width: int, temperature: float) -> None:
        self.model, self.width, self.temperature = model, width, temperature
        self.above: Path = (root,)  # all that was committed, the root last
        self.levels: list[list[Node]] = []
        self.is_exhausted = False

    def step(self) -> None:
        children = [
            ((*path, token), score + value)
            for path, score in (self.levels[-1] if self.levels else [((), 0.0)])
            for token, value in enumerate(
                log_softmax(self.model.logits((*self.above, *path)), self.temperature)
            )
            if value > -math.inf
        ]
        self.levels.append(sorted(children, key=lambda child: -child[1])[: self.width])

    def nodes(self, max_nodes: int | None = None) -> list[Node]:
        nodes = [node for level in self.levels for node in level]
        best = sorted(nodes, key=lambda node: -node[1])[:max_nodes]
        return [node for node in nodes if node in best]

    def follow(self, path: Path) -> bool:
        scores = dict(self.nodes())
        if path not in scores:
            return False
        is_frontier = len(path) == len(self.levels)
        self.above += path
        self.levels = [
            [(p[len(path) :], s - scores[path]) for p, s in level if p[: len(path)] == path]
            for level in self.levels[len(path) :]
        ]
        while self.levels and not self.levels[-1]:
            self.levels.pop()
            self.is_exhausted = True
        if is_frontier:
            self.is_exhausted = False
        return True


def reference(model: PathModel, root: int, shape: TreeShape, temperature: float) -> list[Node]:
    search = Search(model, root, shape.width, temperature)
    for _ in range(shape.depth):
        search.step()
    return search.nodes(shape.max_nodes)


def paths_of(tree: Tree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def check(tree: Tree, expected: list[Node]) -> None:
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

    def blank(tokens, level, words):
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
    def flat(tokens, level, words):
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

    def forward(tokens, level, words):
        return torch.tensor([[after[token] for token in tokens[0].tolist()]])

    def last_level(temperature):
        return paths_of(grow(forward, torch.tensor([7]), TreeShape(2, 2), temperature)[0])[2:]

    assert last_level(1.0) == [(1, 0), (0, 0)]
    assert last_level(0.2) == [(0, 0), (0, 1)]


def test_all_tokens_barred_gives_an_empty_tree():
    def forward(tokens, level, words):
        return torch.full((*tokens.shape, 40), -math.inf)

    tree = grow(forward, torch.tensor([0]), TreeShape(2, 3))[0]
    assert len(tree) == 0
    tree.check_integrity()


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(1, 1, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tree = grow(lambda tokens, level, words: logits, torch.tensor([0]), TreeShape(4, 1), 0.2)[0]
    expected = (logits[0, 0].double() / 0.2).log_softmax(-1)
    assert tree.scores.tolist() == pytest.approx(expected[tree.tokens].tolist(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bad_draft_temperature_is_refused(temperature):
    with pytest.raises(ConfigError, match=r"draft temperature .* above 0"):
        grow(PathModel(3, 0).forward, torch.tensor([0]), TreeShape(1, 1), temperature)


class Pair:
    """A growth and the exhaustive search, in step; ``by_rank``: the ranks alone decide."""

    def __init__(self, model: PathModel, root: int, width: int, by_rank: bool = False) -> None:
        self.model, self.search = model, Search(model, root, width, 0.5)
        forward = self.blank if by_rank else model.forward
        self.growth = Growth(forward, torch.tensor([root]), width, 0.5)
        self.growth.rank = self.rank if by_rank else None

    def blank(self, tokens, level, words):
        return torch.zeros_like(self.model.forward(tokens, level, words))

    def rank(self, logits, level, history):
        assert history.shape == (1, logits.shape[1], level)
        rows = [self.model.logits((*self.search.above, *path)) for path in history[0].tolist()]
        return torch.tensor([rows])

    def step(self) -> None:
        if not self.search.is_exhausted:
            self.growth.step()
            self.search.step()
        self.check()

    def follow(self, path: Path) -> None:
        root = self.search.above[-1]
        rerooting = self.growth.follow(path)
        assert (rerooting is not None) == self.search.follow(path)
        if rerooting is not None:
            self.model.move_down((root, *path), rerooting, self.growth.width)
        self.check()

    def check(self) -> None:
        assert self.growth.is_exhausted == self.search.is_exhausted
        assert self.growth.depth == len(self.search.levels)
        (tree,), (doubt,) = self.growth.trees(), self.growth.doubts()
        check(tree, self.search.nodes())
        if tree.depth == self.growth.depth:  # else the last level is dead
            assert doubt == pytest.approx([0.0, *tree.doubts()][-1], abs=1e-4)
        else:
            assert doubt == math.inf
        for max_nodes in (1, 4):
            check(self.growth.trees(max_nodes)[0], self.search.nodes(max_nodes))


steps = st.just(None)
picks = st.integers(0, 400)  # a node of the tree, counted around
wrong = st.lists(st.integers(0, 8), min_size=1, max_size=9).map(tuple)  # most lead nowhere


@settings(FIXED, max_examples=150)
@given(
    width=st.integers(1, 5),
    vocab=st.integers(1, 7),
    barred=st.sampled_from([0.0, 0.0, 0.5, 0.7]),
    by_rank=st.booleans(),
    first=st.integers(0, 5),
    work=st.lists(steps | steps | picks | wrong, max_size=14),
    seed=st.integers(0, 10**6),
)
def test_a_followed_growth_equals_exhaustive_search(
    width, vocab, barred, by_rank, first, work, seed
):
    """Any steps and paths in any order: what was kept, and what grows below it."""
    pair = Pair(PathModel(vocab, seed, barred), seed % vocab, width, by_rank)
    for todo in [None] * first + work:
        nodes = pair.search.nodes()
        if isinstance(todo, tuple):
            pair.follow(todo)
        elif todo is None or not nodes:
            pair.step()
        else:
            pair.follow(nodes[todo % len(nodes)][0])


@pytest.mark.parametrize("width", [1, 4, 20])  # the last fills more than a word
@pytest.mark.parametrize("levels", [1, 2, 5, 6])
def test_growth_goes_on_below_the_best_path_of_any_depth(width, levels):
    pair = Pair(PathModel(50, seed=2), 3, width)
    for _ in range(6):
        pair.step()
    path = next(path for path, _ in pair.search.nodes() if len(path) == levels)
    forwards = len(pair.model.calls)
    pair.follow(path)
    assert len(pair.model.calls) == forwards, "what was grown is not computed again"
    for _ in range(3):
        pair.step()
    first = pair.model.calls[forwards]
    slots = 1 + width * (6 - levels)
    assert first == (6 - levels, (1, width if levels < 6 else 1), (1, *first[1][1:], slots))


def test_a_path_that_the_tree_does_not_hold_changes_nothing():
    pair = Pair(PathModel(9, seed=4), 3, 2)
    pair.follow((1,))  # nothing is grown yet
    for _ in range(3):
        pair.step()
    (good, _), *_ = [node for node in pair.search.nodes() if len(node[0]) == 3]
    held = {path for path, _ in pair.search.nodes()}
    stranger = next(token for token in range(9) if (token,) not in held)
    for path in ((stranger,), (stranger, *good[1:]), (*good[:2], stranger), (*good, 0)):
        if path not in held:
            assert pair.growth.follow(path) is None
            pair.follow(path)
    pair.step()
    pair.follow(good)


def test_an_exhausted_growth_is_kept_and_starts_over_at_its_end():
    """Three levels down, what begins with token 1 goes no further."""

    def rank(logits, level, history):
        if level >= 3:
            logits[0, history[0, :, 0] == 1] = -math.inf
        return logits

    def flat(tokens, level, words):
        return torch.zeros(*tokens.shape, 2)

    growth = Growth(flat, torch.tensor([0]), 20, rank=rank)
    for _ in range(5):
        growth.step()
    assert not growth.is_exhausted
    slot = 1 + 1  # the root, and token 0 of level 1
    assert growth.follow([1]) == Rerooting(1, slot)
    assert growth.is_exhausted
    assert paths_of(growth.trees()[0]) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert growth.follow([0]) == Rerooting(1, 3)  # after the rows of (0, 0) and (0, 1)
    assert growth.is_exhausted
    assert paths_of(growth.trees()[0]) == [(0,), (1,)]
    assert growth.follow([1]) == Rerooting(1, None)
    assert not growth.is_exhausted
    assert len(growth.trees()[0]) == growth.depth == 0
    growth.step()
    assert paths_of(growth.trees()[0]) == [(0,), (1,)]


def test_a_path_to_a_node_without_children_leaves_an_empty_tree():
    def forward(tokens, level, words):
        logits = torch.zeros(*tokens.shape, 2)
        logits[tokens == 1] = -math.inf
        return logits

    growth = Growth(forward, torch.tensor([0]), 4)
    for _ in range(3):
        growth.step()
    assert growth.follow([0, 1]) == Rerooting(2, 1 + 4 + 1)
    assert growth.is_exhausted
    assert len(growth.trees()[0]) == growth.depth == 0
