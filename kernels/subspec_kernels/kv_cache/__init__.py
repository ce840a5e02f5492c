"""Reading and moving rows of vLLM's paged KV cache."""

from subspec_kernels.kv_cache.reference import (
    cache_halves,
    gather_context,
    gather_slots,
    move_slots,
)

__all__ = ["cache_halves", "gather_context", "gather_slots", "move_slots"]
