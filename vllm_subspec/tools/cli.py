"""The ``vllm-subspec`` command. Heavy imports live inside the commands: ``--help`` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_subspec.errors import SubSpecError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tools around SubSpec, speculative decoding for models that do not fit.",
)


@app.callback()
def _commands() -> None:
    """Keeps a name before each command, even while there is one only."""


@app.command()
def example_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to write; new, or empty.")
    ],
    widen: Annotated[
        int, typer.Option(help="Width factor, 1 to 4: same function, WIDEN^2 the linears' bytes.")
    ] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    layers: Annotated[
        int | None, typer.Option(help="Keep the first LAYERS layers only: small, but babbles.")
    ] = None,
) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, offline."""
    from vllm_subspec.tools.example_model import ExampleModel, write_example_model

    model = ExampleModel(widen=widen, dtype=dtype, num_layers=layers)
    written = write_example_model(directory, model)
    typer.echo(f"{directory}: {'written' if written else 'already there'}, {model}")


@app.command()
def acceptance(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    bits: Annotated[int, typer.Option(help="Bits of the shadow: 4, 6 or 8.")] = 4,
    new_tokens: Annotated[int, typer.Option(min=8, help="Tokens per prompt.")] = 96,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write the figures here too.")
    ] = None,
) -> None:
    """Measure acceptance length by tree, sharpening and noise coupling on twelve prompts."""
    import json

    from vllm_subspec.tools.acceptance import measure_acceptance, render

    rows = measure_acceptance(str(model), bits, new_tokens)
    typer.echo(render(rows))
    if json_file is not None:
        json_file.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n")


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    bits: Annotated[
        list[int] | None, typer.Option(help="Bits to fit, 4, 6 or 8; repeatable. Default: all.")
    ] = None,
) -> None:
    """Fit MODEL's shadows to what it writes itself; later starts find and use them."""
    from vllm_subspec.tools.calibrate import calibrate_shadows

    typer.echo(f"{calibrate_shadows(model, bits)} files of the shadow cache written")


@app.command()
def sensitivity(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write the figures here too.")
    ] = None,
) -> None:
    """Measure how much drafting suffers from each layer's few bits; later plans use it."""
    import json

    from vllm_subspec.tools.calibrate import measure_sensitivity, render

    found = measure_sensitivity(model)
    typer.echo(render(found))
    typer.echo(f"kept in {found.store_for(model)}")
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_json(), indent=2) + "\n")


@app.command()
def memory(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face folder.")],
) -> None:
    """Print resident memory of serving DIR: streamed by SubSpec, or with its weights in RAM."""
    from vllm_subspec.tools.memory import KV_CACHE_BYTES, measure_memory
    from vllm_subspec.tools.serving import interrupt_on_termination

    interrupt_on_termination()
    typer.echo(f"worker process after serving, KV cache of {KV_CACHE_BYTES >> 20} MiB included")
    typer.echo("| way to serve | resident | peak |\n|---|---|---|")
    for use in measure_memory(model):
        resident, peak = use.memory.resident / 1e9, use.memory.peak / 1e9
        typer.echo(f"| {use.way} | {resident:.2f} GB | {peak:.2f} GB |")


@app.command()
def bench(
    model: Annotated[Path, typer.Option(help="A Hugging Face folder with a chat template.")],
    budget: Annotated[str, typer.Option(help="memory_budget of every mode: 1200MiB, 50%.")],
    modes: Annotated[
        str,
        typer.Option(
            help="Of plain, subspec, chain, subspec-4bit, no-post, ngram, suffix, vllm, flexgen, "
            "leviathan, mlspecqd, specinfer, specexec; or peers, for these; or ladder, for one "
            "piece of SubSpec more from row to row. plain is the reference."
        ),
    ] = "plain,subspec",
    max_tokens: Annotated[int, typer.Option(min=8, help="New tokens per prompt.")] = 96,
    prompts: Annotated[
        Path | None, typer.Option(help="One prompt a line, or a JSON list; default: eight of ours.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all modes.")] = 1,
    max_model_len: Annotated[int, typer.Option(min=64, help="Positions of the KV cache.")] = 1024,
    draft_model: Annotated[Path | None, typer.Option(help="The draft of mode leviathan.")] = None,
    options: Annotated[str, typer.Option(help="SubSpec options of every mode, as JSON.")] = "{}",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write everything here.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw one decode cycle into this folder.")
    ] = None,
    temperatures: Annotated[
        str, typer.Option(help="Ask at each of these, from seeds above 0: 0,0.6.")
    ] = "0",
    aa: Annotated[
        bool, typer.Option("--aa", help="Run subspec again in each round: the noise floor.")
    ] = False,
) -> None:
    """Compare ways to serve on one memory budget; exit status 1: a token was wrong."""
    from vllm_subspec.tools.bench_command import Request, run_and_report
    from vllm_subspec.tools.serving import interrupt_on_termination

    interrupt_on_termination()
    request = Request(
        model,
        budget,
        modes,
        max_tokens,
        prompts,
        repeats,
        max_model_len,
        draft_model,
        options,
        json_file,
        timeline,
        temperatures,
        aa,
    )
    if not run_and_report(request, typer.echo):
        raise typer.Exit(1)


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32 (exact) or bfloat16; repeatable. Default: both."),
    ] = None,
    draws: Annotated[
        int, typer.Option(min=200, help="Unseeded requests for each of four texts.")
    ] = 400,
    options: Annotated[str, typer.Option(help="SubSpec options, as JSON.")] = "{}",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write everything here.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Write a report with plots here.")
    ] = None,
) -> None:
    """Prove that speculation leaves MODEL's output as it is; exit status 1: it does not."""
    from vllm_subspec.tools.lossless_command import Request, run_and_report
    from vllm_subspec.tools.serving import interrupt_on_termination

    interrupt_on_termination()
    request = Request(model, dtype or (), draws, options, json_file, html_file)
    if not run_and_report(request, typer.echo):
        raise typer.Exit(1)


