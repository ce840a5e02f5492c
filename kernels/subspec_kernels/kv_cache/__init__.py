"""Reading and moving rows of vLLM's paged KV cache."""

from subspec_kernels.kv_cache.reference import (
    cache_halves,
    gather_slots,
    move_slots,
    paged_views,
)

__all__ = ["cache_halves", "gather_slots", "move_slots", "paged_views"]
