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


LARGE = """
import ctypes, sys
from vllm_subspec.memory import LARGE_BYTES, map_large_blocks

class Mallinfo2(ctypes.Structure):  # of glibc's malloc.h
    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.mallinfo2.restype = Mallinfo2

def num_mapped():
    return libc.mallinfo2().field3

if sys.argv[1] == "mapped":
    map_large_blocks()
libc.free(libc.malloc(30 << 20))  # glibc takes that for a sign that such blocks come and go
before = num_mapped()
libc.malloc(LARGE_BYTES)
print(num_mapped() - before)
"""


def test_large_blocks_stay_out_of_the_heap() -> None:
    mapped = []
    for how in ("as it is", "mapped"):
        command = [sys.executable, "-c", LARGE, how]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        mapped.append(int(run.stdout))
    assert mapped == [0, 1]
