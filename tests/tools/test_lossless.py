"""The losslessness protocol, with a tiny model in the engines' place that can lie on demand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from vllm_subspec.errors import ConfigError
from vllm_subspec.tools import lossless, lossless_command
from vllm_subspec.tools.audit import sampling_noise
from vllm_subspec.tools.cli import app
from vllm_subspec.tools.lossless import Protocol
from vllm_subspec.tools.lossless_asks import DRAWN_TOKENS, OPENINGS, Plan, Texts
from vllm_subspec.tools.lossless_command import Request
from vllm_subspec.tools.lossless_control import MUST_FAIL, WRONG_SAMPLERS
from vllm_subspec.tools.lossless_report import write_page
from vllm_subspec.tools.lossless_worker import Ask
from vllm_subspec.tools.questions import load_questions

VOCAB = 32
TEXTS = Texts(
    chats=[[1, 2, index] for index in range(6)],
    questions=[[3, index % VOCAB] for index in range(60)],
    openings={text: [5, 6, 7 + index] for index, text in enumerate(OPENINGS)},
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(12)
    return made


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    return path


class Engines:
    """Answers jobs as three engines would; ``lie`` changes what the judged one says."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self.jobs: list[Mapping[str, Any]] = []
        self.control_is_right = False
        self.drafts = True
        self.cooling = 1.0
        self.slip = False

    def run_job(
        self, worker: Sequence[str], job: Mapping[str, Any], log: Path
    ) -> tuple[dict[str, Any], dict[str, int]]:
        self.jobs.append(job)
        asks = {name: Ask(**ask) for name, ask in job["asks"].items()}
        # The same seed would make the control's draws a part of the judged ones.
        torch.manual_seed(len(self.jobs))
        return {name: self._tell(name, ask) for name, ask in asks.items()}, {}

    @torch.inference_mode()
    def _tell(self, name: str, ask: Ask) -> dict[str, Any]:
        told: dict[str, Any] = {"texts": [], "laws": [], "rescored": []}
        wrong = "" if self.control_is_right else ask.wrong
        lies = "laws" not in self.jobs[-1]["asks"] and not ask.wrong
        if ask.laws:
            told["laws"] = self._laws(ask.prompts, ask.laws)
            told["tokens"] = [[0]] * len(ask.prompts)
        elif name.endswith("unseeded"):
            cooling = self.cooling if lies else 1.0
            told["tokens"] = self._draw(ask, 2.0 if wrong else cooling)
        else:
            told["tokens"] = [self._text(ask, row, bool(wrong)) for row in range(len(ask.prompts))]
        if lies and self.slip and name == "greedy":
            told["tokens"][2][4] = (told["tokens"][2][4] + 1) % VOCAB
        if ask.rescore:
            told["laws"] = told["rescored"] = [
                self._laws([[*prompt, *tokens]], len(tokens))[0]
                for prompt, tokens in zip(ask.prompts, told["tokens"], strict=True)
            ]
        if name == "tasks":
            told["texts"] = ["12" for _ in ask.prompts]
        count = sum(len(tokens) - 1 for tokens in told["tokens"])
        accepted = count // 2 if self.drafts else 0
        told["statistics"] = {"committed_tokens": count, "accepted_by_level": [accepted]}
        return told

    def _logits(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._model(torch.tensor(tokens)).logits

    def _text(self, ask: Ask, row: int, wrong: bool) -> list[int]:
        temperature = ask.params["temperature"]
        noise = sampling_noise(ask.seeds, temperature) if temperature else None
        tokens = list(ask.prompts[row])
        for position in range(min(8, ask.params["max_tokens"])):
            scores = self._logits([tokens])[0, -1]
            if noise is not None:
                scores = scores + noise(row, position, VOCAB)
            tokens.append(int(scores.argmin() if wrong else scores.argmax()))
        return tokens[len(ask.prompts[row]) :]

    def _draw(self, ask: Ask, cooling: float) -> list[list[int]]:
        tokens = torch.tensor(ask.prompts)
        for _ in range(DRAWN_TOKENS):
            law = (self._model(tokens).logits[:, -1] * cooling).softmax(-1)
            tokens = torch.cat([tokens, law.multinomial(1)], dim=1)
        return tokens[:, -DRAWN_TOKENS:].tolist()

    def _laws(self, texts: Sequence[Sequence[int]], count: int) -> list[Any]:
        best = self._logits(texts)[:, -count - 1 : -1].log_softmax(-1).topk(20)
        each = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [list(zip(*law, strict=True)) for law in each]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM) -> Engines:
    made = Engines(model)
    monkeypatch.setattr(lossless, "run_job", made.run_job)
    return made