@app.command()
def sweep(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    results: Annotated[Path, typer.Argument(metavar="F", help="JSON lines; grows, and resumes.")],
    bits: Annotated[
        str, typer.Option(help="2, 3, 4, 6, 8, mxfp4, planned; the first is the base.")
    ] = "6,2,3,4,8,mxfp4",
    group_size: Annotated[str, typer.Option(help="Weights that share a scale.")] = "64",
    resident_layers: Annotated[str, typer.Option(help="Layers kept, from the last back.")] = "0",
    width: Annotated[str, typer.Option(help="Nodes per level.")] = "4,1,8",
    depth: Annotated[str, typer.Option(help="Levels; all of them for every point.")] = (
        "2,4,8,12,16,24,32,48"
    ),
    draft_temperature: Annotated[str, typer.Option(help="Sharpening T_d.")] = "0.2,1.0",
    temperature: Annotated[str, typer.Option(help="Of the requests.")] = "0,0.6,1.0",
    together: Annotated[
        int, typer.Option(min=1, max=6, help="Settings that may differ from the base at once.")
    ] = 1,
    budget: Annotated[
        str | None, typer.Option(help="Memory, for bits 'planned' and for --measure.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=12, help="Of ours; a text each.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=8, help="Of a text.")] = 96,
    measure: Annotated[
        int, typer.Option(min=0, help="Run so many points too, the fastest as predicted.")
    ] = 0,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Write a report with plots here.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the plots into this folder.")
    ] = None,
) -> None:
    """Measure acceptance over bits, groups, residents, trees and sampling; predict the speeds."""
    from vllm_subspec.tools.serving import interrupt_on_termination
    from vllm_subspec.tools.sweep_command import Request, run_and_report

    interrupt_on_termination()
    request = Request(
        model,
        results,
        bits,
        group_size,
        resident_layers,
        width,
        depth,
        draft_temperature,
        temperature,
        together,
        budget,
        prompts,
        new_tokens,
        measure,
        html_file,
        plots,
    )
    run_and_report(request, typer.echo)


@app.command()
def pareto(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    budget: Annotated[str, typer.Option(help="Memory of the streamed ways: 1200MiB, 50%.")],
    prompts: Annotated[int, typer.Option(min=1, max=12, help="Of ours.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=8, help="Of an answer.")] = 96,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write everything here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="F", help="Draw quality against speed, as SVG.")
    ] = None,
) -> None:
    """Compare streaming, SubSpec and its shadows served alone by quality and speed."""
    from vllm_subspec.tools.pareto import Pareto, picture, render, write_json
    from vllm_subspec.tools.serving import interrupt_on_termination

    interrupt_on_termination()
    report = Pareto(model, budget, prompts, new_tokens).run(typer.echo)
    typer.echo("\n" + render(report))
    if json_file is not None:
        write_json(report, json_file)
    if plot is not None:
        plot.write_bytes(picture(report).svg)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL]", help="Also: would this one be refused?")
    ] = None,
    stream_dir: Annotated[
        Path | None, typer.Option(help="Where the spill would lie; default: in the cache.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write the checks here too.")
    ] = None,
) -> None:
    """Say what would stop SubSpec here, or slow it down; exit status 1: something stops it."""
    import json

    from vllm_subspec.tools.doctor import diagnose, render, stops, to_json

    checks = diagnose(model, stream_dir)
    typer.echo(render(checks))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(checks), indent=2) + "\n")
    if stops(checks):
        raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    budget: Annotated[str, typer.Option(help="Memory: 8GiB, 1200MiB, 50%, auto.")],
    context: Annotated[int, typer.Option(min=1, help="Positions of a sequence.")] = 1024,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    options: Annotated[str, typer.Option(help="SubSpec options, as JSON.")] = "{}",
    machine: Annotated[
        Path | None, typer.Option(metavar="F", help="Measured figures of this machine, JSON.")
    ] = None,
    sensitivity: Annotated[
        Path | None, typer.Option(metavar="F", help="Measured sensitivity of MODEL, JSON.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="F", help="Write the placement here too.")
    ] = None,
) -> None:
    """Print what SubSpec would keep, stream and draft, and how fast; no weight is read."""
    import json

    from vllm_subspec.tools.plan_command import Question, render

    question = Question(model, budget, context, sequences, options, machine, sensitivity)
    answer = question.answer()
    typer.echo(render(answer))
    if json_file is not None:
        json_file.write_text(json.dumps(answer.to_json(), indent=2) + "\n")


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit status 2."""
    try:
        app()
    except SubSpecError as error:
        typer.echo(f"vllm-subspec: {error}", err=True)
        raise SystemExit(2) from error
