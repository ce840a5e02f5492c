"""Ask a server for everything at once, for a long time: is each answer right, and what is left?

Some clients ask for what a server meets, one request after another, streamed or not, and go away
from some of them at any moment. The server streams from disk in float32, with so little KV cache
that requests are preempted, and chunks prompts. Each answer, or the part of it that came, must be
the one that vLLM without SubSpec gave before, but for near-ties of float32 (`proofs/ties.py`).
Exit status 1: one was not, a request hung or failed, something was left at the end, the processes
grew, or nothing was preempted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from proofs.clients import Answer, references
from proofs.pool import Case, pool
from proofs.servers import serve
from proofs.ties import Verdict, audited
from proofs.traffic import Traffic, left_behind, metrics

from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.serving import Server, interrupt_on_termination

POOL = 150
DEADLINE_S = 900.0  # what hangs never comes; a slow machine is no hang
SAMPLE_S = 2.0
WARM_UP = 1 / 3  # of the time: allocators fill, live tuning settles
MOST_GROWTH = 0.02  # of resident memory, last third over first


@dataclass
class Watched:
    """Resident bytes of each process of a server, every ``SAMPLE_S``, by the process's name."""

    samples: dict[str, list[int]] = field(default_factory=dict)

    def growth(self) -> dict[str, float]:
        """Last third over first, without the warm-up."""
        grown = {}
        for name, all_samples in self.samples.items():
            judged = all_samples[int(len(all_samples) * WARM_UP) :]
            third = max(1, len(judged) // 3)
            grown[name] = median(judged[-third:]) / median(judged[:third]) - 1
        return grown


@contextmanager
def watching(server: Server) -> Iterator[Watched]:
    """Sample the memory of a server's processes while the block runs."""
    root = psutil.Process(server.process.pid)
    family = {"API server": root}
    for child in root.children(recursive=True):
        if child.name().startswith("VLLM::"):
            family[child.name().removeprefix("VLLM::")] = child
    watched, over = Watched({name: [] for name in family}), threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            for name, process in family.items():
                watched.samples[name].append(process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield watched
    finally:
        over.set()
        sampler.join()


async def loaded(traffic: Traffic, clients: int, seconds: float) -> None:
    """Run the traffic, and print a line a minute."""
    began = time.monotonic()

    async def report() -> None:
        while True:
            await asyncio.sleep(60)
            print(f"{(time.monotonic() - began) / 60:5.1f} min  {summary(traffic)}", flush=True)

    reporting = asyncio.create_task(report())
    await traffic.run(clients, lambda: time.monotonic() > began + seconds)
    reporting.cancel()


def summary(traffic: Traffic) -> str:
    """One line."""
    return (
        f"{traffic.answered.total()} answers, {traffic.given_up.total()} given up, "
        f"{len(traffic.wrong)} differ, {len(traffic.hung)} hung, {len(traffic.failures)} failed"
    )


def judged(
    traffic: Traffic,
    audit: Verdict,
    left: dict[str, float],
    watched: Watched,
    preemptions: float,
) -> dict[str, Any]:
    """The verdict, and what it rests on."""
    grown = watched.growth()
    return {
        "passed": not (audit.wrong or traffic.hung or traffic.failures or left)
        and all(growth <= MOST_GROWTH for growth in grown.values())
        and preemptions > 0,
        "answers": traffic.answered.total(),
        "given_up": dict(traffic.given_up),
        "near_ties": audit.near_ties,
        "wrong": audit.wrong,
        "hung": traffic.hung,
        "failures": traffic.failures,
        "left_behind": left,
        "preemptions": preemptions,
        "memory_growth": grown,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, small")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here too")
    given = parser.parse_args()
    interrupt_on_termination()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    cases = pool(lambda text: list(tokenizer.encode(text).ids), POOL, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        log, spills = Path(folder) / "server.log", Path(folder) / "spills"
        spills.mkdir(mode=0o700)
        expected = without_subspec(given.model, log, cases)
        with serve(given.model, log, {"stream_dir": str(spills)}) as server:
            traffic = Traffic(server.url, cases, expected, given.seed, DEADLINE_S)
            with watching(server) as watched:
                asyncio.run(loaded(traffic, given.clients, 60 * given.minutes))
            left = left_behind(server)
            preemptions = metrics(server)["num_preemptions_total"]
            statistics = server.statistics()
        audit = audited(traffic.wrong, given.model, log)
    verdict = judged(traffic, audit, left, watched, preemptions)
    report = {
        "verdict": verdict,
        "answers_by_feature": dict(sorted(traffic.answered.items())),
        "resident_bytes": watched.samples,
        "statistics": statistics,
        "clients": given.clients,
        "minutes": given.minutes,
        "seed": given.seed,
        "provenance": provenance(" ".join(sys.argv)),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(verdict, indent=2))
    return 0 if verdict["passed"] else 1


def without_subspec(model: Path, log: Path, cases: list[Case]) -> list[Answer]:
    """The right answers."""
    began = time.monotonic()
    with serve(model, log, None) as plain:
        expected = asyncio.run(references(plain.url, cases))
    errors = sum(answer.error is not None for answer in expected)
    print(
        f"{len(cases)} requests answered without SubSpec, {errors} of them by an error, "
        f"in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return expected


if __name__ == "__main__":
    raise SystemExit(main())
