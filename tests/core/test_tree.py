"""Tree: shape limits, the ancestor mask, truncation and pruning against slow references."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.errors import ConfigError

FIXED = settings(deadline=None, max_examples=80, derandomize=True)


def random_tree(seed: int) -> Tree:
    """Up to 40 nodes in level order; scores fall by 0, 1 or 2 a level, so ties abound."""
    random = Random(seed)
    tokens: list[int] = []
    parents: list[int] = []
    levels: list[int] = []
    scores: list[float] = []
    above = [-1]
    for level in range(1, random.randint(0, 7) + 1):
        pairs = [(parent, token) for parent in above for token in range(4)]
        chosen = random.sample(pairs, min(len(pairs), random.randint(1, 6)))
        above = []
        for parent, token in chosen:
            above.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            levels.append(level)
            scores.append((scores[parent] if parent >= 0 else 0.0) - random.randint(0, 2))
    return Tree(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int64),
        torch.tensor(levels, dtype=torch.int64),
        torch.tensor(scores, dtype=torch.float32),
    )


trees = st.integers(0, 10**6).map(random_tree)


def path_of(tree: Tree, node: int) -> list[int]:
    """Node indices from the root's child down to ``node``."""
    if node < 0:
        return []
    return [*path_of(tree, int(tree.parents[node])), node]


def as_rows(tree: Tree) -> list[tuple[list[int], int, float]]:
    """Each node by what does not depend on its index: tokens of its path, level, score."""
    return [
        (
            [int(tree.tokens[i]) for i in path_of(tree, node)],
            int(tree.levels[node]),
            float(tree.scores[node]),
        )
        for node in range(len(tree))
    ]


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ((0, 1), "width", "0"),
        ((33, 1), "width", "33"),
        ((4, 0), "depth", "0"),
        ((4, 257), "depth", "257"),
        ((4, 8, 0), "max_nodes", "0"),
        ((4.0, 8), "width", "4.0"),
        ((4, "8"), "depth", "'8'"),
        ((True, 8), "width", "True"),
        ((4, 8, 2.5), "max_nodes", "2.5"),
    ],
)
def test_shape_refuses_and_names_the_value(arguments, name, value):
    with pytest.raises(ConfigError, match="choose") as caught:
        TreeShape(*arguments)
    assert name in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (TreeShape(6, 48), 288),
        (TreeShape(32, 256), 8192),
        (TreeShape(1, 1), 1),
        (TreeShape(6, 48, 64), 64),
        (TreeShape(2, 3, 100), 6),
    ],
)
def test_node_count(shape, count):
    assert shape.node_count == count


def test_empty_tree():
    tree = Tree.empty()
    tree.check_integrity()
    assert len(tree) == tree.depth == 0
    assert tree.ancestor_mask().tolist() == [[True]]
    assert len(tree.truncate(3)) == len(tree.limit_depth(2)) == len(tree.prune(1)) == 0


def test_ancestor_mask_of_a_small_tree():
    tree = Tree(
        torch.tensor([7, 8, 7, 9]),
        torch.tensor([-1, -1, 1, 2]),
        torch.tensor([1, 1, 2, 3]),
        torch.tensor([-0.1, -0.5, -0.6, -0.7]),
    )
    tree.check_integrity()
    assert tree.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]


@FIXED
@given(trees)
def test_mask_has_exactly_the_ancestors(tree):
    tree.check_integrity()
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    for row in range(len(tree) + 1):
        visible = mask[row].nonzero().flatten().tolist()
        assert visible == [0, *(node + 1 for node in path_of(tree, row - 1))]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 9, 255, 256])
def test_mask_of_a_chain_is_causal_at_every_depth(depth):
    rows = torch.arange(depth)
    chain = Tree(rows, rows - 1, rows + 1, -rows.float())
    assert torch.equal(
        chain.ancestor_mask(), torch.ones(depth + 1, depth + 1, dtype=torch.bool).tril()
    )


