"""Quality against speed, with an engine and a benchmark that make up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from vllm_subspec.plan import ModelShape, Unit, place
from vllm_subspec.tools import pareto
from vllm_subspec.tools.cli import app

SHAPE = ModelShape((Unit("layer 0", 200, 100), Unit("layer 1", 200, 100)), None, 8, True, 8, 4, 8)


class Engine:
    """Shadows of b bits are surprised by 1 + 1 / b nats, and wrong about one token in b."""

    placement = place(2, 0, 1)
    shadow_bytes = 150

    def __init__(self, bits: int | str) -> None:
        self.bits = 4 if bits == "mxfp4" else bits

    def write(self, prompts: Sequence[str], new_tokens: int, temperature: float) -> Any:
        return [([7, 8, *[1] * new_tokens], 2) for _ in prompts]

    def encode(self, text: str) -> list[int]:
        assert "Rabbit" in text
        return list(range(700))

    def score(self, sequences: Any, alone: bool) -> Any:
        nats = 1 + 1 / self.bits if alone else 1.0
        return [
            (
                [nats] * (len(tokens) - 1),
                [0 if alone and n % self.bits == 0 else 1 for n in range(len(tokens) - 1)],
            )
            for tokens in sequences
        ]

    def alone_step_s(self, text: Any) -> float:
        return 0.01 * self.bits


@pytest.mark.parametrize("wrong", [0, 1])
def test_ways_to_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: int) -> None:
    @contextmanager
    def engine(model: Path, options: dict[str, Any], *_: int) -> Iterator[Engine]:
        yield Engine(options["bits"])

    class Bench:
        def __init__(self, work: Any, modes: Any, *_: Any) -> None:
            assert [mode.name for mode in modes] == ["plain", "subspec"]
            assert work.budget_bytes == 10**9

        def rounds(self, say: Any) -> Iterator[dict[str, Any]]:
            gate = {"modes": {"subspec": {"wrong_tokens": wrong}}, "passed": not wrong}
            speeds = {"plain": 2.0, "subspec": 8.0}
            modes = {n: {"decode_tokens_per_s": {"median": s}} for n, s in speeds.items()}
            yield {"gate": gate} | ({} if wrong else {"modes": modes})

    monkeypatch.setattr(pareto, "replay_engine", engine)
    monkeypatch.setattr(pareto, "in_own_process", lambda work, *args: work(*args))
    monkeypatch.setattr(pareto, "Bench", Bench)
    monkeypatch.setattr(pareto.ModelShape, "read", lambda model: SHAPE)
    files = [str(tmp_path / name) for name in ("p.json", "p.svg")]
    arguments = ["pareto", "tiny", "--budget", "1GB", "--new-tokens", "9", "--prompts", "2"]
    done = CliRunner().invoke(app, [*arguments, "--json", files[0], "--plot", files[1]])
    assert done.exit_code == 0, done.output
    ways = {way["name"]: way for way in json.loads(Path(files[0]).read_text())["ways"]}
    speeds = {name: way["tokens_per_s"] for name, way in ways.items()}
    streamed = (None, None) if wrong else (2.0, 8.0)
    assert list(speeds.values()) == pytest.approx([*streamed, 12.5, 1 / 0.06, 25.0, None])
    assert ways["SubSpec"]["perplexity"] == pytest.approx(math.e)
    assert ways["SubSpec"]["agreement"] == 1.0
    assert ways["4 bits alone"]["perplexity"] == pytest.approx(math.exp(1.25))
    assert ways["4 bits alone"]["agreement"] == 7 / 9  # places 4 and 8 of 1 to 9
    assert "| mxfp4 alone | no kernel |" in done.output
    svg = ElementTree.parse(files[1])
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10
