"""Compaction: accepted rows end in order, and nothing else in the cache changes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.verify.compaction import compaction_moves, move_rows

FIXED = settings(deadline=None, max_examples=100, derandomize=True)

paths = st.sets(st.integers(1, 40), max_size=12).map(lambda rows: [0, *sorted(rows)])


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows)) + 2
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


@FIXED
@given(st.lists(paths, min_size=1, max_size=4), st.integers(0, 10**6))
def test_accepted_rows_become_contiguous_and_the_rest_stays(visited, seed):
    """Each request's 41 slots lie scattered in one pool, as paged blocks do."""
    generator = torch.Generator().manual_seed(seed)
    pool = 41 * len(visited) + 20
    slots = torch.randperm(pool, generator=generator)[: 41 * len(visited)].view(-1, 41)
    cache = torch.randn(pool, 2, 3, generator=generator)
    before = cache.clone()
    moves = compaction_moves(padded(visited))
    move_rows(cache, slots[moves.requests, moves.src], slots[moves.requests, moves.dst])
    expected = before.clone()
    for request, rows in enumerate(visited):
        for place, row in enumerate(rows):
            expected[slots[request, place]] = before[slots[request, row]]
    assert torch.equal(cache, expected)


@FIXED
@given(st.lists(paths, min_size=1, max_size=4))
def test_moves_are_exactly_the_rows_out_of_place(visited):
    moves = compaction_moves(padded(visited))
    expected = [
        (request, row, place)
        for request, rows in enumerate(visited)
        for place, row in enumerate(rows)
        if row != place
    ]
    found = zip(moves.requests.tolist(), moves.src.tolist(), moves.dst.tolist(), strict=True)
    assert list(found) == expected
    assert {moves.requests.dtype, moves.src.dtype, moves.dst.dtype} == {torch.int64}


def test_a_chain_and_an_undrafted_request_need_no_move():
    moves = compaction_moves(torch.tensor([[0, 1, 2, -1], [0, -1, -1, -1]]))
    assert len(moves.requests) == len(moves.src) == len(moves.dst) == 0


def test_sources_that_are_destinations_too_are_read_first():
    for src, dst in (([2, 3, 4], [1, 2, 3]), ([1, 2, 3], [2, 3, 4]), ([1, 4], [4, 1])):
        cache = torch.arange(6)
        move_rows(cache, torch.tensor(src), torch.tensor(dst))
        expected = list(range(6))
        for source, place in zip(src, dst, strict=True):
            expected[place] = source
        assert cache.tolist() == expected


def test_move_rows_writes_through_a_view_of_a_layout_with_slots_inside():
    cache = torch.arange(2 * 5).view(2, 5)
    move_rows(cache.transpose(0, 1), torch.tensor([3]), torch.tensor([1]))
    assert cache.tolist() == [[0, 3, 2, 3, 4], [5, 8, 7, 8, 9]]
