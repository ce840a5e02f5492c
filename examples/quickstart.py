"""The main job: a real model, streamed from disk, served by vLLM, with SubSpec and without.

Starts ``vllm serve`` twice on the same model and the same streaming, talks to it through the
OpenAI client, audits every difference between the two answers, prints a table and writes a JSON
file. Exit status 1: a token was wrong.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAIError
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError, SubSpecError
from vllm_subspec.files import private_directory
from vllm_subspec.tools.measure import Run, run_prompts, speculation_figures, stream_figures
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.serving import (
    free_port,
    interrupt_on_termination,
    running,
    vllm_serve,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)
SERVER_OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "4")


@app.command()
def main(
    model: Annotated[
        Path | None,
        typer.Argument(help="Folder of the example model; written there if it is missing."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=8, max=512, help="At most, per prompt.")] = 32,
    options: Annotated[str, typer.Option(help="SubSpec's options, as JSON.")] = "{}",
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("quickstart.json"),
) -> None:
    """Serve a model that streams from disk, with SubSpec and without, and compare."""
    began = time.monotonic()
    interrupt_on_termination()
    try:
        wrong = _quickstart(
            model or private_directory(envs.cache_dir()) / "example-x2",
            PROMPTS[:prompts],
            new_tokens,
            _parse(options),
            output,
        )
    except (SubSpecError, OpenAIError) as error:
        Console(stderr=True).print(f"quickstart: {error}", markup=False, soft_wrap=True)
        raise SystemExit(2) from error
    console.print(f"Took {time.monotonic() - began:.0f} s; all figures are in {output}.")
    if wrong:
        console.print(f"{wrong} tokens are wrong: that is a bug.", style="red")
        raise SystemExit(1)


def _quickstart(
    folder: Path, prompts: Sequence[str], new_tokens: int, options: dict[str, Any], output: Path
) -> int:
    """Everything in order; returns how many tokens were wrong."""
    _heading("The example model")
    model = _write_model(folder)
    _heading("SubSpec: a low-bit shadow drafts while the weights stream")
    subspec = _serve("subspec", folder, options, prompts, new_tokens)
    _heading("Plain streaming: the same engine, nothing drafted")
    plain = _serve("plain", folder, options | {"speculate": False}, prompts, new_tokens)
    _heading("Audit")
    audited = _audit(folder, plain, subspec)
    record = {"model": model, **_figures(plain, subspec, options), **audited}
    record |= provenance(shlex.join(["examples/quickstart", *sys.argv[1:]]))
    output.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")
    Console(width=120).print(_table(record))
    return int(record["wrong_tokens"])


def _write_model(folder: Path) -> str:
    from vllm_subspec.tools.example_model import ExampleModel, write_example_model

    model = ExampleModel(widen=2)
    written = write_example_model(folder, model)
    console.print(f"{model}: {'written to' if written else 'already in'} {folder}", soft_wrap=True)
    return str(model)


def _serve(
    name: str, folder: Path, options: dict[str, Any], prompts: Sequence[str], new_tokens: int
) -> Run:
    config = {"method": "subspec", **options}
    port = free_port()
    command = vllm_serve(
        folder, port, ["--speculative-config", json.dumps(config), *SERVER_OPTIONS]
    )
    console.print(shlex.join(command), style="dim", soft_wrap=True)
    log = private_directory(envs.cache_dir() / "logs") / f"quickstart-{name}.log"
    starting = console.status("starting; the first time, the shadow is made, which takes minutes")
    starting.start()
    try:
        with running(command, port, log, timeout_s=600) as server:
            starting.stop()
            return run_prompts(server, str(folder), prompts, new_tokens, _show)
    finally:
        starting.stop()


def _audit(folder: Path, plain: Run, subspec: Run) -> dict[str, Any]:
    from vllm_subspec.tools.audit import audit

    divergences = audit(
        folder,
        [answer.prompt for answer in plain.answers],
        [answer.tokens for answer in plain.answers],
        [answer.tokens for answer in subspec.answers],
    )
    wrong = [divergence for divergence in divergences if not divergence.is_near_tie]
    console.print(
        f"{len(divergences)} of {len(plain.answers)} answers differ somewhere; "
        f"{len(divergences) - len(wrong)} by a near-tie of bfloat16, {len(wrong)} wrongly."
    )
    for d in divergences:
        console.print(
            f"answer {d.prompt + 1}, token {d.position + 1}: {d.expected} without, {d.found} with; "
            f"in float32 {d.gap:.2f} below the best logit, rounding may close {d.tolerance:.2f}",
            style="dim",
            soft_wrap=True,
        )
    return {
        "divergences": len(divergences),
        "near_ties": len(divergences) - len(wrong),
        "wrong_tokens": len(wrong),
    }


def _figures(plain: Run, subspec: Run, options: dict[str, Any]) -> dict[str, Any]:
    config = SubSpecConfig(**options)
    speculation = speculation_figures(subspec)
    nodes_per_pass = speculation.pop("nodes_per_pass")
    return {
        "prompts": len(subspec.answers),
        "new_tokens": subspec.new_tokens,
        "plain_tokens_per_s": plain.tokens_per_s,
        "subspec_tokens_per_s": subspec.tokens_per_s,
        "speedup": subspec.tokens_per_s / plain.tokens_per_s,
        **speculation,
        **stream_figures(subspec),
        "plain_link_utilization": stream_figures(plain)["link_utilization"],
        "tree": {
            "width": config.width or "auto",
            "depth": config.depth or "auto",
            "nodes_per_pass": nodes_per_pass,
        },
        "options": options,
    }


def _table(record: dict[str, Any]) -> Table:
    """Markdown, so that it can be pasted."""
    hardware, tree = record["hardware"], record["tree"]
    rows = {
        "plain streaming": f"{record['plain_tokens_per_s']:.2f} tokens/s",
        "SubSpec": f"{record['subspec_tokens_per_s']:.2f} tokens/s",
        "speedup": f"{record['speedup']:.2f}x",
        "acceptance length": f"{record['acceptance_length']:.2f} tokens per target pass",
        "tree": f"width {tree['width']}, depth {tree['depth']}, "
        f"{tree['nodes_per_pass']:.0f} nodes per pass",
        "draft step": f"{record['draft_step_ms']:.0f} ms",
        "target pass": f"{record['target_pass_ms']:.0f} ms",
        "streamed": f"{record['streamed_bytes_per_pass'] / 1e6:.0f} MB per target pass",
        "link": f"{record['link_bandwidth'] / 1e9:.2f} GB/s, busy {record['link_utilization']:.0%} "
        f"of the time (plain: {record['plain_link_utilization']:.0%})",
        "answers that differ": f"{record['divergences']} of {record['prompts']}: "
        f"{record['near_ties']} near-ties, {record['wrong_tokens']} wrong tokens",
        "workload": f"{record['prompts']} prompts, {record['new_tokens']} new tokens, greedy",
        "model": record["model"],
        "hardware": f"{hardware['cores']} cores, {hardware['cpu']}, {', '.join(hardware['isa'])}",
    }
    table = Table("figure", "value", box=box.MARKDOWN)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _parse(options: str) -> dict[str, Any]:
    try:
        parsed = json.loads(options)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--options {options!r} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"--options {options!r} is no JSON object")
    if fixed := parsed.keys() & {"speculate", "stream"}:
        raise ConfigError(f"leave {', '.join(fixed)} out of --options: both ways are compared here")
    SubSpecConfig(**parsed)
    return parsed


def _heading(text: str) -> None:
    console.rule(text, align="left")


def _show(text: str) -> None:
    console.print(text, end="", markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
