"""Plain torch tree attention: context in vLLM's blocks, nodes with a mask of their own.

Per call and request it reads the queries, the context's keys and values once, the nodes' once and
the mask; it writes the output. The context goes through a workspace of ``CHUNK`` positions in
fp32 and an online softmax, so no copy of it grows with its length. Its bound is memory: the
context's bytes over the bandwidth, for as few queries as a draft step has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from subspec_kernels.grow_mask import unpack_mask

CHUNK = 512
"""Context positions that are held at once, or one block where blocks are longer."""


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
    """Attend from ``m`` nodes of each request to its context and to their ancestors.

    Used for draft steps (few queries, nodes in the draft's scratch) and for verification (all
    nodes of a tree); the paper shares the context's keys and values between both (section 3.3).
    Strides are free but where one is named. Scores, softmax and sums are fp32.

    Args:
        query: [requests, m, heads, dim], bf16, fp16 or fp32, like every other float tensor here.
        key_cache: [blocks, block, kv_heads, dim], a view of the layer's paged keys; read only.
            On CUDA the halves of vLLM's cache are such views, on a CPU
            ``kv_cache.paged_views`` makes them.
        value_cache: like ``key_cache``.
        block_table: int32 [requests, blocks of the longest], each request's blocks in order;
            each row dense.
        context_lens: int32 [requests], positions before the root, all in the cache; contiguous.
        node_keys: [requests, kv_heads, s, dim], the nodes' own keys, root included.
        node_values: like ``node_keys``.
        mask: bool [requests, m, s], true where a query may look, at itself too; or the same
            packed, int64 [requests, m, ceil(s / 64)] as ``grow_mask`` defines it. A query whose
            row is empty is padding. A node that no query may see may hold anything.
        levels: int32 [requests, m], how far below the root each query is; contiguous.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; 0 turns it off.
        window: positions a query may look back over, itself included; below 1: no limit. It
            limits the context here; the caller limits ``mask``.

    Returns:
        [requests, m, heads, dim] in the dtype of ``query``, contiguous; zeros where a query is
        padding.

    Raises:
        ValueError: shapes, dtypes or strides do not fit. What tables hold is not checked.
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
    if mask.dtype == torch.int64:
        mask = unpack_mask(mask, node_keys.shape[2])
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for i, num_context in enumerate(context_lens.tolist()):
        rows = mask[i].any(1)
        if not bool(rows.any()):
            continue
        reach = num_context + levels[i][rows] - window if window > 0 else None
        context = _context(key_cache, value_cache, block_table[i], num_context, reach)
        chunks = chain(context, [_nodes(node_keys[i], node_values[i], mask[i][rows])])
        attended = _attend(query[i][rows], node_keys.shape[1], chunks, scale, soft_cap)
        out[i, rows] = attended.to(query.dtype)
    return out


Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""fp32 keys [kv_heads, dim, n] and values [kv_heads, n, dim], and what is seen: bool [m, n]."""


def _context(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_ids: torch.Tensor,
    num_context: int,
    reach: torch.Tensor | None,
) -> Iterator[Chunk]:
    """The context in order; each query sees what lies behind its ``reach``, if there is one.

    Positions behind every reach are not read: vLLM may have freed their blocks.
    """
    block = key_cache.shape[1]
    keys_by_block, values_by_block = key_cache.permute(0, 2, 3, 1), value_cache.transpose(1, 2)
    begin = 0 if reach is None else max(0, int(reach.min()) + 1)
    while begin < num_context:
        first = begin // block
        last = min(first + max(1, CHUNK // block), -(-num_context // block))
        end = min(last * block, num_context)
        ids = block_ids[first:last]
        part = slice(begin - first * block, end - first * block)
        keys = _joined(keys_by_block.index_select(0, ids).permute(1, 2, 0, 3), 2)
        values = _joined(values_by_block.index_select(0, ids).transpose(0, 1), 1)
        seen = None
        if reach is not None:
            seen = torch.arange(begin, end, device=reach.device) > reach[:, None]
        yield keys[..., part], values[:, part], seen
        begin = end


def _joined(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """fp32, with the axis of blocks and that of a block's positions made one."""
    return blocks.to(torch.float32, memory_format=torch.contiguous_format).flatten(dim, dim + 1)


