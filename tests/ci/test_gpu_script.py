"""`ci/gpu` without a GPU: its dry run, and the gate before every figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SECTIONS = ["environment", "checks", "sanitizer", "roofline", "link", "method", "kernels"]
KERNELS = ["sharpened_topk", "grow_mask", "kv_compact", "tree_attention", "lowbit_linear"]
# What the project depends on, beside torch and Triton.
ABSENT = ["blake3", "gguf", "greenlet", "hqq", "httpx", "pydantic", "psutil", "rich", "tqdm"]
ABSENT += ["safetensors", "tokenizers", "transformers", "typer", "vllm", "pytest"]
BARE = f"""
import runpy, sys
sys.modules |= dict.fromkeys({ABSENT})  # importing one of them fails
sys.argv[0] = {str(ROOT / "ci" / "gpu")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rows_of(sections: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tables in sections.items():
        for rows in tables.values():
            yield from ((name, row) for row in rows)


def test_a_dry_run_with_torch_and_triton_alone(tmp_path: Path) -> None:
    told = tmp_path / "gpu.json"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [sys.executable, "-c", BARE, "--dry-run", "--json", str(told)]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(told.read_text())
    assert report["dry_run"]
    assert report["passed"]
    assert list(report["sections"]) == SECTIONS
    assert {name for name, _ in rows_of(report["sections"])} == set(SECTIONS)
    for name, row in rows_of(report["sections"]):
        assert not any(isinstance(value, float) for value in row.values()), (name, row)
    times = report["sections"]["kernels"]["Times"]
    assert {row["kernel"] for row in times if row["by"] == "ours"} == set(KERNELS)
    assert "# Dry run: nothing was measured" in done.stdout
    assert "| plain streaming | 1 | dry run | dry run |" in done.stdout


def wrong(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, off in one place."""

    def topk(*given: Any) -> Any:
        best = right(*given)
        return best._replace(tokens=best.tokens.roll(1, -1))

    def words(*given: Any) -> Any:
        return right(*given) ^ 1

    def nothing(*given: Any) -> None:
        """As if no row had moved."""

    def one_value(*given: Any, **named: Any) -> Any:
        out = right(*given, **named)
        out.flatten()[0] += 1
        return out

    by_name = {"sharpened_topk": topk, "grow_mask": words, "kv_compact": nothing}
    return by_name.get(name, one_value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_of_a_wrong_kernel_no_time_is_told(script: Any, kernel: str) -> None:
    right = getattr(script.checks.Operations(), kernel)
    broken = script.checks.Operations(**{kernel: wrong(kernel, right)})
    run = script.run(broken, "--only", "roofline,link,kernels", "--kernels", kernel)
    assert list(run.sections) == ["environment", "checks"]
    assert run.failures == ["kernels are wrong, so nothing is timed"]
    assert {row["kernel"] for row in run.sections["checks"]["What is wrong"]} == {kernel}
    assert not run.report()["passed"]
    assert "FAILED: kernels are wrong" in run.text()


def test_a_kernel_that_does_not_launch_is_wrong(script: Any) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    operations = script.checks.Operations(grow_mask=broken)
    run = script.run(operations, "--only", "checks", "--kernels", "grow_mask")
    problems = [row["problem"] for row in run.sections["checks"]["What is wrong"]]
    assert set(problems) == {"RuntimeError: out of resource: shared memory"}


def test_a_section_that_breaks_off_costs_the_run_its_verdict_alone(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(script.main, "measure_link", broken)
    run = script.run(None, "--only", "link,roofline", "--kernels", "grow_mask")
    assert list(run.sections) == ["environment", "checks", "roofline", "link"]
    assert "no room" in run.failures[0]
    assert not run.report()["passed"]


def test_the_method_asks_for_every_kernel(script: Any) -> None:
    operations = script.checks.Operations(grow_mask=lambda *given: given[0])
    run = script.run(operations, "--only", "method", "--kernels", "kv_compact")
    assert "method" not in run.sections


def test_sanitizer_errors_stop_the_run(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.main, "sanitize", lambda *given: [{"state": "errors"}])
    run = script.run(None, "--only", "sanitizer,link", "--kernels", "grow_mask")
    assert list(run.sections) == ["environment", "checks", "sanitizer"]
    assert run.failures == ["the sanitizer found errors, so nothing is timed"]


def test_the_limit_ends_a_run_that_hangs(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.main, "measure_link", lambda *given: time.sleep(60))
    given = ["--dry-run", "--only", "link", "--kernels", "grow_mask", "--limit-s", "0.5"]
    assert script.main.main(given) == 1
    assert "FAILED: stopped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "unknown: ['speed']; there are environment"),
        (["--tau", "50"], "tau 50 is out of reach"),
        (["--slots", "4"], "hold at least 5"),
        (["--residents", "28"], "stream at least one layer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_is_refused(
    script: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        script.main.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main.main([]) == 2
    assert "--dry-run" in capsys.readouterr().out
