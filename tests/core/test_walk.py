"""Walk against a dictionary walk, with garbage wherever the contract says it is ignored."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.tree import Tree
from vllm_subspec.verify.walk import walk, walk_trees

FIXED = settings(deadline=None, max_examples=100, derandomize=True)
Drafted = tuple[list[int], list[int], list[int]]  # tokens, parents, the draw at each row


def random_request(random: Random) -> Drafted:
    """A tree over 3 tokens in level order, and draws over 4 that follow it rather often."""
    tokens: list[int] = []
    parents: list[int] = []
    above = [-1]
    for _ in range(random.randint(0, 9)):
        pairs = [(parent, token) for parent in above for token in range(3)]
        chosen = sorted(random.sample(pairs, min(len(pairs), random.randint(1, 4))))
        above = list(range(len(tokens), len(tokens) + len(chosen)))
        parents += [parent for parent, _ in chosen]
        tokens += [token for _, token in chosen]
    drawn = []
    for row in range(len(tokens) + 1):
        held = [t for t, p in zip(tokens, parents, strict=True) if p == row - 1]
        follow = held and random.random() < 0.85
        drawn.append(random.choice(held) if follow else random.randint(0, 3))
    return tokens, parents, drawn


def reference(request: Drafted) -> tuple[list[int], list[int]]:
    """Rows visited and tokens committed, by following one child at a time."""
    tokens, parents, drawn = request
    child = {
        (parent + 1, token): node + 1
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
    }
    rows = [0]
    while (step := (rows[-1], drawn[rows[-1]])) in child:
        rows.append(child[step])
    return rows, [drawn[row] for row in rows]


def check(result, row: int, request: Drafted) -> None:
    rows, tokens = reference(request)
    width = result.rows.shape[1]
    assert result.lengths[row] == len(rows)
    assert result.rows[row].tolist() == rows + [-1] * (width - len(rows))
    assert result.tokens[row].tolist() == tokens + [-1] * (width - len(tokens))


def to_tree(request: Drafted) -> Tree:
    tokens, parents, _ = request
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    ints = [torch.tensor(values, dtype=torch.int64) for values in (tokens, parents, levels)]
    return Tree(*ints, -ints[2].float())


def test_walk_follows_the_draws_and_ends_with_the_bonus():
    tokens, parents = torch.tensor([[5, 6, 5, 6, 8]]), torch.tensor([[-1, -1, 1, 1, 3]])
    drawn = torch.tensor([[6, 0, 6, 0, 8, 9]])
    result = walk(tokens, parents, torch.tensor([5]), drawn)
    assert result.rows.tolist() == [[0, 2, 4, 5, -1, -1]]
    assert result.tokens.tolist() == [[6, 6, 8, 9, -1, -1]]
    assert result.lengths.tolist() == [4]


@FIXED
@given(st.integers(0, 10**6))
def test_padded_batch_equals_one_dictionary_walk_each(seed):
    random = Random(seed)
    requests = [random_request(random) for _ in range(random.randint(1, 5))]
    nodes = max(len(tokens) for tokens, _, _ in requests) + random.randint(0, 3)
    # What is padded with could be followed, points anywhere, and must not matter.
    tokens = torch.randint(0, 4, (len(requests), nodes), generator=torch.manual_seed(seed))
    parents = torch.randint(-1, max(nodes, 1), (len(requests), nodes))
    drawn = torch.randint(0, 4, (len(requests), nodes + 1))
    for row, (t, p, d) in enumerate(requests):
        tokens[row, : len(t)] = torch.tensor(t, dtype=torch.int64)
        parents[row, : len(p)] = torch.tensor(p, dtype=torch.int64)
        drawn[row, : len(d)] = torch.tensor(d)
    result = walk(tokens, parents, torch.tensor([len(t) for t, _, _ in requests]), drawn)
    for row, request in enumerate(requests):
        check(result, row, request)


@FIXED
@given(st.integers(0, 10**6))
def test_walk_trees_takes_ragged_requests(seed):
    random = Random(seed)
    requests = [random_request(random) for _ in range(4)]
    requests.insert(random.randint(0, 4), ([], [], [2]))
    trees = [to_tree(request) for request in requests]
    for tree in trees:
        tree.check_integrity()
    result = walk_trees(trees, torch.tensor([d for _, _, drawn in requests for d in drawn]))
    assert result.rows.shape[1] == max(len(tree) for tree in trees) + 1
    for row, request in enumerate(requests):
        check(result, row, request)


def test_requests_without_drafts_commit_their_one_draw():
    result = walk_trees([Tree.empty(), Tree.empty()], torch.tensor([4, 7]))
    assert result.tokens.tolist() == [[4], [7]]
    assert result.rows.tolist() == [[0], [0]]


def test_a_whole_chain_of_the_greatest_depth_is_walked():
    rows = torch.arange(256)
    chain = Tree(rows, rows - 1, rows + 1, -rows.float())
    result = walk_trees([chain], torch.arange(257))
    assert result.lengths.tolist() == [257]
    assert result.tokens[0].tolist() == list(range(257))


def test_a_long_match_below_a_mismatch_is_not_visited():
    rows = torch.arange(40)
    chain = Tree(rows, rows - 1, rows + 1, -rows.float())
    drawn = torch.arange(41)
    drawn[2] = 39
    assert walk_trees([chain], drawn).tokens[0, :4].tolist() == [0, 1, 39, -1]
