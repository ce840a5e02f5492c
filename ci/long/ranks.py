"""Several ranks or replicas of one model, in FP32: plain vLLM's tokens, each rank in its budget.

Ways to divide the work, each a server of its own that begins without a spill:
  tensor    two ranks on this machine share each layer
  machines  the same as if on two machines: two commands, a cache and a spill each
  replicas  two data-parallel replicas, which share a spill
  servers   two servers that start at the same moment, which share a spill

Exit status 1: a token differed from plain vLLM's, a rank's ledger passed its budget, nothing was
streamed, or a spill was written twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm_subspec.plan import parse_budget
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.serving import (
    Server,
    free_port,
    interrupt_on_termination,
    running,
    vllm_serve,
)

TOKENS = 40
START_S = 1800.0
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 3}
Tokens = list[list[int]]


class Proof:
    """One model, and what is asked of each way to serve it."""

    def __init__(self, model: Path, budget: str, folder: Path) -> None:
        self.model, self.budget, self.folder = model, budget, folder
        self.failures: list[str] = []

    def options(self, subspec: bool, *more: str) -> list[str]:
        options = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "2"]
        options += ["--enforce-eager", "--served-model-name", "m", *more]
        if not subspec:
            return [*options, "--kv-cache-memory-bytes", str(256 << 20)]
        method = {"method": "subspec", "memory_budget": self.budget}
        return [*options, "--speculative-config", json.dumps(method)]

    def command(self, way: str, options: Sequence[str], port: int) -> list[str]:
        """A server with a cache of its own, ``way``'s: it begins without a spill."""
        cache = self.folder / f"cache-{way}"
        return ["env", f"SUBSPEC_CACHE={cache}", *vllm_serve(self.model, port, options)]

    @contextmanager
    def serving(self, way: str, options: Sequence[str], log: str = "") -> Iterator[Server]:
        port = free_port()
        path = self.folder / f"{log or way}.log"
        with running(self.command(way, options, port), port, path, START_S) as server:
            yield server

    def judge(self, way: str, server: Server, expected: Tokens, ranks: int) -> None:
        answers = ask_all(server)
        wrong = sum(answer != right for answer, right in zip(answers, expected, strict=True))
        placements = rpc(server, "subspec_placement")
        budget = parse_budget(self.budget, 0)
        ledgers = [sum(item["bytes"] for item in placement["memory"]) for placement in placements]
        streamed = [len(placement["streamed"]) for placement in placements]
        counted = rpc(server, "subspec_statistics")
        tau = counted[0]["committed_tokens"] / max(1, counted[0]["target_passes"])
        print(
            f"{way}: {len(answers) - wrong} of {len(answers)} answers are plain vLLM's; by rank: "
            f"ledger {ledgers} of {budget} bytes, streamed layers {streamed}; tau {tau:.2f}",
            flush=True,
        )
        if wrong:
            self.failures.append(f"{way}: {wrong} answers differ from plain vLLM's")
        if len(ledgers) != ranks or max(ledgers) > budget or min(streamed) == 0:
            self.failures.append(f"{way}: ledgers {ledgers}, streamed layers {streamed}")

    def check_spills(self, way: str, logs: Sequence[str], spills: int) -> None:
        """Replicas share ``spills`` files: one process wrote each, the others found it."""
        found = len(list((self.folder / f"cache-{way}" / "spill").glob("*.spill")))
        text = "".join((self.folder / f"{log}.log").read_text(errors="replace") for log in logs)
        waited = text.count("for the process that writes")
        print(f"{way}: {found} spills, {waited} waits for a writer", flush=True)
        if found != spills:
            self.failures.append(f"{way}: {found} spills, not {spills}")


def ask_all(server: Server) -> Tokens:
    """Greedy answers and a sampled one, each twice, two requests at a time."""
    requests: list[dict[str, Any]] = [
        {"prompt": prompt, "temperature": 0} for prompt in PROMPTS[:3]
    ]
    requests.append({"prompt": PROMPTS[3]} | SAMPLED)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda request: ask(server, request), [*requests, *requests]))


def ask(server: Server, request: dict[str, Any]) -> list[int]:
    body = {"model": "m", "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(trust_env=False, timeout=START_S) as client:
        answer = client.post(f"{server.url}/v1/completions", json=body | request)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def rpc(server: Server, method: str) -> list[dict[str, Any]]:
    """What each rank of one replica answers."""
    with httpx.Client(trust_env=False, timeout=START_S) as client:
        answer = client.post(f"{server.url}/collective_rpc", json={"method": method})
    answer.raise_for_status()
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def tensor(proof: Proof, expected: Tokens) -> None:
    """Two ranks, first plain vLLM's, then ours."""
    two = ("--tensor-parallel-size", "2")
    with proof.serving("plain-tensor", proof.options(False, *two)) as server:
        same = ask_all(server) == expected
    print(f"plain vLLM of two ranks {'equals' if same else 'differs from'} that of one", flush=True)
    with proof.serving("tensor", proof.options(True, *two)) as server:
        proof.judge("tensor", server, expected, ranks=2)


def machines(proof: Proof, expected: Tokens) -> None:
    """The second command is what would run on the second machine."""
    shared = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
    shared += ("--master-port", str(free_port()))
    second = proof.options(True, *shared, "--node-rank", "1", "--headless")
    with ExitStack() as stack:
        log = stack.enter_context((proof.folder / "machines-1.log").open("wb"))
        other = subprocess.Popen(
            proof.command("machine-1", second, free_port()), stdout=log, stderr=log
        )
        stack.callback(other.wait)
        stack.callback(other.terminate)
        first = proof.options(True, *shared, "--node-rank", "0")
        with proof.serving("machine-0", first, "machines-0") as server:
            proof.judge("machines", server, expected, ranks=2)
    proof.check_spills("machine-0", ["machines-0"], 1)
    proof.check_spills("machine-1", ["machines-1"], 1)


def replicas(proof: Proof, expected: Tokens) -> None:
    """One server, two replicas of one rank each."""
    with proof.serving("replicas", proof.options(True, "--data-parallel-size", "2")) as server:
        proof.judge("replicas", server, expected, ranks=1)
    proof.check_spills("replicas", ["replicas"], 1)


def servers(proof: Proof, expected: Tokens) -> None:
    """Nobody tells them of each other."""

    def serve(name: str) -> None:
        with proof.serving("servers", proof.options(True), name) as server:
            proof.judge("servers", server, expected, ranks=1)

    names = ["server-0", "server-1"]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(serve, names))
    proof.check_spills("servers", names, 1)


WAYS = {"tensor": tensor, "machines": machines, "replicas": replicas, "servers": servers}


def main() -> int:
    """Prove the chosen ways; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder, its heads even in number")
    parser.add_argument("--budget", required=True, help="memory_budget of each rank: 700MB")
    parser.add_argument("--ways", default=",".join(WAYS), help="of: %(default)s")
    given = parser.parse_args()
    interrupt_on_termination()
    # vLLM's own binding wants a memory node for each rank.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        proof = Proof(given.model.absolute(), given.budget, Path(folder))
        with proof.serving("plain", proof.options(False)) as server:
            expected = ask_all(server)
        for way in given.ways.split(","):
            WAYS[way](proof, expected)
    print(json.dumps({"failures": proof.failures}, indent=2))
    return 1 if proof.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
