"""Sizes, and random inputs of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import Any

import torch
from subspec_kernels import lowbit_linear
from subspec_kernels.grow_mask import pack_mask
from subspec_kernels.lowbit_linear import Bits

PAGE = 16  # positions of a block of vLLM's cache, as CUDA has it


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model with grouped-query attention and a gated MLP."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's linears, fused as vLLM fuses them."""
        attention = self.heads * self.head_dim
        return {
            "qkv": (attention + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attention),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def layer_bytes(self) -> int:
        """Of a layer's linears in bf16."""
        return sum(2 * out * inputs for out, inputs in self.linears.values())


QWEN_7B = ModelShape("Qwen2.5-7B", 3584, 18944, 28, 4, 128, 152064, 28)
TINY = ModelShape("tiny", 128, 192, 4, 2, 32, 509, 4)


def lowbit_weight(
    size: tuple[int, int], bits: Bits, group: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(packed, scales)`` of a random weight (out, in) with variance 1 / in; any byte is codes."""
    out, inputs = size
    width = lowbit_linear.code_bits(bits)
    packed = torch.randint(0, 256, (out, inputs * width // 8), device=device, dtype=torch.uint8)
    shape = lowbit_linear.scales_shape(out, inputs, bits, group)
    if bits == "mxfp4":
        exponent = 127 + round(log2(1 / (2.9 * sqrt(inputs))))  # its values deviate by 2.9
        spread = torch.randint(-1, 2, shape, device=device)
        return packed, (exponent + spread).to(torch.uint8)
    step = sqrt(12 / inputs) / 2**width
    scales = step * (0.5 + torch.rand(shape, device=device))
    if lowbit_linear.has_offset(bits):
        scales[:, :, 1] = scales[:, :, 0] * -(2**width - 1) / 2
    return packed, scales.half()


def group_of(bits: Bits) -> int:
    """The group size at which a format is used."""
    return lowbit_linear.MX_GROUP if bits == "mxfp4" else 64


def attention_inputs(
    shape: ModelShape,
    contexts: Sequence[int],
    queries: int,
    nodes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Arguments of ``tree_attention``: the last ``queries`` of ``nodes`` nodes of each request.

    The cache has FlashAttention's layout and its blocks lie in random order; masks are random,
    root and itself included, in packed words.
    """
    requests, kv_heads, dim = len(contexts), shape.kv_heads, shape.head_dim
    pages = -(-max(*contexts, 1) // PAGE)
    cache = torch.randn(2, requests * pages, PAGE, kv_heads, dim, device=device).to(dtype)
    table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    own = torch.randn(2, requests, kv_heads, nodes, dim, device=device).to(dtype)
    mask = (torch.rand(requests, nodes, nodes, device=device) < 0.1).tril()
    mask |= torch.eye(nodes, dtype=torch.bool, device=device)
    mask[:, :, 0] = True
    levels = torch.arange(nodes, device=device)[-queries:].int() // 6
    return {
        "query": torch.randn(requests, queries, shape.heads, dim, device=device).to(dtype),
        "key_cache": cache[0],
        "value_cache": cache[1],
        "block_table": table,
        "context_lens": torch.tensor(contexts, dtype=torch.int32, device=device),
        "node_keys": own[0],
        "node_values": own[1],
        "mask": pack_mask(mask[:, -queries:]),
        "levels": levels.repeat(requests, 1),
        "scale": dim**-0.5,
    }


def path_moves(
    rows: int, nodes: int, contexts: Sequence[int], pages: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, target) of ``kv_compact``: ``rows`` random nodes of each request come together.

    Request ``i`` has blocks ``i * pages`` to ``(i + 1) * pages - 1``.
    """
    starts = [i * pages * PAGE + context for i, context in enumerate(contexts)]
    first = torch.tensor(starts, device=device)[:, None]
    chosen = [torch.randperm(nodes, device=device)[:rows].sort().values for _ in contexts]
    return first + 1 + torch.stack(chosen), first + 1 + torch.arange(rows, device=device)
