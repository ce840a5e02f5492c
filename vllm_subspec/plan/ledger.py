"""What a placement keeps on the fast tier, item by item."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_subspec.plan.placement import MemoryItem
from vllm_subspec.plan.shapes import ModelShape, Unit

SHADOW_BITS = {4: 4.5, 6: 6.25, 8: 8.25}
"""Bits a shadow takes per weight, scales included: groups of 64, 4 bits with a zero point."""

EMBEDDING_CACHE_BYTES = 8 << 20
"""Pages of a memory-mapped embedding table that stay in RAM; the rows of common tokens."""

LOGIT_BYTES = 6
"""The head's results in BF16, and in FP32, in which they are compared."""


def shadow_bytes(unit: Unit, bits: int) -> int:
    """Bytes of the unit's shadow."""
    return -int(-unit.num_weights * SHADOW_BITS[bits] // 8)


def slot_bytes(shape: ModelShape, num_streamed: int) -> int:
    """Bytes of a slot: the largest streamed layer; a head comes in pieces that fit."""
    return max(unit.weight_bytes for unit in shape.layers[:num_streamed])


def embedding_bytes(shape: ModelShape, head_streamed: bool) -> int:
    """Bytes of the table: none beside a resident head that it is tied to, else its cache."""
    if shape.tied and not head_streamed:
        return 0
    return min(shape.embedding_bytes, EMBEDDING_CACHE_BYTES)


def scratch_bytes(shape: ModelShape, grown: int, verified: int, sequences: int) -> int:
    """Bytes of drafts: keys and values of their nodes, logits of those that are verified.

    Each node, and the root of each tree, has its own scratch slot.

    Args:
        shape: of the model.
        grown: nodes, of all sequences together.
        verified: nodes of each sequence.
        sequences: drafted for at once.
    """
    logits = sequences * (verified + 1) * shape.vocab_size * LOGIT_BYTES
    return (grown + sequences) * shape.kv_bytes_per_token + logits


def ledger(
    shape: ModelShape,
    bits: Sequence[int | None],
    num_streamed: int,
    head_bits: int | None,
    head_streamed: bool,
    num_slots: int,
    draft_bytes: int,
    kv_bytes: int,
) -> tuple[MemoryItem, ...]:
    """Every item of a placement whose first ``num_streamed`` layers are streamed."""
    shadows = sum(shadow_bytes(unit, b) for unit, b in zip(shape.layers, bits, strict=True) if b)
    if shape.head is not None and head_bits is not None:
        shadows += shadow_bytes(shape.head, head_bits)
    keeps_head = shape.head is not None and not head_streamed
    return (
        MemoryItem("embedding", embedding_bytes(shape, head_streamed)),
        MemoryItem("other", shape.other_bytes),
        MemoryItem("head", shape.head.weight_bytes if shape.head and keeps_head else 0),
        MemoryItem("resident layers", sum(u.weight_bytes for u in shape.layers[num_streamed:])),
        MemoryItem("shadows", shadows),
        MemoryItem("slots", num_slots * slot_bytes(shape, num_streamed)),
        MemoryItem("draft scratch", draft_bytes),
        MemoryItem("KV cache", kv_bytes),
    )
