"""The draft's scratch against lists of rows: what each node sees, and with which values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.grow_mask import pack_mask, unpack_mask

from vllm_subspec.draft.graphs import StepShape
from vllm_subspec.draft.growth import Growth, Rerooting
from vllm_subspec.draft.scratch import DraftScratch, Tensors
from vllm_subspec.draft.static_scratch import StaticScratch

Row = tuple[torch.Tensor, torch.Tensor]  # key and value, each [kv_heads, dim]
LAYERS = ((2, 8), (1, 4), (3, 8))
NAN = float("nan")


@dataclass(eq=False)
class Node:
    """A node of one request: its level, its row in each layer, and all that it sees."""

    level: int
    rows: list[Row] = field(default_factory=list)
    sees: list[Node] = field(default_factory=list)  # from the root down to itself


class Twin:
    """A growth in the scratch, and the same in lists of nodes by slot, one list a request."""

    def __init__(self, scratch: DraftScratch, num_requests: int, num_slots: int, seed: int) -> None:
        self.scratch, self.generator = scratch, torch.Generator().manual_seed(seed)
        self.pick = random.Random(seed)
        self.slots: list[list[Node]] = [[] for _ in range(num_requests)]
        self.last: list[list[Node]] = [[] for _ in range(num_requests)]  # nodes of the last level
        self.level = 0
        scratch.begin(LAYERS, num_requests, num_slots)

    def grow(self, width: int, windows: list[int]) -> None:
        """One more level, below random parents; compare all that its nodes see."""
        for request, slots in enumerate(self.slots):
            nodes = [Node(self.level) for _ in range(width)]
            for node in nodes:
                above = self.pick.choice(self.last[request]).sees if self.level else []
                node.sees = [*above, node]
            slots += nodes
            self.last[request] = nodes
        seen = [[[s in n.sees for s in slots] for n in slots[-width:]] for slots in self.slots]
        self.scratch.advance(self.level, pack_mask(torch.tensor(seen)))
        assert self.scratch.levels.dtype == torch.int32
        assert self.scratch.levels.tolist() == [[self.level] * width for _ in self.slots]
        for layer, (heads, dim) in enumerate(LAYERS):
            given_rows = torch.randn(
                2, len(self.slots) * width, heads, dim, generator=self.generator
            )
            for row, node in enumerate(n for slots in self.slots for n in slots[-width:]):
                node.rows.append((given_rows[0, row], given_rows[1, row]))
            keys, values = self.scratch.append(layer, *given_rows)
            assert keys.shape == values.shape == (len(self.slots), heads, len(self.slots[0]), dim)
            for window in windows:
                self._compare(layer, keys, values, window)
        self.level += 1

    def _compare(self, layer: int, keys: torch.Tensor, values: torch.Tensor, window: int) -> None:
        mask = self.scratch.mask(window)
        assert mask.dtype == torch.bool
        assert mask.shape[::2] == keys.shape[::2]
        for request, slots in enumerate(self.slots):
            for node, seen in zip(slots[-mask.shape[1] :], mask[request], strict=True):
                near = [s for s in node.sees if window < 1 or s.level > node.level - window]
                expected = [slots.index(s) for s in near]
                assert seen.nonzero().flatten().tolist() == expected
                for slot, other in zip(expected, near, strict=True):
                    key, value = other.rows[layer]
                    assert torch.equal(keys[request, :, slot], key)
                    assert torch.equal(values[request, :, slot], value)

    def move_down(self, slot: int | None, levels: int, width: int) -> None:
        """Below the node in ``slot``, ``levels`` below the root; None: to a node without a row."""
        self.scratch.move_down(Rerooting(levels, slot), width)
        self.level -= levels
        (slots,) = self.slots
        root = [] if slot is None else [slots[slot]]
        slots = [*root, *(slots[1 + levels * width :] if root else [])]
        for node in slots:
            node.level -= levels
        for node in (*slots, *self.last[0]):  # other nodes of the last level may be dropped
            node.sees = [s for s in node.sees if s in slots]
        self.slots = [slots]


def run_growth(
    scratch: DraftScratch, num_requests: int, widths: list[int], windows: list[int], seed: int
) -> None:
    twin = Twin(scratch, num_requests, sum(widths), seed)
    for width in widths:
        twin.grow(width, windows)


@pytest.fixture(autouse=True)
def _new_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # then torch fills what it allocates
    yield
    torch.use_deterministic_algorithms(False)


def new_scratch(dtype: torch.dtype = torch.float32) -> DraftScratch:
    return DraftScratch(dtype, torch.device("cpu"))


class AsPlain(StaticScratch):
    """What a step that is replayed reads, cut and unpacked to what the plain scratch gives.

    Args:
        num_slots: reserved; a larger growth is a loose one.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(torch.float32, torch.device("cpu"))
        self.reserve(LAYERS, 1, num_slots, WINDOWS)

    def advance(self, level: int, words: torch.Tensor) -> Tensors:
        inputs = super().advance(level, words)
        self.take({name: given.clone() for name, given in inputs.items()})
        return inputs

    def append(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().append(layer, key, value)
        assert keys.shape[2] == values.shape[2] == self.shape.num_slots >= self._end
        return keys[:, :, : self._end], values[:, :, : self._end]

    def mask(self, window: int) -> torch.Tensor:
        words = super().mask(window)
        seen = unpack_mask(words, 64 * words.shape[2])
        assert not seen[..., self._end :].any(), "a slot that is not filled yet"
        return seen[..., : self._end]


WINDOWS = (0, -1, 1, 2, 4, 100)
all_windows = st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=3)


