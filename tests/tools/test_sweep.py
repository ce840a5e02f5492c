"""The sweep's grid, file, arithmetic and report, and its course with an engine that makes up."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vllm_subspec.draft.replay import Pass, _walk
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import Placement
from vllm_subspec.plan.alignment import expected_tau, loss_of
from vllm_subspec.plan.machine import DEFAULT
from vllm_subspec.tools import sweep, sweep_command
from vllm_subspec.tools.cli import app
from vllm_subspec.tools.sweep_file import Results, matching
from vllm_subspec.tools.sweep_grid import AXES, Grid, Setting, parse_list

VALUES: dict[str, Sequence[Any]] = {
    "bits": (6, 4, "mxfp4"),
    "group_size": (64, 32),
    "resident_layers": (0, 1),
    "width": (4, 1),
    "draft_temperature": (0.2,),
    "temperature": (0.0, 1.0),
}
BASE = {"bits": 6, "width": 4, "draft_temperature": 0.2, "temperature": 0.0}
REACHES = {2: 1, 3: 2, 4: 3, "mxfp4": 3, 6: 9, 8: 12, "planned": 10}  # levels, by bits


class Engine:
    """Trees as wide as 1 reach half as far; nothing else matters here."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.bits = options.get("bits", "planned")
        resident = options.get("resident_layers", 1)
        bits = (self.bits,) * (2 - resident) + (None,) * resident
        streamed = tuple(range(2 - resident))
        self.placement = Placement(2, streamed, 3, bits, head_bits=8)
        self.shadow_bytes = 1000 * REACHES[self.bits]

    def write(self, prompts: Sequence[str], new_tokens: int, temperature: float) -> Any:
        return [([1, 2, *range(new_tokens)], 2) for _ in prompts]

    def replay(
        self, texts: Any, temperature: float, width: int, draft_temperature: float, depths: Any
    ) -> Any:
        reach = REACHES[self.bits] // (2 if width == 1 else 1)
        return [
            [
                _walk(len(tokens) - first, depth, lambda _, levels: min(reach, levels))
                for depth in depths
            ]
            for tokens, first in texts
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, dtype="bfloat16",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of the engines that were started."""
    options: list[dict[str, Any]] = []

    @contextmanager
    def engine(model: Path, given: dict[str, Any], at_once: int, new_tokens: int) -> Any:
        assert at_once == (1 if "memory_budget" in given else 3)
        options.append(given)
        yield Engine(given)

    monkeypatch.setattr(sweep, "replay_engine", engine)
    monkeypatch.setattr(sweep, "in_own_process", lambda work, *args: work(*args))
    monkeypatch.setattr(sweep_command, "measure_anew", lambda *_: DEFAULT)
    return options


def run(folder: Path, file: Path, *more: str) -> Any:
    arguments = ["sweep", str(folder), str(file), "--bits", "6,4,mxfp4", "--depth", "8,2"]
    return CliRunner().invoke(app, [*arguments, "--prompts", "3", "--new-tokens", "20", *more])


def test_as_many_axes_as_asked_for_differ_from_the_base() -> None:
    one = Grid(VALUES, (2, 8), 1)
    assert one.base == Setting(6, 64, 0, 4, 0.2, 0.0)
    assert one.settings()[0] == one.base
    assert len(one.settings()) == 1 + 2 + 1 + 1 + 1 + 1
    everything = Grid(VALUES, (2, 8), 6).settings()
    assert len(everything) == (2 * 2 + 1) * 2 * 2 * 2  # mxfp4 has groups of 32 only
    assert {s.group_size for s in everything if s.bits == "mxfp4"} == {32}
    shadows = [setting.shadow for setting in everything]
    changes = sum(a != b for a, b in pairwise(shadows))
    assert changes == len(set(shadows)) - 1  # each needs one engine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": (6, 7)}, "bits"),
        ({"width": (4, 4)}, "width is .*each once"),
        ({"temperature": (0.0, -1.0)}, "temperature -1.0"),
        ({"draft_temperature": (0.0,)}, "draft_temperature"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(VALUES | change, (2, 8), 1)


def test_lists_of_options() -> None:
    assert parse_list("bits", "6, mxfp4,planned", int) == (6, "mxfp4", "planned")
    with pytest.raises(ConfigError, match="no format of 5 bits"):
        parse_list("bits", "4,5", int)
    with pytest.raises(ConfigError, match="width: 'wide' is no int"):
        parse_list("width", "4,wide", int)


def test_a_sweep_ends_and_resumes(
    folder: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    file = tmp_path / "sweep.jsonl"
    done = run(folder, file)
    assert done.exit_code == 0, done.output
    assert [options["bits"] for options in started] == [6, 4, "mxfp4"]
    points = Results.read(file).of_kind("point")
    assert len(points) == 2 * (3 + 2 + 1 + 2)  # bits, widths, T_d, temperatures; two depths each
    (deep,) = matching(points, depth=8, **BASE)
    assert deep["tau"] == 19 / 3  # nine, nine, and the last one
    assert deep["acceptance_by_level"] == [1.0] * 8
    assert deep["tau_interval"] == [19 / 3, 19 / 3]
    (shallow,) = matching(points, bits=4, width=4, depth=2, temperature=0.0)
    assert shallow["tau"] == pytest.approx(19 / 7)
    assert "| 6 bits | " in done.output
    assert "| mxfp4 (no kernel) | " in done.output

    whole = file.read_text().splitlines(keepends=True)
    torn = [line for line in whole if '"mxfp4"' not in line]
    file.write_text("".join(torn) + whole[-2][:40])
    started.clear()
    assert run(folder, file).exit_code == 0
    assert [options["bits"] for options in started] == ["mxfp4"]
    again = Results.read(file).of_kind("point")
    assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, points))
    started.clear()
    assert run(folder, file).exit_code == 0
    assert not started

    assert run(folder, file, "--depth", "2,4,8").exit_code == 0
    (deeper,) = matching(Results.read(file).of_kind("point"), depth=4, **BASE)
    assert deeper["tau"] == 19 / 4
    assert len(Results.read(file).of_kind("point")) == 3 * len(points) // 2


def test_results_of_something_else_are_refused(
    folder: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    file = tmp_path / "sweep.jsonl"
    run(folder, file)
    before = file.read_text()
    done = run(folder, file, "--new-tokens", "21")
    assert "measured with new_tokens 20, this would be with 21" in str(done.exception)
    head = json.loads(before.splitlines()[0])
    head["identity"]["versions"]["torch"] = "0"
    file.write_text("\n".join([json.dumps(head), *before.splitlines()[1:]]) + "\n")
    assert "measured with versions" in str(run(folder, file).exception)
    file.write_text("{}\n")
    assert "no result of a sweep" in str(run(folder, file).exception)


def test_what_needs_a_budget_says_so(folder: Path, tmp_path: Path) -> None:
    for more in (("--bits", "planned"), ("--measure", "1")):
        done = run(folder, tmp_path / "f", *more)
        assert "add --budget" in str(done.exception)
    done = run(folder, tmp_path / "f", "--resident-layers", "0,2")
    assert "MODEL has 2 layers" in str(done.exception)


def test_planned_bits_and_measured_points(
    folder: Path, tmp_path: Path, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[Any] = []

    class Bench:
        def __init__(self, work: Any, asked: Sequence[Any], repeats: int, timeline: bool) -> None:
            modes.extend(asked)
            assert work.budget_bytes == 10**9

        def rounds(self, say: Any) -> Iterator[dict[str, Any]]:
            figures = (
                "decode_tokens_per_s",
                "acceptance_length",
                "draft_step_ms",
                "target_pass_ms",
            )
            told = {name: {"median": 2.0} for name in figures}
            yield {"gate": {"passed": True}, "modes": {mode.name: told for mode in modes}}

    monkeypatch.setattr(sweep, "Bench", Bench)
    file = tmp_path / "sweep.jsonl"
    more = ["--bits", "4,planned", "--budget", "1GB", "--measure", "2"]
    done = run(folder, file, *more)
    assert done.exit_code == 0, done.output
    assert started[1]["memory_budget"] == 10**9
    assert "bits" not in started[1]
    assert modes[0].name == "plain"
    assert [mode.options["bits"] for mode in modes[1:]] == [4, 4]
    assert all(m.options["max_nodes"] == m.options["width"] * m.options["depth"] for m in modes[1:])
    results = Results.read(file)
    assert len(results.of_kind("measured")) == 2
    planned = matching(results.of_kind("point"), bits="planned")
    assert {point["resident_layers"] for point in planned} == {1}
    assert "measured: 4 bits" in done.output
    run(folder, file, *more)
    assert len(modes) == 6
    measured = Results.read(file).of_kind("measured")
    assert len({json.dumps([r[name] for name in (*AXES, "depth")]) for r in measured}) == 4


class Page(HTMLParser):
    """References and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        found = [value for name, value in attrs if name in ("src", "href", "data", "action")]
        self.references += found
        self.images += found if tag == "img" else []


def test_the_page_has_its_plots_and_asks_nobody(
    folder: Path, tmp_path: Path, started: list[dict[str, Any]]
) -> None:
    page_file, plots = tmp_path / "sweep.html", tmp_path / "plots"
    done = run(folder, tmp_path / "f.jsonl", "--html", str(page_file), "--plots", str(plots))
    assert done.exit_code == 0, done.output
    text = page_file.read_text()
    page = Page(text)
    assert page.references == page.images
    assert len(page.images) == len(list(plots.glob("*.svg"))) == 7
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"https?:|@import|url\(", text)
    for image in page.images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = ElementTree.fromstring(base64.b64decode(data))
        assert len(list(svg.iter("{http://www.w3.org/2000/svg}path"))) > 10


def test_the_loss_behind_a_tau() -> None:
    shape = TreeShape(4, 16)
    for loss in (0.01, 0.1, 1.0):
        assert loss_of(expected_tau(loss, shape), shape) == pytest.approx(loss)
    assert loss_of(17.5, shape) < 1e-5
    assert loss_of(1.0, shape) == 50.0


def test_a_level_that_no_tree_had_has_no_share() -> None:
    from vllm_subspec.tools.sweep_points import _by_level

    texts = [[Pass(3, 3), Pass(2, 1)], [Pass(3, 0)]]
    assert _by_level(texts, 8) == [2 / 3, 1 / 3, 1 / 2]
