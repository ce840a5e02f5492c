"""Plain torch tree attention: dense keys, a boolean mask per query."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attend from ``m`` nodes of each request to its context and to their ancestors.

    Grouped queries fold into the query axis, so keys and values are read as they lie, never
    repeated per head (paper section 3.3 shares them between draft and target).

    Args:
        query: [requests, m, heads, dim], any float dtype.
        keys: [requests, kv_heads, s, dim], context and padding anywhere, the mask rules; what it
            hides must be finite, since a zero weight times NaN is NaN.
        values: like ``keys``.
        mask: bool [requests, m, s], true where a query may look; each row has a true entry.
        scale: factor on the scores.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; 0 turns it off.

    Returns:
        [requests, m, heads, dim] in the dtype of ``query``.
    """
    requests, m, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    folded = query.view(requests, m, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(requests, kv_heads, group * m, dim)
    allowed = mask[:, None, None].expand(requests, 1, group, m, -1)
    allowed = allowed.reshape(requests, 1, group * m, -1)
    if soft_cap:
        scores = torch.matmul(folded.float(), keys.float().transpose(-1, -2)) * scale
        scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(dim=-1)
        out = torch.matmul(weights, values.float()).to(query.dtype)
    else:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=allowed, scale=scale)
    out = out.view(requests, kv_heads, group, m, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(requests, m, heads, dim)
