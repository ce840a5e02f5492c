"""What stays resident without being in use, and how it is given back to the system."""

from __future__ import annotations

import ctypes
import mmap

import torch

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
LARGE_BYTES = 4 << 20
"""A row of logits for a whole tree is larger, an activation of one layer is not."""

# Symbols of the C library and of a preloaded allocator.
_PROCESS = ctypes.CDLL(None, use_errno=True)


def release_freed_memory() -> None:
    """Return what the allocator keeps of freed memory to the system.

    A layer's weights are freed one after another, but glibc and tcmalloc keep such pieces for
    later: the process would stay as large as the whole model. Elsewhere nothing happens.
    """
    if hasattr(_PROCESS, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        _PROCESS.MallocExtension_ReleaseFreeMemory()
    elif hasattr(_PROCESS, "malloc_trim"):  # glibc
        _PROCESS.malloc_trim(0)


def map_large_blocks() -> None:
    """Let the allocator map blocks of ``LARGE_BYTES`` and more on their own, for this process.

    glibc begins so, but each large block that is freed raises the bound, up to 32 MiB. Then logits
    lie in the heap between what stays, no freed piece fits the next, and the process grows for as
    long as batches differ. Elsewhere nothing happens.
    """
    if hasattr(_PROCESS, "mallopt"):
        _PROCESS.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def unmap_pages(tensor: torch.Tensor) -> None:
    """Take the pages of a file's mapping from this process; the next read maps them again.

    They stay in the page cache, as long as the system has room.

    Args:
        tensor: what `Spill.map` gave, never written to.

    Raises:
        OSError: its memory is no mapping.
    """
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = tensor.data_ptr() + tensor.nbytes - first
    if _PROCESS.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
