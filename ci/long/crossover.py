"""Tokens a second by number of clients: plain streaming, SubSpec at a fixed tree, and SubSpec that
gives each request as much tree as pays, down to none. At how many clients does it step aside?

Each round starts a server that streams only (the whole budget to residents) and one with SubSpec.
Each client asks for one short greedy answer at once with the others. On the second server the
planned depth, always drafted, and the tuned one take turns; the tuned one first serves as many
clients once without being measured, so that it has seen them. Both servers run with max_num_seqs
of the most clients. Exit status 1: a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from matplotlib.figure import Figure
from openai import AsyncOpenAI

from vllm_subspec.statistics import growth
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.serving import (
    Server,
    free_port,
    interrupt_on_termination,
    running,
    vllm_serve,
)

COLOURS = {"plain": "#3b6fb6", "fixed": "#8a8a8a", "tuned": "#d98324"}
MEANINGS = {
    "plain": "streaming only, nothing drafted",
    "fixed": "SubSpec, the planned tree for every request, always",
    "tuned": "SubSpec, as much tree as pays, perhaps none",
}


@dataclass(frozen=True)
class Cell:
    """One mode at one number of clients, once.

    Attributes:
        mode: a key of ``MEANINGS``.
        clients: requests at the same time.
        tokens_per_s: of all clients together, prompts' passes included.
        tau: tokens a request committed per target pass.
        nodes: verified per request and pass.
        aside: share of requests' passes for which nothing was drafted, since it did not pay.
    """

    mode: str
    clients: int
    tokens_per_s: float
    tau: float
    nodes: float
    aside: float


def serve(
    given: argparse.Namespace, log: Path, options: dict[str, Any]
) -> tuple[list[str], int, Path]:
    """Arguments of ``running`` for a server with these options of SubSpec."""
    port = free_port()
    subspec = {"method": "subspec", "memory_budget": given.budget, **options}
    arguments = ["--max-model-len", str(given.max_model_len), "--served-model-name", "m"]
    arguments += ["--max-num-seqs", str(max(given.clients)), "--no-enable-prefix-caching"]
    arguments += ["--speculative-config", json.dumps(subspec)]
    return vllm_serve(given.model, port, arguments), port, log


def call(server: Server, method: str, *args: Any) -> Any:
    """A worker's method."""
    with httpx.Client(trust_env=False, timeout=60.0) as client:
        body = {"method": method, "args": args}
        answer = client.post(f"{server.url}/collective_rpc", json=body)
    answer.raise_for_status()
    return answer.json()["results"][0]