@settings(deadline=None, max_examples=40)
@given(
    num_requests=st.integers(1, 3),
    widths=st.lists(st.integers(1, 3), max_size=4),
    windows=all_windows,
    seed=st.integers(0, 2**16),
)
def test_any_growth(num_requests: int, widths: list[int], windows: list[int], seed: int) -> None:
    run_growth(new_scratch(), num_requests, [1, *widths], windows, seed)


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 4),
    work=st.lists(st.none() | st.none() | st.integers(0, 400), min_size=2, max_size=12),
    windows=all_windows,
    seed=st.integers(0, 2**16),
    reserved=st.sampled_from([None, 8, 64]),
)
def test_a_growth_that_moves_down(
    width: int, work: list[int | None], windows: list[int], seed: int, reserved: int | None
) -> None:
    """``None`` grows a level, a number picks the slot below which to go on."""
    scratch = new_scratch() if reserved is None else AsPlain(reserved)
    twin = Twin(scratch, 1, 1 + width * (1 + len(work)), seed)
    twin.grow(1, windows)
    for todo in work:
        slots = twin.slots[0]
        if todo is None or twin.level == 0:
            twin.grow(width if twin.level else 1, windows)
        elif len(slots) > 1:
            slot = 1 + todo % (len(slots) - 1)
            twin.move_down(slot, slots[slot].level, width)
        else:  # the root alone: what was grown from it has no rows yet
            twin.move_down(None, 1, width)
    twin.grow(width if twin.level else 1, windows)


def paths_of_last_level(growth: Growth) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    tree = growth.trees()[0]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {path for path in paths if len(path) == growth.depth} or {()}


@pytest.mark.parametrize("width", [1, 3])
def test_a_growth_tells_how_to_move(width: int) -> None:
    """Growth and scratch together: rows that hold tokens must spell each node's path."""
    scratch = new_scratch()
    scratch.begin([(1, 1)], 1, 1 + 8 * width)
    above = [8]  # the root and what was committed before it
    spelt: set[tuple[int, ...]] = set()

    def forward(tokens: torch.Tensor, level: int, words: torch.Tensor) -> torch.Tensor:
        scratch.advance(level, words)
        keys, values = scratch.append(0, tokens.view(-1, 1, 1), -tokens.view(-1, 1, 1))
        assert torch.equal(keys, -values)
        seen = [tuple(keys[0, 0, row, 0].int().tolist()) for row in scratch.mask(0)[0]]
        spelt.clear()
        spelt.update((*above[:-1], *path) for path in seen)
        return torch.randn(*tokens.shape, 9, generator=generator)

    generator = torch.Generator().manual_seed(0)
    growth = Growth(forward, torch.tensor(above), width)
    for steps, levels in ((6, 2), (2, 1), (2, 3), (0, 4), (3, 1)):  # the fourth to the frontier
        for _ in range(steps):
            expected = {(*above, *path) for path in paths_of_last_level(growth)}
            growth.step()
            assert expected <= spelt
        path = growth.trees()[0].best_path().tokens[:levels].tolist()
        rerooting = growth.follow(path)
        assert rerooting is not None
        assert (rerooting.slot is None) == (steps == 0)
        scratch.move_down(rerooting, width)
        above += path


