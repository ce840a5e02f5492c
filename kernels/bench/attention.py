"""What tree attention costs on this CPU: ``python kernels/bench/attention.py``.

One layer of an 8 B model (32 heads over 8 of keys, head size 128, bf16), one request: a draft step
of 4 queries and a verification of 64, by the native op and by plain torch. Reading the context's
keys and values once is the least that a step can do: "read once" is how long torch takes to sum up
as many bytes, and the columns in GB/s are those bytes over the time.

The last line of a step is what a longer context adds, from 2048 to 8192 positions: where the
context is read once and never copied, its GB/s are those of the lengths themselves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from subspec_kernels import native
from subspec_kernels.kv_cache import paged_views
from subspec_kernels.tree_attention import reference

from vllm_subspec import envs
from vllm_subspec.files import private_directory

HEADS, KV_HEADS, DIM, BLOCK, DTYPE = 32, 8, 128, 128, torch.bfloat16
STEPS = {"draft step": 4, "verification": 64}
CONTEXTS = (256, 2048, 8192)
SECONDS = 0.15  # that each figure is taken over, and 3 calls at least


def arguments(num_queries: int, num_context: int) -> tuple[torch.Tensor | float, ...]:
    """Those of the op; each query sees itself and the root."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    blocks = num_context // BLOCK
    table = torch.randperm(blocks, generator=generator).int()[None]
    nodes = normal(2, 1, KV_HEADS, num_queries, DIM)
    mask = torch.eye(num_queries, dtype=torch.bool)
    mask[:, 0] = True
    return (
        normal(1, num_queries, HEADS, DIM),
        *paged_views(normal(blocks, KV_HEADS, BLOCK, 2 * DIM)),
        table,
        torch.tensor([num_context], dtype=torch.int32),
        *nodes,
        mask[None],
        (torch.arange(num_queries) > 0).int()[None],
        DIM**-0.5,
        0.0,
        0,
    )


def size_of(num_context: int) -> int:
    """Bytes of a layer's keys and values."""
    return 2 * num_context * KV_HEADS * DIM * DTYPE.itemsize


def row(step: str, context: str, size: int, times: list[float]) -> str:
    """A line of the table."""
    cells = [step, context, f"{size / 1e6:.1f} MB"]
    for time_s in times:
        cells += [f"{time_s * 1e6:.0f} us", f"{size / time_s / 1e9:.1f}"]
    return f"| {' | '.join(cells)} |"


def seconds(call: Callable[[], object]) -> float:
    """The median call's, after one that warms up."""
    call()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    isa = native.load(private_directory(envs.cache_dir() / "kernels"))
    print(f"{torch.get_num_threads()} threads, {isa}\n")
    print("| step | context | bytes | read once | GB/s | native | GB/s | plain torch | GB/s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for step, num_queries in STEPS.items():
        figures = {}
        for num_context in CONTEXTS:
            call = arguments(num_queries, num_context)
            words = torch.zeros(size_of(num_context) // 8, dtype=torch.int64)
            figures[num_context] = [
                seconds(words.sum),
                seconds(partial(torch.ops.subspec.tree_attention, *call)),
                seconds(partial(reference.tree_attention, *call)),
            ]
            print(row(step, f"{num_context}", size_of(num_context), figures[num_context]))
        short, long = CONTEXTS[-2:]
        added = [a - b for a, b in zip(figures[long], figures[short], strict=True)]
        print(row(step, f"{short} to {long}", size_of(long) - size_of(short), added))


if __name__ == "__main__":
    main()