@FIXED
@given(trees)
def test_truncation_at_every_length_leaves_a_tree(tree):
    mask = tree.ancestor_mask()
    for count in range(len(tree) + 2):
        head = tree.truncate(count)
        head.check_integrity()
        assert len(head) == min(count, len(tree))
        assert as_rows(head) == as_rows(tree)[:count]
        assert torch.equal(head.ancestor_mask(), mask[: len(head) + 1, : len(head) + 1])


@FIXED
@given(trees, st.integers(0, 8))
def test_limit_depth_keeps_exactly_the_upper_levels(tree, depth):
    cut = tree.limit_depth(depth)
    cut.check_integrity()
    assert as_rows(cut) == [row for row in as_rows(tree) if row[1] <= depth]
    assert cut.depth == min(depth, tree.depth)


@FIXED
@given(trees, st.integers(1, 45))
def test_prune_keeps_the_best_nodes_and_their_ancestors_in_order(tree, max_nodes):
    scores = tree.scores.tolist()
    best = set(sorted(range(len(tree)), key=lambda node: (-scores[node], node))[:max_nodes])
    assert all(set(path_of(tree, node)) <= best for node in best)
    pruned = tree.prune(max_nodes)
    pruned.check_integrity()
    rows = as_rows(tree)
    assert as_rows(pruned) == [rows[node] for node in sorted(best)]


@FIXED
@given(trees)
def test_doubt_is_what_the_scores_of_a_level_lost(tree):
    doubts = tree.doubts()
    assert len(doubts) == tree.depth
    for level, doubt in enumerate(doubts, start=1):
        mass = sum(math.exp(score) for score in tree.scores[tree.levels == level].tolist())
        assert doubt == pytest.approx(max(0.0, -math.log(mass)))


@FIXED
@given(trees)
def test_least_nodes_are_what_prune_must_keep(tree):
    tokens = tree.tokens.tolist()
    for node in range(len(tree)):
        path = [tokens[at] for at in path_of(tree, node)]
        least = tree.least_nodes([*path, -7])  # and on, out of the tree
        assert len(least) == len(path)
        for level, count in enumerate(least, start=1):
            assert len(tree.prune(count).least_nodes(path)) >= level
            assert len(tree.prune(count - 1).least_nodes(path)) < level
    assert tree.least_nodes([]) == tree.least_nodes([-7]) == []


GOOD = Tree(
    torch.tensor([5, 6, 5]),
    torch.tensor([-1, -1, 0]),
    torch.tensor([1, 1, 2]),
    torch.tensor([-1.0, -2.0, -1.5]),
)


@pytest.mark.parametrize(
    ("broken", "values"),
    [
        ("parents", torch.tensor([-1, -1, 2])),
        ("parents", torch.tensor([-1, -2, 0])),
        ("parents", torch.tensor([-1, -1])),
        ("levels", torch.tensor([1, 2, 1])),
        ("levels", torch.tensor([1, 1, 3])),
        ("tokens", torch.tensor([5, 5, 5])),
        ("tokens", torch.tensor([5, 6, 5], dtype=torch.int32)),
        ("scores", torch.tensor([-1.0, -2.0, -0.5])),
        ("scores", torch.tensor([0.5, -2.0, -1.5])),
        ("scores", torch.tensor([-1.0, float("-inf"), -1.5])),
        ("scores", torch.tensor([-1.0, -2.0, -1.5], dtype=torch.float64)),
    ],
)
def test_check_integrity_finds_damage(broken, values):
    GOOD.check_integrity()
    with pytest.raises(AssertionError):
        dataclasses.replace(GOOD, **{broken: values}).check_integrity()


@FIXED
@given(trees)
def test_best_path_is_the_chain_to_the_best_deepest_node(tree: Tree) -> None:
    chain = tree.best_path()
    chain.check_integrity()
    assert chain.levels.tolist() == list(range(1, tree.depth + 1))
    if len(tree):
        deepest = [i for i in range(len(tree)) if int(tree.levels[i]) == tree.depth]
        best = max(deepest, key=lambda i: float(tree.scores[i]))
        assert float(chain.scores[-1]) == float(tree.scores[best])
        tops = [[int(tree.tokens[j]) for j in path_of(tree, i)] for i in deepest]
        assert chain.tokens.tolist() in tops
