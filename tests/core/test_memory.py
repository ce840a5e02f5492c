"""Freed memory goes back to the system."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes
from vllm_subspec.memory import release_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident_pages():
    return int(open("/proc/self/statm").read().split()[1])

pieces = [libc.malloc(100_000) for _ in range(1000)]  # small enough to come from the heap
for piece in pieces:
    ctypes.memset(piece, 1, 100_000)
for piece in pieces[:-1]:  # the last one keeps the heap's top, so free() alone returns nothing
    libc.free(piece)
before = resident_pages()
release_freed_memory()
print(before - resident_pages())
"""


def test_release_freed_memory_shrinks_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 20_000  # of 24,000 pages that were freed
