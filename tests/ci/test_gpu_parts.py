"""Parts of `ci/gpu`: what is compared, timed, forced, and left to the sanitizer."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_subspec.draft.growth import Growth
from vllm_subspec.verify.walk import walk_trees


@pytest.mark.parametrize(
    ("out", "is_far"),
    [
        ([1.0, -torch.inf], False),
        ([1.0 + 1e-5, -torch.inf], False),
        ([1.1, -torch.inf], True),
        ([torch.nan, -torch.inf], True),
        ([1.0, 0.0], True),
        ([-torch.inf, -torch.inf], True),
    ],
)
def test_what_counts_as_far(script: Any, out: list[float], is_far: bool) -> None:
    right = torch.tensor([1.0, -torch.inf])
    assert bool(script.checks._far("x", torch.tensor(out), right, 1e-4)) == is_far


def test_forced_draws_commit_that_many_tokens(script: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def forward(tokens: torch.Tensor, level: int, words: torch.Tensor) -> torch.Tensor:
        return torch.randn(*tokens.shape, 50, generator=generator)

    growth = Growth(forward, torch.tensor([7]), width=3)
    for _ in range(5):
        growth.step()
    [tree] = growth.trees()
    for tau in range(1, 7):
        walk = walk_trees([tree], script.method.forced_draws(tree, tau))
        assert walk.lengths.tolist() == [tau]


def test_graphs_share_memory_and_are_timed_by_replay(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's own device, with torch's calls replaced."""
    log: list[Any] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def capture(graph: Graph, pool: object) -> Iterator[None]:
        log.append(pool)
        yield

    handles = iter(range(10))
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: next(handles),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    bench = SimpleNamespace(do_bench=lambda call, **options: call() or 2.0)
    monkeypatch.setitem(sys.modules, "triton.testing", bench)
    gpu = script.gpu()
    steps = [partial(log.append, step) for step in "ab"]
    for replay in gpu.capture(steps):
        replay()
    assert log == [0, "a", 0, "b", "replay", "replay"]
    log.clear()
    assert gpu.time_ms(steps[0]) == 2.0
    assert log == ["a", 1, "a", "replay"]
    log.clear()
    gpu.time_ms(steps[0], captured=False)
    assert log == ["a", "a"]


def test_what_is_due_after_the_limit_is_left_out(script: Any) -> None:
    def make() -> Callable[[], object]:
        raise AssertionError("it was begun")

    timed = script.timings.Timed("grow_mask", "a case", "ours", 1, 0, make)
    peaks = SimpleNamespace(bound_s=lambda nbytes, flops: ("memory", 1.0))
    tables, all_ran = script.timings.time_all(script.device, [timed], peaks, time.monotonic() - 1)
    assert tables["Times"] == []
    assert tables["Without a time"][0]["why"] == "left out: time"
    assert all_ran


def test_bytes_of_a_case_are_those_of_its_tensors(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every argument is read once; what is written is counted apart."""
    monkeypatch.setattr(script.timings, "_bind", lambda operation, inputs: inputs())
    kernels = script.timings.Kernels(script.device, script.checks.Operations(), script.inputs.TINY)
    seen = 0
    for timed in kernels.all():
        if timed.by != "ours" or timed.kernel != "lowbit_linear":
            continue
        x, packed, scales, *_ = timed.make()
        read = sum(t.numel() * t.element_size() for t in (x, packed, scales))
        assert timed.nbytes == read + 2 * len(x) * len(packed), timed.case
        seen += 1
    assert seen == 4 * 5 + 3 * 5


def sanitizer(folder: Path, script: str) -> None:
    binary = folder / "compute-sanitizer"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("echo ok", "clean"),
        ("exit 86", "errors"),
        ("exit 1", "failed (1)"),
        ("sleep 60", "out of time"),
    ],
    ids=lambda value: value.replace(" ", "-"),
)
def test_what_the_sanitizer_says(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, state: str
) -> None:
    sanitizer(tmp_path, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpu = SimpleNamespace(is_dry=False)
    left = 4 * (0.5 if state == "out of time" else 60)
    assert [row["state"] for row in script.sanitizer.sanitize(gpu, left)] == [state, state]
