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
    bits: Annotated[int, typer.Option(help="Bits of the shadow: 4 or 8.")] = 4,
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


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit status 2."""
    try:
        app()
    except SubSpecError as error:
        typer.echo(f"vllm-subspec: {error}", err=True)
        raise SystemExit(2) from error
