"""Memory that is not in use goes back to the system."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import torch

from vllm_subspec.memory import unmap_pages

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


def resident() -> int:
    """KiB of the file "table" that this process has mapped in."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith("/table"):
            return next(int(rest.split()[1]) for rest in lines if rest.startswith("Rss:"))
    raise AssertionError("not mapped")


def test_pages_of_a_mapping_are_given_up_and_read_again(tmp_path: Path) -> None:
    expected = torch.arange(1 << 20, dtype=torch.int32)
    (tmp_path / "table").write_bytes(expected.numpy().tobytes())
    with (tmp_path / "table").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    table = torch.frombuffer(mapping, dtype=torch.int32)[100:]
    assert torch.equal(table, expected[100:])
    assert resident() == 4096
    unmap_pages(table)
    assert resident() == 0
    assert torch.equal(table[7000:], expected[7100:])


def test_large_blocks_stay_out_of_the_heap() -> None:
    mapped = []
    for how in ("as it is", "mapped"):
        command = [sys.executable, "-c", LARGE, how]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        mapped.append(int(run.stdout))
    assert mapped == [0, 1]