def _nodes(keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> Chunk:
    unseen = ~mask.any(0)[:, None]  # a zero weight times NaN is NaN
    keys, values = keys.float().masked_fill(unseen, 0), values.float().masked_fill(unseen, 0)
    return keys.transpose(1, 2), values, mask


def _attend(
    query: torch.Tensor, kv_heads: int, chunks: Iterable[Chunk], scale: float, soft_cap: float
) -> torch.Tensor:
    """One request, by online softmax: fp32 [m, heads, dim]. Grouped queries fold into rows."""
    m, heads, dim = query.shape
    group = heads // kv_heads
    rows = query.float().reshape(m, kv_heads, group, dim).permute(1, 2, 0, 3).flatten(1, 2) * scale
    out = torch.zeros_like(rows)
    total = rows.new_zeros(kv_heads, group * m, 1)
    best = torch.full_like(total, -math.inf)
    for keys, values, seen in chunks:
        scores = rows @ keys
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if seen is not None:
            scores = scores.masked_fill(~seen.repeat(group, 1), -math.inf)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0)  # nothing seen so far: no inf - inf
        weights, fade = torch.exp(scores - base), torch.exp(best - base)
        total = total * fade + weights.sum(-1, keepdim=True)
        out = torch.baddbmm(out * fade, weights, values)
        best = higher
    return (out / total).view(kv_heads, group, m, dim).permute(2, 0, 1, 3).flatten(1, 2)


def check_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    node_keys: torch.Tensor,
    node_values: torch.Tensor,
    mask: torch.Tensor,
    levels: torch.Tensor,
) -> None:
    """Raise the ValueErrors of ``tree_attention``; no data is read."""
    for name, tensor, rank in (
        ("query", query, 4),
        ("key_cache", key_cache, 4),
        ("node_keys", node_keys, 4),
        ("block_table", block_table, 2),
    ):
        if tensor.dim() != rank:
            raise ValueError(f"{name} {_shape(tensor)} must have {rank} dimensions")
    requests, m, heads, dim = query.shape
    kv_heads, num_nodes = key_cache.shape[2], node_keys.shape[2]
    if requests == 0 or m == 0:
        raise ValueError(f"query {_shape(query)} holds no queries; leave the call out")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
    nodes = (requests, kv_heads, num_nodes, dim)
    packed = mask.dtype == torch.int64
    sizes = (
        ("key_cache", key_cache, (*key_cache.shape[:3], dim)),
        ("value_cache", value_cache, (*key_cache.shape[:3], dim)),
        ("block_table", block_table, (requests, block_table.shape[1])),
        ("context_lens", context_lens, (requests,)),
        ("node_keys", node_keys, nodes),
        ("node_values", node_values, nodes),
        ("mask", mask, (requests, m, -(-num_nodes // 64) if packed else num_nodes)),
        ("levels", levels, (requests, m)),
    )
    for name, tensor, size in sizes:
        if tensor.shape != size:
            raise ValueError(
                f"{name} {_shape(tensor)} must be {list(size)} for queries {_shape(query)}, "
                f"{kv_heads} key heads and {num_nodes} nodes"
            )
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"query is {query.dtype}; cast it to bfloat16, float16 or float32")
    masks = torch.int64 if packed else torch.bool  # either is right
    types = dict.fromkeys(("key_cache", "value_cache", "node_keys", "node_values"), query.dtype)
    types |= dict.fromkeys(("block_table", "context_lens", "levels"), torch.int32) | {"mask": masks}
    for name, tensor, _ in sizes:
        if tensor.dtype != types[name]:
            raise ValueError(f"{name} is {tensor.dtype}; cast it to {types[name]}")
    row = ("a row of block_table", block_table[0])
    for name, tensor in (row, ("context_lens", context_lens), ("levels", levels)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}; call .contiguous() where it is made"
            )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
