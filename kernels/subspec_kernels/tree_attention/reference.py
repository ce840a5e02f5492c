"""Plain torch tree attention: context in vLLM's blocks, nodes with a mask of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subspec_kernels.kv_cache import gather_context


def tree_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
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

    Args:
        query: [requests, m, heads, dim], any float dtype.
        cache: [blocks, kv_heads, block, 2 * dim], vLLM's paged cache of the layer, in the layout
            that ``subspec_kernels.kv_cache`` describes; read only.
        block_table: int32 [requests, blocks of the longest], each request's blocks in order.
        context_lens: int32 [requests], positions before the root, all in the cache.
        node_keys: [requests, kv_heads, s, dim], the nodes' own keys, root included.
        node_values: like ``node_keys``.
        mask: bool [requests, m, s], true where a query may look; each row has a true entry. A
            node that no query may see may hold anything.
        levels: int32 [requests, m], how far below the root each query is.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; 0 turns it off.
        window: positions a query may look back over, itself included; below 1: no limit. It
            limits the context here; the caller limits ``mask``.

    Returns:
        [requests, m, heads, dim] in the dtype of ``query``.
    """
    rows = [
        _attend(
            query[i],
            block_table[i].long(),
            int(context_lens[i]),
            node_keys[i],
            node_values[i],
            mask[i],
            levels[i],
            cache,
            scale,
            soft_cap,
            window,
        )
        for i in range(len(query))
    ]
    return torch.stack(rows)


def _attend(
    query: torch.Tensor,
    block_ids: torch.Tensor,
    num_context: int,
    node_keys: torch.Tensor,
    node_values: torch.Tensor,
    mask: torch.Tensor,
    levels: torch.Tensor,
    cache: torch.Tensor,
    scale: float,
    soft_cap: float,
    window: int,
) -> torch.Tensor:
    """One request of ``tree_attention``; grouped queries fold into the query axis."""
    m, heads, dim = query.shape
    kv_heads, num_nodes, _ = node_keys.shape
    shape = (kv_heads, num_context + num_nodes, dim)
    keys, values = query.new_empty(shape), query.new_empty(shape)
    gather_context(cache, block_ids, num_context, keys[:, :num_context], values[:, :num_context])
    seen = mask.any(0)[:, None]  # a zero weight times NaN is NaN
    keys[:, num_context:] = node_keys.masked_fill(~seen, 0)
    values[:, num_context:] = node_values.masked_fill(~seen, 0)
    positions = torch.arange(num_context)
    first = num_context + levels[:, None] - window if window > 0 else levels[:, None] * 0 - 1
    allowed = torch.cat([positions > first, mask], 1)
    group = heads // kv_heads
    folded = query.view(m, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    allowed = allowed.repeat(group, 1)
    if soft_cap:
        scores = folded.float() @ keys.float().transpose(-1, -2) * scale
        scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        out = (weights @ values.float()).to(query.dtype)
    else:
        out = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=allowed, scale=scale
        )[0]
    out = out.view(kv_heads, group, m, dim).permute(2, 0, 1, 3)
    return out.reshape(m, heads, dim)
