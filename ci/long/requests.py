"""Serve a model on a budget for a long time, under mixed requests: does memory or speed drift?

A few clients ask at once for what a server meets: greedy and sampled answers, streamed or not, of
many lengths, with log-probabilities, stop strings and several answers, some given up half-way.
Every two minutes they pause, and one fixed greedy request is timed alone: tokens a second, tau, and
the share of the bound tau * link bandwidth / streamed bytes. Plain streaming reaches all of its
bound whatever the disk does, so the speed ratio over it is tau times that share, times a constant.
Exit status 1: memory grew, the ratio drifted, a request failed, or the limit was passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from openai import AsyncOpenAI

from vllm_subspec.plan import device_memory_bytes, parse_budget
from vllm_subspec.statistics import growth
from vllm_subspec.tools.bench_process import RUNTIME_ALLOWANCE_BYTES
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.serving import (
    Server,
    free_port,
    interrupt_on_termination,
    running,
    vllm_serve,
)

CLIENTS = 3
PAUSE_S = 120.0  # between two probes
PROBE_TOKENS = 96
WARM_UP = 2  # probes not judged: live tuning settles, allocators fill
MOST_GROWTH = 0.02  # of resident memory, last third over first
MOST_DRIFT = 0.10  # of the ratio, last third over first


@dataclass(frozen=True)
class Probe:
    """One timed request, alone: minute, its rates, and the worker's memory in bytes after it."""

    minute: float
    tokens_per_s: float
    tau: float
    bound_share: float
    link_bytes_per_s: float
    resident: int
    peak: int

    @property
    def ratio(self) -> float:
        """In proportion to the speed over plain streaming."""
        return self.tau * self.bound_share


class Soak:
    """Requests against one server, and what became of them."""

    def __init__(self, server: Server, model: str, seed: int) -> None:
        self._server, self._model = server, model
        self._client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=300.0)
        self._random = random.Random(seed)
        self.finished = self.abandoned = self.tokens = 0
        self.failures: list[str] = []

    async def mixed(self, until: float) -> None:
        """All clients, each with one request after another, until that time."""
        await asyncio.gather(*(self._one_client(until) for _ in range(CLIENTS)))

    async def _one_client(self, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self._any_request()
            except Exception as error:  # whatever it is, it is a finding
                self.failures.append(repr(error))

    async def _any_request(self) -> None:
        draw = self._random
        messages = [{"role": "user", "content": draw.choice(PROMPTS)}]
        options: dict[str, Any] = {"max_tokens": draw.randint(1, 96)}
        options |= draw.choice(
            (
                {"temperature": 0},
                {"temperature": 0, "logprobs": True, "top_logprobs": 3},
                {"temperature": 0, "stop": [".", "\n\n"]},
                {"temperature": 0.8, "top_p": 0.9, "seed": draw.randint(0, 99)},
                {"temperature": 1.0, "n": 2, "presence_penalty": 0.5},
            )
        )
        give_up = draw.random() < 0.15
        stream: Any = await self._client.chat.completions.create(
            model=self._model, messages=messages, stream=True, **options
        )
        async for chunk in stream:
            self.tokens += len(chunk.choices)
            if give_up and draw.random() < 0.2:
                await stream.close()
                self.abandoned += 1
                return
        self.finished += 1

    async def probe(self, began: float) -> Probe:
        """The fixed request, timed; nothing else runs."""
        before, start = self._server.statistics(), time.monotonic()
        answer = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": PROMPTS[0]}],
            max_tokens=PROBE_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        seconds = time.monotonic() - start
        after = self._server.statistics()
        grown = growth(before, after)
        tokens = answer.usage.completion_tokens if answer.usage else 0
        link = grown["stream_bytes_read"] / grown["stream_read_busy_s"]
        tau = grown["committed_tokens"] / grown["target_passes"]
        decode_s = grown["draft_seconds"] + grown["target_seconds"]
        needed_s = grown["target_passes"] * after["streamed_bytes_per_pass"] / link
        memory = self._server.memory()
        return Probe(
            round((time.monotonic() - began) / 60, 1), tokens / seconds, tau, needed_s / decode_s,
            link, memory.resident, memory.peak,
        )  # fmt: skip


async def soak(server: Server, model: str, minutes: float, seed: int) -> tuple[Soak, list[Probe]]:
    """Mixed requests and probes in turn, for so long."""
    run, began = Soak(server, model, seed), time.monotonic()
    probes: list[Probe] = []
    end = began + 60 * minutes
    while time.monotonic() < end:
        await run.mixed(min(end, time.monotonic() + PAUSE_S))
        probe = await run.probe(began)
        probes.append(probe)
        print(
            f"{probe.minute:5.1f} min  {probe.tokens_per_s:6.2f} tokens/s  tau {probe.tau:5.2f}  "
            f"{probe.bound_share:4.0%} of the bound  link {probe.link_bytes_per_s / 1e9:.2f} GB/s  "
            f"RSS {probe.resident / 2**20:.0f} MiB, peak {probe.peak / 2**20:.0f}  "
            f"{run.finished} answers, {run.abandoned} given up, {len(run.failures)} failed",
            flush=True,
        )
    return run, probes


def judge(probes: list[Probe], limit: int) -> dict[str, Any]:
    """Last third over first third, warm-up left out."""
    judged = probes[WARM_UP:]
    third = max(1, len(judged) // 3)
    first, last = judged[:third], judged[-third:]
    grown = median(p.resident for p in last) / median(p.resident for p in first) - 1
    drift = median(p.ratio for p in last) / median(p.ratio for p in first) - 1
    peak = max(p.peak for p in probes)
    return {
        "memory_growth": grown,
        "ratio_drift": drift,
        "peak": peak,
        "limit": limit,
        "passed": grown <= MOST_GROWTH and drift >= -MOST_DRIFT and peak <= limit,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--budget", required=True, help="memory_budget: 1110MB, 50%%")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here too")
    given = parser.parse_args()
    interrupt_on_termination()
    port = free_port()
    subspec = {"method": "subspec", "memory_budget": given.budget}
    options = ["--max-model-len", "320", "--max-num-seqs", str(CLIENTS)]
    options += ["--speculative-config", json.dumps(subspec), "--served-model-name", "soaked"]
    limit = parse_budget(given.budget, device_memory_bytes()) + RUNTIME_ALLOWANCE_BYTES
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(vllm_serve(given.model, port, options), port, log) as server:
            run, probes = asyncio.run(soak(server, "soaked", given.minutes, given.seed))
    verdict = judge(probes, limit)
    verdict["passed"] &= not run.failures
    report = {
        "verdict": verdict,
        "answers": run.finished,
        "given_up": run.abandoned,
        "failures": run.failures,
        "probes": [asdict(probe) for probe in probes],
        "provenance": provenance("ci/soak"),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"failures": run.failures[:5], **verdict}, indent=2))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
