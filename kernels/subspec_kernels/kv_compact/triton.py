# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Moves of rows within the paged KV cache, all caches and requests in one launch.

A call reads and writes each moved row once in every cache; it is bound by memory, at some hundred
kilobytes by the latency of a launch. Overlaps are safe: a program owns a slice of the columns of
one cache for one request, reads that slice of all rows that the request moves into registers,
waits for all its threads, and writes them only then. No two programs share an element.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from subspec_kernels.kv_compact.reference import CacheViews, check_arguments

_TILE = 8192  # elements a program holds: 64 a thread
_MOST_COLUMNS = 64
_FEWEST_COLUMNS = 16  # 32 bytes of bf16, a sector of memory


def kv_compact(caches: CacheViews, source: torch.Tensor, target: torch.Tensor) -> None:
    """See ``reference.kv_compact``; the arguments are on one device. No workspace.

    Meant for up to 512 moves a request (a path of 257 rows); more spill registers to memory.
    """
    check_arguments(caches, source, target)
    first = caches.caches[0]
    _, block, heads, dim = first.shape
    requests, moves = source.shape
    if not moves:
        return
    rows = triton.next_power_of_2(moves)
    columns = max(_FEWEST_COLUMNS, min(_MOST_COLUMNS, _TILE // rows))
    move_rows[(requests, len(caches.caches), triton.cdiv(heads * dim, columns))](
        caches.pointers,
        source,
        target,
        moves,
        block,
        heads,
        dim,
        *first.stride(),
        *source.stride(),
        *target.stride(),
        BITS=8 * first.element_size(),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


@triton.jit
def move_rows(
    pointers,
    source,
    target,
    moves,
    block,
    heads,
    dim,
    block_stride,
    slot_stride,
    head_stride,
    dim_stride,
    source_request_stride,
    source_move_stride,
    target_request_stride,
    target_move_stride,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One request's moves in ``COLUMNS`` elements of the rows of one cache."""
    request = tl.program_id(0).to(tl.int64)
    # Bits are moved as they are, so that one kernel serves every dtype of that size.
    address = tl.load(pointers + tl.program_id(1))
    if BITS == 8:
        cache = address.to(tl.pointer_type(tl.int8))
    elif BITS == 16:
        cache = address.to(tl.pointer_type(tl.int16))
    elif BITS == 32:
        cache = address.to(tl.pointer_type(tl.int32))
    else:
        cache = address.to(tl.pointer_type(tl.int64))
    move = tl.arange(0, ROWS)
    given = move < moves
    source += request * source_request_stride
    target += request * target_request_stride
    read = tl.load(source + move * source_move_stride, mask=given, other=-1)
    written = tl.load(target + move * target_move_stride, mask=given, other=-1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (read >= 0)[:, None] & (column < heads * dim)[None, :]
    across = (column // dim).to(tl.int64) * head_stride + (column % dim) * dim_stride
    read = (read // block) * block_stride + (read % block) * slot_stride
    written = (written // block) * block_stride + (written % block) * slot_stride
    rows = tl.load(cache + read[:, None] + across[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(cache + written[:, None] + across[None, :], rows, mask=mask)
