"""What else does a kernel's work. Each function prepares inputs and returns the call to time.

A dense context is one that was gathered before, outside the time: that flatters the rival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from subspec_kernels import grow_mask, kv_compact, lowbit_linear, sharpened_topk, tree_attention
from subspec_kernels.grow_mask import unpack_mask
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from gpu_bench.device import Call, Device

Inputs = Callable[[], Any]
reference_mask = grow_mask.reference.grow_mask
reference_moves = kv_compact.reference.kv_compact


def topk_inputs(
    size: tuple[int, int, int], noisy: bool, width: int, temperature: float, place: torch.device
) -> tuple[Any, ...]:
    """Arguments of ``sharpened_topk``."""
    logits = torch.randn(size, device=place).bfloat16()
    noise = torch.randn(size[0], 1, size[2], device=place).expand(size) if noisy else None
    return logits, torch.zeros(size[:2], device=place), width, temperature, noise


def torch_topk(
    logits: Tensor, parent_scores: Tensor, width: int, temperature: float, noise: None
) -> tuple[Tensor, Tensor]:
    """torch's own operations; they settle no ties."""
    scores = (logits.float() / temperature).log_softmax(-1) + parent_scores[..., None]
    best, index = scores.flatten(1).topk(width)
    return best, index


def compiled_topk(device: Device, inputs: Inputs) -> Call:
    """The reference by torch.compile."""
    given = inputs()
    call = device.compile(sharpened_topk.reference.sharpened_topk)
    return lambda: call(*given)


def compiled_linear(device: Device, inputs: Inputs) -> Call:
    """The reference by torch.compile."""
    given = inputs()
    call = device.compile(lowbit_linear.reference.lowbit_linear)
    return lambda: call(*given)


def compiled_attention(device: Device, inputs: Inputs) -> Call:
    """The reference by torch.compile."""
    given = inputs()
    call = device.compile(tree_attention.reference.tree_attention)
    return lambda: call(**given)


def sdpa(inputs: Inputs) -> Call:
    """torch's attention with a mask; grouped queries fold into rows, so that keys are read once."""
    query, key, value, mask = _dense(inputs())
    kv_heads, dim = key.shape[1], key.shape[3]
    group = query.shape[1] // kv_heads
    folded = query.view(1, kv_heads, group * query.shape[2], dim)
    mask = mask.repeat(1, 1, group, 1)
    return lambda: scaled_dot_product_attention(folded, key, value, attn_mask=mask)


def flex_attention(device: Device, inputs: Inputs) -> Call:
    """FlexAttention, compiled, with the tree as its mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value, mask = _dense(inputs())
    seen = mask[0, 0]

    def allowed(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return seen[row, column]

    rows, columns = seen.shape
    blocks = create_block_mask(allowed, 1, None, rows, columns, device=seen.device.type)
    call = device.compile(flex_attention)
    return lambda: call(query, key, value, block_mask=blocks, enable_gqa=True)


def dense_linear(size: tuple[int, int], rows: int, place: torch.device) -> Call:
    """A product by the bf16 weight."""
    x, weight = _dense_linear_inputs(size, rows, place)
    return lambda: linear(x, weight)


def torch_int4(size: tuple[int, int], rows: int, group: int, place: torch.device) -> Call:
    """torch's int4 product, with random codes."""
    out, inputs = size
    x = torch.randn(rows, inputs, device=place, dtype=torch.bfloat16)
    codes = torch.randint(0, 256, (out, inputs // 2), device=place, dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(inputs // group, out, 2, device=place, dtype=torch.bfloat16)
    product = torch.ops.aten._weight_int4pack_mm
    return lambda: product(x, packed, group, scales)


def gemlite(size: tuple[int, int], rows: int, group: int, place: torch.device) -> Call:
    """gemlite's 4-bit product, tuned by itself on its first call."""
    from gemlite import DType, GemLiteLinear  # type: ignore[import-not-found]

    out, inputs = size
    product = GemLiteLinear(
        4,
        group_size=group,
        in_features=inputs,
        out_features=out,
        input_dtype=DType.BF16,
        output_dtype=DType.BF16,
    )
    codes = torch.randint(0, 16, (out, inputs), device=place, dtype=torch.uint8)
    parts = torch.rand(2, out * inputs // group, 1, device=place, dtype=torch.bfloat16)
    product.pack(codes, parts[0], 16 * parts[1], None)
    x = torch.randn(rows, inputs, device=place, dtype=torch.bfloat16)
    return lambda: product(x)


def _dense_linear_inputs(
    size: tuple[int, int], rows: int, place: torch.device
) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, size[1], device=place, dtype=torch.bfloat16)
    return x, torch.randn(size, device=place, dtype=torch.bfloat16)


def _dense(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of one request: query [1, heads, m, dim], keys and values [1, kv_heads, s, dim], context
    first, and the mask, bool [1, 1, m, s]."""
    context = int(given["context_lens"][0])
    blocks = given["block_table"][0]

    def joined(cache: Tensor, own: Tensor) -> Tensor:
        held = cache[blocks].flatten(0, 1)[:context].transpose(0, 1)
        return torch.cat([held, own[0]], 1)[None].contiguous()

    tree = unpack_mask(given["mask"][0], given["node_keys"].shape[2])
    mask = torch.cat([tree.new_ones(len(tree), context), tree], 1)[None, None]
    query = given["query"].transpose(1, 2).contiguous()
    keys = joined(given["key_cache"], given["node_keys"])
    return query, keys, joined(given["value_cache"], given["node_values"]), mask
