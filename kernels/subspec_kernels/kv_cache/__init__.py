"""Reading rows of vLLM's paged KV cache on a CPU; ``kv_compact`` moves them."""

from subspec_kernels.kv_cache.reference import cache_halves, gather_slots, paged_views

__all__ = ["cache_halves", "gather_slots", "paged_views"]
