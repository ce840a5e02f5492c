# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Tree attention on CUDA: FlashAttention over paged context and masked nodes, split over contexts.

A call reads the queries, the masks and the tables; each tile of up to 64 folded queries of a key
head reads the context and the nodes that it sees once. It writes the output; with more than one
split also an fp32 workspace of [splits, requests, m, heads, dim + 1], which a second launch reads
back. A draft step is bound by memory: the bytes of the context's keys and values over the
bandwidth. Verification of hundreds of nodes turns to compute: 4 * m * heads * dim FLOPs a position.
"""

from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from subspec_kernels.grow_mask import pack_mask
from subspec_kernels.tree_attention.reference import check_arguments

_LOG2E = tl.constexpr(1.4426950408889634)
_ROWS = 64  # folded queries of a program at most,
_ROWS_OF_FP32 = 16  # where products are no tensor core's and more would spill registers
_TILE_BYTES = 16384  # of keys, and as much of values: two stages of both fit every GPU since sm_80
_MIN_SPLIT = 256  # context positions below which a split costs more than it saves
_MAX_DIM = 256
_MAX_SPLITS = 32  # what one program of the merge holds in registers


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    node_keys: torch.Tensor,
    node_values: torch.Tensor,
    mask: torch.Tensor,
    levels: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """``reference.tree_attention`` in one launch, or two where the context is split.

    The grid depends on shapes alone (the table's width bounds the contexts), so a CUDA graph
    serves any lengths, and the host never waits. A bool mask is packed first.

    Raises:
        ValueError: as the reference does, and for heads above 256.
    """
    check_arguments(
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        node_keys,
        node_values,
        mask,
        levels,
    )
    if mask.dtype == torch.bool:
        mask = pack_mask(mask)
    requests, m, heads, dim = query.shape
    if dim > _MAX_DIM:
        raise ValueError(
            f"head size {dim} is above {_MAX_DIM}, more than a program's registers hold; draft and "
            f"verify such a model on a CPU"
        )
    _, page, kv_heads, _ = key_cache.shape
    width = max(16, triton.next_power_of_2(dim))
    folded = m * (heads // kv_heads)
    most = _ROWS_OF_FP32 if query.dtype == torch.float32 else _ROWS
    rows = min(most, max(16, triton.next_power_of_2(folded)))
    tiles = triton.cdiv(folded, rows)
    programs = requests * tiles * kv_heads
    splits = _num_splits(programs, block_table.shape[1] * page, _processors(query.device))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts, sums = out, out
    if splits > 1:
        parts = out.new_empty((splits, *out.shape), dtype=torch.float32)
        sums = parts.new_empty(parts.shape[:-1])
    _attend_kernel[(requests * tiles, kv_heads, splits)](
        parts,
        sums,
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        node_keys,
        node_values,
        mask,
        levels,
        *query.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        *node_keys.stride(),
        *node_values.stride(),
        *mask.stride(),
        block_table.stride(0),
        requests,
        m,
        node_keys.shape[2],
        splits,
        float(scale),
        GROUP=heads // kv_heads,
        DIM=dim,
        PAGE=page,
        SOFT_CAP=float(soft_cap),
        WINDOW=max(window, 0),
        SPLIT=splits > 1,
        ROWS=rows,
        COLUMNS=min(64, _TILE_BYTES // (width * query.element_size())),
        WIDTH=width,
        num_warps=8 if rows * width >= 8192 else 4,  # a thread holds rows * width / threads sums
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(requests * m * heads,)](
            out, parts, sums, splits, SPLITS=triton.next_power_of_2(splits), DIM=dim, WIDTH=width
        )
    return out


def _num_splits(programs: int, longest: int, processors: int) -> int:
    """Parts of the context such that two programs a processor have work, if it is long enough."""
    wanted: int = min(triton.cdiv(2 * processors, programs), longest // _MIN_SPLIT, _MAX_SPLITS)
    return max(1, wanted)


@functools.cache
def _processors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit
def _absorb(best, total, out, query, keys, values, seen, scale, SOFT_CAP: tl.constexpr):
    """Online softmax: maxima (in log2), sums and outputs take one more tile of keys in."""
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if SOFT_CAP > 0:
        x = scores / SOFT_CAP
        e = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
        tanh = (1 - e) / (1 + e)
        scores = tl.where(x < 0, -tanh, tanh) * SOFT_CAP
    scores = tl.where(seen, scores * _LOG2E, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: no inf - inf
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(best - base)
    total = total * fade + tl.sum(weights, 1)
    out = tl.dot(weights.to(values.dtype), values, out * fade[:, None], input_precision="ieee")
    return higher, total, out


# What changes from step to step must not choose a new binary.
@triton.jit(
    do_not_specialize=[
        "mask_request",
        "mask_query",
        "mask_word",
        "table_request",
        "requests",
        "m",
        "num_nodes",
        "num_splits",
    ]
)
def _attend_kernel(
    out_ptr,  # [splits, requests, m, heads, DIM], contiguous
    sum_ptr,  # fp32 [splits, requests, m, heads], log2 of the sum of 2 ** score; if SPLIT
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    context_ptr,
    node_key_ptr,
    node_value_ptr,
    mask_ptr,
    level_ptr,
    query_request,
    query_node,
    query_head,
    query_dim,
    key_block,
    key_position,
    key_head,
    key_dim,
    value_block,
    value_position,
    value_head,
    value_dim,
    node_key_request,
    node_key_head,
    node_key_node,
    node_key_dim,
    node_value_request,
    node_value_head,
    node_value_node,
    node_value_dim,
    mask_request,
    mask_query,
    mask_word,
    table_request,
    requests,
    m,
    num_nodes,
    num_splits,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program: ROWS folded queries of one request and key head, one split of its context.

    Row r is head ``r % GROUP`` of the key head's group at query ``r // GROUP``. The last split
    takes the nodes along.
    """
    tl.static_assert(64 % COLUMNS == 0, "a tile of nodes must lie in one word of the mask")
    tiles = tl.cdiv(m * GROUP, ROWS)
    request = (tl.program_id(0) // tiles).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    row = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    is_row = row < m * GROUP
    node = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, WIDTH).to(tl.int64)
    is_dim = dim < DIM
    column = tl.arange(0, COLUMNS)

    # A query that sees no node, not even itself, is padding: it sees no context either.
    words_ptr = mask_ptr + request * mask_request + node * mask_query
    words = tl.zeros([ROWS], tl.int64)
    for index in range(0, tl.cdiv(num_nodes, 64)):
        words = words | tl.load(words_ptr + index * mask_word, mask=is_row, other=0)
    is_query = words != 0

    at_query = request * query_request + node * query_node + head * query_head
    query = tl.load(
        query_ptr + at_query[:, None] + dim[None, :] * query_dim,
        mask=is_query[:, None] & is_dim[None, :],
        other=0.0,
    )

    # Positions from low to length are seen by some query; vLLM may have freed those before.
    length = tl.load(context_ptr + request)
    length = tl.where(tl.max(is_query.to(tl.int32), 0) > 0, length, 0)
    low = 0
    if WINDOW > 0:
        level = tl.load(level_ptr + request * m + node, mask=is_query, other=0)
        reach = tl.where(is_query, length + level - WINDOW, length)  # a query looks behind it
        low = tl.minimum(tl.maximum(tl.min(reach, 0) + 1, 0), length)
    first = low // COLUMNS * COLUMNS
    share = tl.cdiv(tl.cdiv(length - first, num_splits), COLUMNS) * COLUMNS
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)

    key_ptr += kv_head * key_head
    value_ptr += kv_head * value_head
    table_ptr += request * table_request
    # Counted from 0: a bound that comes of a reduction makes the compiler load by single elements.
    for tile in range(0, tl.cdiv(end - begin, COLUMNS)):
        position = tl.multiple_of(begin + tile * COLUMNS, COLUMNS) + column
        is_held = (position >= low) & (position < end)
        block = tl.load(table_ptr + position // PAGE, mask=is_held, other=0).to(tl.int64)
        offset = (position % PAGE).to(tl.int64)
        at_key = block * key_block + offset * key_position
        keys = tl.load(
            key_ptr + at_key[None, :] + dim[:, None] * key_dim,
            mask=is_held[None, :] & is_dim[:, None],
            other=0.0,
        )
        at_value = block * value_block + offset * value_position
        values = tl.load(
            value_ptr + at_value[:, None] + dim[None, :] * value_dim,
            mask=is_held[:, None] & is_dim[None, :],
            other=0.0,
        )
        seen = is_held[None, :] & is_query[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > reach[:, None])
        best, total, out = _absorb(best, total, out, query, keys, values, seen, scale, SOFT_CAP)

    node_key_ptr += request * node_key_request + kv_head * node_key_head
    node_value_ptr += request * node_value_request + kv_head * node_value_head
    last_node = tl.where(split == num_splits - 1, num_nodes, 0)
    for start in range(0, last_node, COLUMNS):
        other = start + column
        word = tl.load(words_ptr + (start // 64) * mask_word, mask=is_query, other=0)
        bits = (word[:, None] >> (other % 64).to(tl.int64)[None, :]) & 1
        seen = (bits != 0) & (other < num_nodes)[None, :]
        # What nobody sees is not read: it may be NaN, and zero times NaN is NaN.
        is_held = tl.max(seen.to(tl.int32), 0) > 0
        at_node = other.to(tl.int64)
        keys = tl.load(
            node_key_ptr + at_node[None, :] * node_key_node + dim[:, None] * node_key_dim,
            mask=is_held[None, :] & is_dim[:, None],
            other=0.0,
        )
        values = tl.load(
            node_value_ptr + at_node[:, None] * node_value_node + dim[None, :] * node_value_dim,
            mask=is_held[:, None] & is_dim[None, :],
            other=0.0,
        )
        best, total, out = _absorb(best, total, out, query, keys, values, seen, scale, SOFT_CAP)

    is_stored = is_row
    divisor = tl.where(total == 0, 1.0, total)  # of a query that saw nothing here
    heads = tl.num_programs(1).to(tl.int64) * GROUP
    at = ((split * requests + request) * m + node) * heads + head
    if SPLIT:
        is_stored = is_row & (total != 0)  # of an empty split the merge reads the sum alone
        sums = tl.where(total == 0, float("-inf"), best + tl.log2(divisor))
        tl.store(sum_ptr + at, sums, mask=is_row)
    tl.store(
        out_ptr + at[:, None] * DIM + dim[None, :],
        (out / divisor[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_stored[:, None] & is_dim[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    out_ptr,  # [requests, m, heads, DIM], contiguous
    part_ptr,  # fp32 [splits, requests, m, heads, DIM]
    sum_ptr,  # fp32 [splits, requests, m, heads]
    num_splits,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program: one query and head, the mean of its splits weighed by their sums."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < DIM
    at = split.to(tl.int64) * tl.num_programs(0) + row
    sums = tl.load(sum_ptr + at, mask=split < num_splits, other=float("-inf"))
    is_held = sums != float("-inf")
    best = tl.max(sums, 0)
    weights = tl.exp2(sums - tl.where(best == float("-inf"), 0.0, best))
    parts = tl.load(
        part_ptr + at[:, None] * DIM + dim[None, :],
        mask=is_held[:, None] & is_dim[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)