def test_static_growths_lie_where_they_lay() -> None:
    """Whatever other growths ran in between; one that is too large has memory of its own."""
    scratch = StaticScratch(torch.float32, torch.device("cpu"))
    scratch.reserve(LAYERS, 2, 30)

    def places(num_requests: int, num_slots: int) -> list[tuple[int, tuple[int, ...]]]:
        scratch.begin(LAYERS, num_requests, num_slots)
        assert scratch.num_slots == num_slots
        return [(rows.data_ptr(), rows.stride()) for rows in (*scratch._keys, *scratch._values)]

    alone, both = places(1, 30), places(2, 10)
    for larger in ((3, 10), (1, 31)):
        apart = places(*larger)
        assert not scratch.is_static
        assert not {place for place, _ in apart} & {place for place, _ in [*alone, *both]}
        assert (places(1, 7), places(2, 30)) == (alone, both), "as captured"
        assert scratch.is_static


def test_static_levels_share_shapes() -> None:
    scratch = StaticScratch(torch.float32, torch.device("cpu"))
    scratch.reserve(LAYERS, 1, 1 + 3 * 40, [5])
    scratch.begin(LAYERS, 1, 1 + 3 * 20)
    shapes: dict[StepShape, set[Any]] = {}
    for level in range(21):
        seen = torch.ones(1, 3 if level else 1, 1 + 3 * level, dtype=torch.bool)
        inputs = scratch.advance(level, pack_mask(seen))
        kinds = frozenset((name, given.shape, given.dtype) for name, given in inputs.items())
        shapes.setdefault(scratch.shape, set()).add(kinds)
    assert [shape.num_slots for shape in shapes] == [1, 25, 49, 97]
    assert all(len(kinds) == 1 for kinds in shapes.values()), "a graph takes one kind"


def test_a_root_alone() -> None:
    run_growth(new_scratch(), 1, [1], [0, 1], seed=2)


def test_one_buffer_serves_growths_of_any_size() -> None:
    """What a former growth left there is never seen, be it NaN."""
    scratch = new_scratch()
    for seed, (num_requests, widths) in enumerate(
        ((2, [1, 2]), (3, [1, 3, 3]), (1, [1, 1]), (2, [1, 2, 2]), (3, [1, 3, 3]))
    ):
        run_growth(scratch, num_requests, widths, [0, 2], seed)
        scratch._buffer.fill_(NAN)


def test_the_buffer_is_kept_while_it_is_large_enough() -> None:
    scratch = new_scratch()
    run_growth(scratch, 2, [1, 3, 3], [0], seed=0)
    address, size = scratch._buffer.data_ptr(), scratch._buffer.numel()
    run_growth(scratch, 2, [1, 2], [0], seed=1)
    assert (scratch._buffer.data_ptr(), scratch._buffer.numel()) == (address, size)


def test_more_room_than_nodes() -> None:
    twin = Twin(new_scratch(), 2, 40, seed=3)
    for width in (1, 2):
        twin.grow(width, [0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_kept_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    scratch = new_scratch(dtype)
    scratch.begin(LAYERS, 1, 1)
    scratch.advance(0, torch.ones(1, 1, 1, dtype=torch.int64))
    key = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = scratch.append(0, key, -key)
    assert keys.dtype == values.dtype == dtype
    assert torch.equal(keys[0, :, 0], key[0])
    assert torch.equal(values[0, :, 0], -key[0])


def test_layers_keep_their_own_rows() -> None:
    scratch = new_scratch()
    scratch.begin(LAYERS, 1, 2)
    scratch.advance(0, torch.ones(1, 1, 1, dtype=torch.int64))
    rows = []
    for layer, (heads, dim) in enumerate(LAYERS):
        row = torch.full((1, heads, dim), float(layer + 1))
        rows.append(scratch.append(layer, row, -row))
    for layer, (keys, values) in enumerate(rows):
        assert bool((keys == layer + 1).all())
        assert bool((values == -layer - 1).all())