async def answers(server: Server, clients: int, tokens: int) -> int:
    """All clients at once, one answer each; tokens that came."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=900.0) as client:

        async def ask(number: int) -> int:
            answer = await client.completions.create(
                model="m",
                prompt=f"{number}. {PROMPTS[number % len(PROMPTS)]}",
                max_tokens=tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert answer.usage is not None
            return answer.usage.completion_tokens

        return sum(await asyncio.gather(*(ask(number) for number in range(clients))))


def measure(server: Server, mode: str, clients: int, tokens: int) -> Cell:
    """One cell, told as it comes."""
    before, began = server.statistics(), time.monotonic()
    came = asyncio.run(answers(server, clients, tokens))
    seconds = time.monotonic() - began
    grown = growth(before, server.statistics())
    passes = max(1, grown["target_passes"])
    cell = Cell(
        mode,
        clients,
        came / seconds,
        grown["committed_tokens"] / passes if mode != "plain" else 1.0,  # it counts no trees
        grown["drafted_nodes"] / passes,
        grown.get("fallback_stepped_aside", 0) / passes,
    )
    print(
        f"{mode:6} {clients:3} clients  {cell.tokens_per_s:7.2f} tokens/s  tau {cell.tau:5.2f}  "
        f"{cell.nodes:5.1f} nodes  aside {cell.aside:4.0%}",
        flush=True,
    )
    return cell


def one_round(given: argparse.Namespace, folder: Path) -> Iterable[Cell]:
    """Both servers, all modes, all numbers of clients."""
    with running(*serve(given, folder / "plain.log", {"speculate": False})) as server:
        asyncio.run(answers(server, 1, 2))  # warm
        for clients in given.clients:
            yield measure(server, "plain", clients, given.tokens)
    with running(*serve(given, folder / "subspec.log", {})) as server:
        depth = call(server, "subspec_placement")["tree"]["depth"]
        for clients in given.clients:
            asyncio.run(answers(server, clients, given.tokens))
            for mode, policy in (("fixed", {"depth": depth}), ("tuned", {})):
                call(server, "set_draft_policy", policy)
                yield measure(server, mode, clients, given.tokens)


def summary(cells: Iterable[Cell]) -> dict[str, dict[int, dict[str, float]]]:
    """Medians of each mode and number of clients."""
    found: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.mode, cell.clients].append(cell)
    table: dict[str, dict[int, dict[str, float]]] = {mode: {} for mode in MEANINGS}
    for (mode, clients), same in found.items():
        table[mode][clients] = {
            name: median(getattr(cell, name) for cell in same)
            for name in ("tokens_per_s", "tau", "nodes", "aside")
        }
    return table


def points(table: dict[str, dict[int, dict[str, float]]]) -> dict[str, int | None]:
    """Least clients at which the server stepped aside, and at which plain was faster, if any."""
    plain, fixed, tuned = (table[mode] for mode in ("plain", "fixed", "tuned"))

    def first(holds: dict[int, bool]) -> int | None:
        return min((clients for clients, does in holds.items() if does), default=None)

    return {
        "steps_aside_at": first({n: cell["aside"] > 0.5 for n, cell in tuned.items()}),
        "plain_beats_fixed_at": first(
            {n: plain[n]["tokens_per_s"] > cell["tokens_per_s"] for n, cell in fixed.items()}
        ),
        "plain_beats_tuned_at": first(
            {n: plain[n]["tokens_per_s"] > cell["tokens_per_s"] for n, cell in tuned.items()}
        ),
    }


def draw(table: dict[str, dict[int, dict[str, float]]], title: str, path: Path) -> None:
    """Tokens/s over clients, one line a mode."""
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    for mode, line in table.items():
        clients = sorted(line)
        rates = [line[number]["tokens_per_s"] for number in clients]
        axes.plot(clients, rates, "o-", color=COLOURS[mode], label=f"{mode}: {MEANINGS[mode]}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(table["plain"]), [str(number) for number in sorted(table["plain"])])
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="clients", ylabel="tokens/s of all clients")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def show(table: dict[str, dict[int, dict[str, float]]]) -> None:
    """The table, for people."""
    print("\nclients   plain   fixed   tuned (tokens/s)   tau tuned   nodes tuned   aside")
    for clients, tuned in sorted(table["tuned"].items()):
        plain, fixed = (table[mode][clients]["tokens_per_s"] for mode in ("plain", "fixed"))
        print(
            f"{clients:7} {plain:7.2f} {fixed:7.2f} {tuned['tokens_per_s']:7.2f}"
            f"{tuned['tau']:24.2f} {tuned['nodes']:13.1f} {tuned['aside']:7.0%}"
        )


def numbers(text: str) -> list[int]:
    """1,2,4."""
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: clients are 1 or more")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--budget", required=True, help="memory_budget: 1110MB, 50%%")
    parser.add_argument("--clients", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write everything here too")
    parser.add_argument("--plot", type=Path, help="draw it here, as .png, .svg or .pdf")
    given = parser.parse_args()
    interrupt_on_termination()
    with tempfile.TemporaryDirectory() as folder:
        cells = [cell for _ in range(given.rounds) for cell in one_round(given, Path(folder))]
    table = summary(cells)
    show(table)
    found = points(table)
    most = max(given.clients)
    print(f"\nsteps aside at: {found['steps_aside_at'] or f'none of up to {most}'} clients")
    if given.plot is not None:
        name = f"{given.model.name}, budget {given.budget}, {given.rounds} rounds"
        draw(table, name, given.plot)
    report = {
        "points": found,
        "max_num_seqs": most,
        "medians": table,
        "cells": [asdict(cell) for cell in cells],
        "provenance": provenance("ci/soak crossover"),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
