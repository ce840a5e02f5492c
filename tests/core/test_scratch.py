"""The draft's scratch against lists of rows: what each node sees, and with which values."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.scratch import DraftScratch

Row = tuple[torch.Tensor, torch.Tensor]
LAYERS = ((2, 8), (1, 4), (3, 8))
NAN = float("nan")


class Naive:
    """One request: rows in order, each with its position relative to the root."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.positions = list(range(-context, 0))
        self.rows: list[list[Row]] = [[] for _ in LAYERS]

    def add_node(self, level: int) -> None:
        self.positions.append(level)

    def visible(self, ancestors: list[int], level: int, window: int) -> list[int]:
        """Indices of the rows that a node sees: the context and the given slots, in the window."""
        seen = [*range(self.context), *(self.context + slot for slot in ancestors)]
        return [i for i in seen if window < 1 or self.positions[i] > level - window]


def run_growth(
    scratch: DraftScratch,
    contexts: list[int],
    widths: list[int],
    windows: list[int],
    seed: int,
    num_slots: int | None = None,
) -> None:
    """Grow random trees, ``widths[i]`` nodes on level i, and compare all that can be seen."""
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)

    def random_rows(count: int, heads: int, dim: int) -> Row:
        keys, values = torch.randn(2, count, heads, dim, generator=generator)
        return keys, values

    scratch.begin(LAYERS, contexts, sum(widths) if num_slots is None else num_slots)
    requests = [Naive(context) for context in contexts]
    for layer, (heads, dim) in enumerate(LAYERS):
        for index, request in enumerate(requests):
            rows = random_rows(request.context, heads, dim)
            for view, given_rows in zip(scratch.context(layer, index), rows, strict=True):
                assert view.shape == (heads, request.context, dim)
                view.copy_(given_rows.transpose(0, 1))
            request.rows[layer] = list(zip(*rows, strict=True))

    paths: list[list[list[int]]] = [[] for _ in contexts]  # request, slot -> slots it sees
    for level, width in enumerate(widths):
        before = len(paths[0])
        nodes = torch.zeros(len(contexts), width, before + width, dtype=torch.bool)
        for index, request in enumerate(requests):
            for node in range(width):
                slot = before + node
                first = before - widths[level - 1]
                parent = choice.randrange(first, before) if level else None
                paths[index].append([slot] if parent is None else [*paths[index][parent], slot])
                nodes[index, node, paths[index][slot]] = True
                request.add_node(level)
        scratch.advance(level, nodes)
        for layer, (heads, dim) in enumerate(LAYERS):
            keys, values = random_rows(len(contexts) * width, heads, dim)
            all_keys, all_values = scratch.append(layer, keys, values)
            length = max(contexts) + before + width
            assert all_keys.shape == (len(contexts), heads, length, dim)
            assert bool(all_keys.isfinite().all()), "a hidden NaN would reach the output"
            assert bool(all_values.isfinite().all()), "a hidden NaN would reach the output"
            for index, request in enumerate(requests):
                mine = slice(index * width, (index + 1) * width)
                request.rows[layer] += list(zip(keys[mine], values[mine], strict=True))
                for window in windows:
                    mask = scratch.mask(window)
                    assert mask.shape == (len(contexts), width, length)
                    for node in range(width):
                        path = paths[index][before + node]
                        expected = [
                            request.rows[layer][i] for i in request.visible(path, level, window)
                        ]
                        seen = mask[index, node]
                        found = zip(
                            all_keys[index][:, seen].transpose(0, 1),
                            all_values[index][:, seen].transpose(0, 1),
                            strict=True,
                        )
                        for (key, value), (other_key, other_value) in zip(
                            found, expected, strict=True
                        ):
                            assert torch.equal(key, other_key)
                            assert torch.equal(value, other_value)


@pytest.fixture(autouse=True)
def _new_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # then torch fills what it allocates
    yield
    torch.use_deterministic_algorithms(False)


def new_scratch() -> DraftScratch:
    return DraftScratch(torch.float32, torch.device("cpu"))


@settings(deadline=None, max_examples=25)
@given(
    contexts=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    widths=st.lists(st.integers(1, 3), max_size=4),
    windows=st.lists(st.sampled_from([0, -1, 1, 2, 4, 100]), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
)
def test_any_growth(contexts: list[int], widths: list[int], windows: list[int], seed: int) -> None:
    run_growth(new_scratch(), contexts, [1, *widths], windows, seed)


@pytest.mark.parametrize("window", [0, 3], ids=["full", "sliding"])
@pytest.mark.parametrize("widths", [[1] * 7, [1, 4, 4, 4]], ids=["chain", "tree"])
def test_ragged_contexts(widths: list[int], window: int) -> None:
    run_growth(new_scratch(), [5, 0, 12], widths, [window], seed=1)


def test_a_root_alone() -> None:
    run_growth(new_scratch(), [0], [1], [0, 1], seed=2)


def test_one_buffer_serves_growths_of_any_size() -> None:
    """What a former growth left there is never seen, be it NaN."""
    scratch = new_scratch()
    for seed, (contexts, widths) in enumerate(
        (
            ([2, 3], [1, 2]),
            ([20, 0, 7], [1, 3, 3]),
            ([1], [1, 1]),
            ([0, 9], [1, 2, 2]),
            ([20, 0, 7], [1, 3, 3]),
        )
    ):
        run_growth(scratch, contexts, widths, [0, 2], seed)
        scratch._buffer.fill_(NAN)


def test_the_buffer_is_kept_while_it_is_large_enough() -> None:
    scratch = new_scratch()
    run_growth(scratch, [20, 7], [1, 3, 3], [0], seed=0)
    address, size = scratch._buffer.data_ptr(), scratch._buffer.numel()
    run_growth(scratch, [4, 2], [1, 2], [0], seed=1)
    assert (scratch._buffer.data_ptr(), scratch._buffer.numel()) == (address, size)


def test_more_room_than_nodes() -> None:
    scratch = new_scratch()
    run_growth(scratch, [4, 6], [1, 2], [0], seed=3, num_slots=40)


def test_layers_keep_their_own_rows() -> None:
    scratch = new_scratch()
    scratch.begin(LAYERS, [0], 2)
    scratch.advance(0, torch.ones(1, 1, 1, dtype=torch.bool))
    rows = []
    for layer, (heads, dim) in enumerate(LAYERS):
        row = torch.full((1, heads, dim), float(layer + 1))
        rows.append(scratch.append(layer, row, -row))
    for layer, (keys, values) in enumerate(rows):
        assert bool((keys == layer + 1).all())
        assert bool((values == -layer - 1).all())
