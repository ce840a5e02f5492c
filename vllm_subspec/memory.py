"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes

_PROCESS = ctypes.CDLL(None)  # symbols of the C library and of a preloaded allocator


def release_freed_memory() -> None:
    """Return what the allocator keeps of freed memory to the system.

    A layer's weights are freed one after another, but glibc and tcmalloc keep such pieces for
    later: the process would stay as large as the whole model. Elsewhere nothing happens.
    """
    if hasattr(_PROCESS, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        _PROCESS.MallocExtension_ReleaseFreeMemory()
    elif hasattr(_PROCESS, "malloc_trim"):  # glibc
        _PROCESS.malloc_trim(0)
