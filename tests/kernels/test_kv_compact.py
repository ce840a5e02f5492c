"""Moves of cache rows: against a dictionary of slots, in plain torch and in Triton, bit by bit."""

from __future__ import annotations

import re

import pytest
import torch
from subspec_kernels.kv_compact import CacheViews, kv_compact, reference

from vllm_subspec.verify.compaction import compaction_moves

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_triton(caches: CacheViews, source: torch.Tensor, target: torch.Tensor) -> None:
    from subspec_kernels.kv_compact import triton

    triton.kv_compact(caches, source, target)


both = pytest.mark.parametrize("move", [reference.kv_compact, by_triton], ids=["torch", "triton"])


def fill(cache: torch.Tensor, seed: int) -> torch.Tensor:
    """Random bits, in which NaNs are: a move must not touch even those."""
    generator = torch.Generator().manual_seed(seed)
    size = [*cache.shape[:-1], cache.shape[-1] * cache.element_size()]
    bits = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    return bits.view(cache.dtype).to(cache.device)


def make_layers(
    layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Keys and values of three layers, views [blocks, block, kv_heads, dim] of a layout."""
    blocks, block, heads, dim = shape
    sizes = {
        "FlashAttention": (2, blocks, block, heads, dim),
        "Triton": (blocks, 2, block, heads, dim),
        "heads outside": (2, blocks, heads, block, dim),
        "dim outside": (2, blocks, heads, dim, block),
    }
    views = []
    for seed in range(3):
        layer = torch.empty(sizes[layout], dtype=dtype, device=device)
        layer.copy_(fill(layer, seed))
        for half in layer.unbind(1 if layout == "Triton" else 0):
            if layout == "heads outside":
                half = half.transpose(1, 2)
            elif layout == "dim outside":
                half = half.permute(0, 3, 1, 2)
            views.append(half)
    return views


def check(move, views: list[torch.Tensor], source: torch.Tensor, target: torch.Tensor) -> None:
    """Every slot of every cache, moved or not, holds the bits that it must."""
    bits = BITS[views[0].element_size()]
    block = views[0].shape[1]
    expected = [view.clone().view(bits) for view in views]
    for view, cache in zip(views, expected, strict=True):
        for read, written in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
            if read >= 0:
                row = view[read // block, read % block].view(bits)
                cache[written // block, written % block] = row
    device = views[0].device
    move(CacheViews(views), source.to(device), target.to(device))
    for view, cache in zip(views, expected, strict=True):
        assert torch.equal(view.view(bits), cache)


def random_paths(requests: int, nodes: int, pool: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted rows of trees of ``nodes`` nodes, whose slots lie scattered; holes are no moves."""
    generator = torch.Generator().manual_seed(requests)
    slots = torch.randperm(pool, generator=generator)[: requests * (nodes + 1)]
    slots = slots.view(requests, nodes + 1)
    rows = torch.full_like(slots, -1)
    for request in range(requests):
        accepted = torch.rand(nodes + 1, generator=generator) < 0.6
        accepted[0] = True
        path = accepted.nonzero().flatten()
        rows[request, : len(path)] = path
    moves = compaction_moves(rows)
    source = torch.full_like(slots, -1)
    source[moves.requests, moves.dst] = slots[moves.requests, moves.src]
    return source, slots


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["FlashAttention", "Triton", "heads outside", "dim outside"])
def test_accepted_paths_come_together(
    move, layout: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Odd sizes: 3 x 20 elements of a row fill no whole slice, 7 slots no power of two."""
    views = make_layers(layout, (9, 7, 3, 20), dtype, device)
    source, target = random_paths(3, 12, 63)
    assert bool((source >= 0).any(1).all())
    check(move, views, source, target)


@both
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float64], ids=str)
def test_elements_of_any_size(move, dtype: torch.dtype, device: torch.device) -> None:
    views = make_layers("FlashAttention", (4, 4, 2, 8), dtype, device)
    check(move, views, *random_paths(1, 12, 16))


OVERLAPS = {
    "none": ([], []),
    "no move": ([-1, -1], [3, 3]),
    "towards the root": ([2, 3, 4, 5], [1, 2, 3, 4]),
    "away from it": ([1, 2, 3, 4], [2, 3, 4, 5]),
    "exchange": ([1, 9, -1], [9, 1, 1]),
    "one source, two targets": ([4, 4], [2, 4]),
}


@both
@pytest.mark.parametrize("name", OVERLAPS)
def test_overlaps_of_any_kind(move, name: str, device: torch.device) -> None:
    views = make_layers("Triton", (4, 3, 2, 8), torch.bfloat16, device)
    source, target = (torch.tensor([slots], dtype=torch.int64) for slots in OVERLAPS[name])
    check(move, views, source, target)


@both
def test_the_longest_path_and_no_request(move, device: torch.device) -> None:
    views = make_layers("FlashAttention", (40, 16, 1, 48), torch.bfloat16, device)
    source, target = random_paths(1, 600, 640)
    source, target = source[:, :257], target[:, :257]
    assert (source >= 0).sum() > 200
    check(move, views, source, target)
    check(move, views, source[:0], target[:0])


@both
def test_slots_beyond_32_bits(move, device: torch.device) -> None:
    """Two blocks in use, 3 GB apart, of memory that is never touched between them."""
    far = 1_500_000_000
    memory = torch.empty(2 * far + 64, dtype=torch.uint8, device=device)
    view = memory.as_strided((3, 2, 2, 8), (far, 16, 8, 1))
    view[0], view[2] = 1, torch.arange(32, device=device).view(2, 2, 8)
    source, target = torch.tensor([[5]], device=device), torch.tensor([[0]], device=device)
    move(CacheViews([view]), source, target)
    assert view[0].flatten().tolist() == [*range(16, 32)] + [1] * 16


@both
def test_strided_slots(move, device: torch.device) -> None:
    views = make_layers("FlashAttention", (4, 4, 2, 8), torch.bfloat16, device)
    slots = torch.tensor([[[3, 1], [5, 2]], [[9, 8], [-1, 7]]])
    check(move, views, slots[..., 0].T, slots[..., 1].T)


def test_caches_that_differ_are_refused() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    for other in (cache.bfloat16(), cache[:1], torch.zeros(2, 1, 4, 8).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"cache 1 is of .* give caches that differ"):
            CacheViews([cache, other])
    with pytest.raises(ValueError, match="caches are none: give at least one"):
        CacheViews([])
    with pytest.raises(ValueError, match=r"caches are \[2, 2, 4, 1, 8\]: .*each \[blocks"):
        CacheViews([torch.zeros(2, 2, 4, 1, 8)])


SLOTS = torch.zeros(2, 3, dtype=torch.int64)
WRONG = {
    "source slots are torch.int32": (SLOTS.int(), SLOTS),
    r"target slots are torch.int64 \[3\]": (SLOTS, SLOTS[0]),
    "target slots are .* on meta: .* on cpu": (SLOTS, SLOTS.to("meta")),
    r"\[2, 3\] source and \[2, 2\] target slots": (SLOTS, SLOTS[:, :2]),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_slots_are_refused_alike(message: str) -> None:
    caches = CacheViews([torch.zeros(2, 4, 1, 8)])
    for function in (kv_compact, by_triton):
        with pytest.raises(ValueError, match=message):
            function(caches, *WRONG[message])


def test_the_kernel_reads_all_rows_before_it_writes_one(compile_kernels) -> None:
    """The interpreter cannot show it: in machine code a barrier parts the loads from the stores."""
    strides = ("block", "slot", "head", "dim", "source_request", "source_move")
    strides += ("target_request", "target_move")
    kernels = [
        dict(
            kernel="subspec_kernels.kv_compact.triton:move_rows",
            signature=dict(pointers="*i64", source="*i64", target="*i64")
            | dict(moves="i32", block="i32", heads="i32", dim="i32")
            | {f"{name}_stride": "i64" if name == "block" else "i32" for name in strides},
            constexprs=dict(BITS=bits, ROWS=rows, COLUMNS=columns) | ones,
        )
        for bits, rows, columns, ones in [
            (8, 1, 64, dict(moves=1)),
            (16, 128, 64, dict(dim_stride=1, source_move_stride=1, target_move_stride=1)),
            (16, 512, 16, dict(dim_stride=1, heads=1)),
            (32, 512, 16, {}),
        ]
    ]
    for kernel in compile_kernels(kernels):
        order = re.findall(r"\b(ld\.global|st\.global|bar(?:rier)?\.sync)", kernel["ptx"])
        first_store = order.index("st.global")
        assert "ld.global" not in order[first_store:], order
        last_load = max(i for i, name in enumerate(order) if name == "ld.global")
        assert any(name.startswith("bar") for name in order[last_load:first_store]), order
