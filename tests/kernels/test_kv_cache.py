"""Reading and moving cache rows, against vLLM's own writer and against a plain dictionary."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.kv_cache import cache_halves, gather_slots, paged_views
from subspec_kernels.kv_compact import CacheViews, kv_compact

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def empty_cache(
    blocks: int, kv_heads: int, block: int, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.full((blocks, kv_heads, block, 2 * dim), float("nan"), dtype=dtype)


def rows(count: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, kv_heads, dim, generator=generator).to(dtype)


def write(cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[int]) -> None:
    """Element by element, by the documented layout of a block's memory."""
    _, kv_heads, block, two_dim = cache.shape
    dim = two_dim // 2
    memory = cache.view(cache.shape[0], kv_heads, -1)
    for row, slot in enumerate(slots):
        where, offset = divmod(slot, block)
        for head in range(kv_heads):
            for d in range(dim):
                memory[where, head, d * block + offset] = keys[row, head, d]
                memory[where, head, block * dim + offset * dim + d] = values[row, head, d]


def move_slots(cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """As the engine moves rows: keys and values are strided alike in no two ways."""
    for view in paged_views(cache):
        kv_compact(CacheViews([view]), source[None], target[None])


def untouched(cache: torch.Tensor, slots: list[int]) -> bool:
    """Whether all slots but these still hold NaN, keys and values."""
    keys, values = cache_halves(cache)
    block = cache.shape[2]
    rest = [s for s in range(cache.shape[0] * block) if s not in set(slots)]
    return all(
        bool(keys[s // block, :, :, s % block].isnan().all())
        and bool(values[s // block, :, s % block].isnan().all())
        for s in rest
    )


class Case(NamedTuple):
    """An empty cache's shape and the seed of what is written into it."""

    blocks: int
    kv_heads: int
    block: int
    dim: int
    dtype: torch.dtype
    seed: int

    def cache(self) -> torch.Tensor:
        return empty_cache(self.blocks, self.kv_heads, self.block, self.dim, self.dtype)

    def rows(self, count: int) -> torch.Tensor:
        return rows(count, self.kv_heads, self.dim, self.dtype, self.seed)


cases = st.builds(
    Case,
    blocks=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    block=st.sampled_from([1, 4, 7, 16]),
    dim=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)


@settings(deadline=None, max_examples=40)
@given(cases, st.data())
def test_gather_slots(case: Case, data: st.DataObject) -> None:
    cache, total = case.cache(), case.blocks * case.block
    slots = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=8))
    keys, values = case.rows(len(slots))
    write(cache, keys, values, slots)
    found = gather_slots(cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


@settings(deadline=None, max_examples=40)
@given(cases)
def test_paged_views(case: Case) -> None:
    """The same memory as the halves, of a cache that starts and ends within its storage."""
    cache = torch.randn(case.blocks + 2, case.kv_heads, case.block, 2 * case.dim)[1:-1]
    for view, half in zip(paged_views(cache), cache_halves(cache), strict=True):
        assert view.shape == (case.blocks, case.block, case.kv_heads, case.dim)
        assert view.data_ptr() == half.data_ptr()
    keys, values = paged_views(cache)
    assert torch.equal(keys, cache_halves(cache)[0].permute(0, 3, 1, 2))
    assert torch.equal(values, cache_halves(cache)[1].transpose(1, 2))


@settings(deadline=None, max_examples=60)
@given(cases, st.data())
def test_move_slots(case: Case, data: st.DataObject) -> None:
    """Sources and targets may overlap in any way, also across requests in one call."""
    cache, total = case.cache(), case.blocks * case.block
    written = data.draw(st.lists(st.integers(0, total - 1), unique=True, min_size=1))
    sources = data.draw(st.lists(st.sampled_from(written), max_size=total))
    targets = data.draw(st.permutations(range(total)))[: len(sources)]
    keys, values = case.rows(len(written))
    write(cache, keys, values, written)
    expected = {slot: (keys[i], values[i]) for i, slot in enumerate(written)}
    expected |= {t: expected[s] for s, t in zip(sources, targets, strict=True)}
    move_slots(
        cache,
        torch.tensor(sources, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
    )
    for slot, (key, value) in expected.items():
        found_key, found_value = gather_slots(cache, torch.tensor([slot]))
        assert torch.equal(found_key[0], key)
        assert torch.equal(found_value[0], value)
    assert untouched(cache, list(expected))


@pytest.mark.parametrize("shift", [-1, 1], ids=["towards the root", "away from it"])
def test_a_run_moves_onto_itself(shift: int) -> None:
    cache = empty_cache(4, 2, 4, 8, torch.float32)
    slots = list(range(3, 11))
    keys, values = rows(len(slots), 2, 8, torch.float32, 0)
    write(cache, keys, values, slots)
    source = torch.tensor(slots)
    move_slots(cache, source, source + shift)
    found = gather_slots(cache, source + shift)
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)


def test_only_contiguous_blocks_are_taken() -> None:
    """A cache whose blocks are strided inside is another layout: silence would corrupt it."""
    cache = torch.zeros(2, 4, 3, 16).transpose(1, 2)
    with pytest.raises(RuntimeError, match="view"):
        cache_halves(cache)
    with pytest.raises(ValueError, match="no dense blocks of 4 x 16"):
        paged_views(cache)


VLLM_LAYOUTS = [
    ("vec", 32, 64),
    ("vec", 128, 64),
    ("vec", 32, 96),
    ("vec", 64, 128),
    ("vec", 32, 256),
    ("vec16", 16, 80),
    ("vec16", 48, 64),
    ("vec16", 16, 112),
]


@pytest.mark.engine
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("isa", "block", "dim"), VLLM_LAYOUTS)
def test_the_layout_is_vllms(isa: str, block: int, dim: int, dtype: torch.dtype) -> None:
    """vLLM's own writer fills the cache; every reader and mover of ours must agree with it."""
    import vllm._C  # noqa: F401  (registers the operators)
    from vllm import _custom_ops as ops

    blocks, kv_heads, length = 5, 3, 2 * block + 5
    generator = torch.Generator().manual_seed(dim)
    cache = empty_cache(blocks, kv_heads, block, dim, dtype)
    key_half, value_half = cache.view(blocks, kv_heads, 2 * block, dim).chunk(2, dim=2)
    keys, values = rows(length, kv_heads, dim, dtype, seed=block)
    ids = torch.randperm(blocks, generator=generator)
    positions = torch.arange(length)
    slots = ids[positions // block] * block + positions % block
    ops.cpu_attn_reshape_and_cache(keys, values, key_half, value_half, slots, isa)

    found_keys, found_values = gather_slots(cache, slots)
    assert torch.equal(found_keys, keys)
    assert torch.equal(found_values, values)
    assert untouched(cache, slots.tolist())

    for view, written in zip(paged_views(cache), (keys, values), strict=True):
        assert torch.equal(view[ids[positions // block], positions % block], written)

    moved = torch.randperm(length, generator=generator)[: length // 2]
    move_slots(cache, slots[moved], slots[: len(moved)])
    expected = empty_cache(blocks, kv_heads, block, dim, dtype)
    halves = expected.view(blocks, kv_heads, 2 * block, dim).chunk(2, dim=2)
    keys, values = keys.clone(), values.clone()
    keys[: len(moved)], values[: len(moved)] = keys[moved], values[moved]
    ops.cpu_attn_reshape_and_cache(keys, values, halves[0], halves[1], slots, isa)
    assert torch.equal(cache.nan_to_num(7), expected.nan_to_num(7))