def run(folder: Path, *dtypes: str, draws: int = 200) -> dict[str, Any]:
    protocol = Protocol(folder, Plan(TEXTS, draws), dtypes or ("float32",), {"bits": 4})
    return protocol.run(lambda text: None)


def failed(report: Mapping[str, Any], dtype: str = "float32") -> list[str]:
    checks = report["dtypes"][dtype]["checks"]
    return [name for name, check in checks.items() if not check["passed"]]


@pytest.fixture(scope="module")
def passed_report(model: LlamaForCausalLM, folder: Path) -> dict[str, Any]:
    """Of engines that tell the truth, in both dtypes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless, "run_job", Engines(model).run_job)
        return run(folder, "float32", "bfloat16", draws=400) | {"provenance": {"commit": "<none>"}}


def test_a_lossless_engine_passes_and_the_control_does_not(passed_report: dict[str, Any]) -> None:
    assert passed_report["passed"]
    for dtype, found in passed_report["dtypes"].items():
        assert failed(passed_report, dtype) == []
        assert found["missed"] == []
        assert {
            name: tuple(control["checks"]) for name, control in found["controls"].items()
        } == MUST_FAIL
        assert all(
            check["found_fault"]
            for control in found["controls"].values()
            for check in control["checks"].values()
        )
        agreement = found["checks"]["greedy"]
        assert (agreement["answers"], agreement["tokens"]) == (6, 48)
        assert len(found["gaps"]) == 48
        assert found["rounding_per_draw"] == 0.0
    json.dumps(passed_report, allow_nan=False)


def test_each_engine_has_its_process_and_only_the_control_a_wrong_sampler(
    engines: Engines, folder: Path
) -> None:
    assert run(folder, "float32", "bfloat16", draws=100)["dtypes"].keys() == {"float32", "bfloat16"}
    judged, control, reference = engines.jobs[:3]
    assert [job["arguments"]["dtype"] for job in engines.jobs] == ["float32"] * 3 + ["bfloat16"] * 3
    assert judged["arguments"]["speculative_config"] == {"method": "subspec", "bits": 4}
    assert control["arguments"] == judged["arguments"]
    assert "speculative_config" not in reference["arguments"]
    assert all(ask["policy"]["noise_coupling"] is False for ask in control["asks"].values())
    # Live tuning may find that many requests at once pay for no tree: so theirs is fixed.
    assert {name: ask["policy"] for name, ask in judged["asks"].items()} == {
        "greedy": {},
        "seeded": {"depth": 8},
        "unseeded": {"depth": 8},
        "tasks": {"depth": 8},
    }
    assert {str(ask["policy"]) for ask in reference["asks"].values()} == {"{}"}
    wrong = {ask["wrong"] for job in (judged, reference) for ask in job["asks"].values()}
    assert wrong == {""}
    assert {ask["wrong"] for ask in control["asks"].values()} == set(WRONG_SAMPLERS)
    # Alone a request drafts during its pass; many share one. Both ways are asked.
    assert {name: ask["alone"] for name, ask in judged["asks"].items()} == {
        "greedy": True,
        "seeded": False,
        "unseeded": False,
        "tasks": False,
    }


def test_a_model_that_does_not_fit_is_compared_with_plain_streaming(
    engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "device_memory_bytes", lambda: 1 << 30)
    report = run(folder, draws=100)
    assert report["dtypes"]["float32"]["reference"] == "plain streaming"
    options = {"method": "subspec", "bits": 4, "speculate": False}
    assert engines.jobs[2]["arguments"]["speculative_config"] == options


def test_one_wrong_token_fails_in_float32_however_near(
    engines: Engines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_subspec.tools import audit

    monkeypatch.setattr(audit, "TOLERATED_ROUNDOFFS", 1e6)
    engines.slip = True
    report = run(folder)
    assert not report["passed"]
    assert failed(report) == ["greedy"]
    [divergence] = report["dtypes"]["float32"]["checks"]["greedy"]["divergences"]
    assert (divergence["prompt"], divergence["position"]) == (2, 4)


@pytest.mark.parametrize(("tolerated", "fails"), [(1e6, []), (0.0, ["greedy"])])
def test_a_difference_in_bfloat16_is_audited(
    engines: Engines,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tolerated: float,
    fails: list[str],
) -> None:
    from vllm_subspec.tools import audit

    monkeypatch.setattr(audit, "TOLERATED_ROUNDOFFS", tolerated)
    engines.slip = True
    report = run(folder, "bfloat16", draws=100)
    assert failed(report, "bfloat16") == fails
    assert len(report["dtypes"]["bfloat16"]["checks"]["greedy"]["divergences"]) == 1


def test_another_temperature_fails(engines: Engines, folder: Path) -> None:
    engines.cooling = 1.3
    report = run(folder, draws=400)
    assert not report["passed"]
    assert failed(report) == ["unseeded"]


def test_a_control_that_passes_fails_the_run(engines: Engines, folder: Path) -> None:
    engines.control_is_right = True
    report = run(folder, draws=100)
    assert failed(report) == []
    assert not report["passed"]
    assert report["dtypes"]["float32"]["missed"] == [
        f"{wrong} {check}" for wrong, checks in MUST_FAIL.items() for check in checks
    ]


def test_answers_without_a_tree_prove_nothing(engines: Engines, folder: Path) -> None:
    engines.drafts = False
    report = run(folder, draws=100)
    assert failed(report) == ["greedy", "seeded", "unseeded", "tasks"]


class Page(HTMLParser):
    """Everything in a page that could make a browser ask somebody."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        given = {name: value or "" for name, value in attrs}
        if tag == "img":
            self.images.append(given["src"])
        for name in ("href", "src", "srcset", "action", "data", "poster", "background"):
            self.references += [given[name]] if name in given else []


def test_the_page_has_its_plots_and_asks_nobody(
    passed_report: dict[str, Any], tmp_path: Path
) -> None:
    import base64
    from xml.etree import ElementTree

    write_page(passed_report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.references == page.images
    assert len(page.images) == 8  # four for each dtype
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"https?:|@import|url\(", text)
    for image in page.images:
        kind, _, data = image.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = ElementTree.fromstring(base64.b64decode(data))
        paths = list(svg.iter("{http://www.w3.org/2000/svg}path"))
        assert len(paths) > 10
        links = [v for e in svg.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)
    assert "&lt;none&gt;" in text  # what is told is escaped
    assert text.count("passed</span>") == 1 + 2 * (1 + 4)
    assert "FAILED" not in text


def test_the_page_of_a_failed_run_says_so(engines: Engines, folder: Path, tmp_path: Path) -> None:
    engines.slip = engines.control_is_right = True
    report = run(folder, draws=100) | {"provenance": {}}
    write_page(report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "FAILED</span>" in text
    assert '<span class="failed">NO</span>' in text


def ask_cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


def test_exit_status_and_files(
    engines: Engines, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless_command.Texts, "read", lambda model: TEXTS)
    files = [str(tmp_path / name) for name in ("r.json", "r.html")]
    arguments = [str(folder), "--dtype", "float32", "--draws", "200", "--json", files[0]]
    done = ask_cli(*arguments, "--html", files[1])
    assert done.exit_code == 0, done.output
    assert "PASSED: tiny, float32" in done.output
    report = json.loads(Path(files[0]).read_text())
    assert report["passed"]
    assert {"commit", "versions", "command_line"} <= report["provenance"].keys()
    assert Path(files[1]).stat().st_size > 10_000
    engines.slip = True
    failure = ask_cli(*arguments)
    assert failure.exit_code == 1
    assert "greedy: FAILED" in failure.output
    assert "FAILED: tiny, float32" in failure.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": ["float16"]}, "--dtype float16: give float32 or bfloat16"),
        ({"dtypes": ["float32", "float32"]}, "each at most once"),
        ({"options": '{"noise_coupling": false}'}, "leave noise_coupling out"),
        ({"options": '{"widht": 2}'}, "did you mean 'width'"),
        ({"model": Path("nowhere")}, "nowhere"),
    ],
    ids=["dtype", "twice", "fixed option", "unknown option", "no model"],
)
def test_wrong_values_are_refused_before_anything_runs(
    engines: Engines, folder: Path, changes: dict[str, Any], message: str
) -> None:
    request = Request(folder, (), 100, "{}", None, None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(request, **changes).protocol()
    assert engines.jobs == []


def test_a_depth_that_was_given_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless_command.Texts, "read", lambda model: TEXTS)
    for options, policy in (
        ("{}", {"depth": 8}),
        ('{"depth": 4}', {}),
        ('{"preset": "subspec"}', {}),
    ):
        plan = Request(folder, (), 200, options, None, None).protocol().plan
        assert plan.of_judged["unseeded"].policy == policy


def test_a_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer that can be read"):
        Texts.read(folder)


def test_texts_are_those_of_the_models_tokenizer(small_model_dir: Path) -> None:
    texts = Texts.read(small_model_dir)
    assert len(texts.questions) == len(load_questions())
    assert len({tuple(prompt) for prompt in [*texts.chats, *texts.questions]}) == 72
    assert all(len(opening) < 10 for opening in texts.openings.values())
    assert {len(prompt) > 10 for prompt in texts.chats} == {True}
