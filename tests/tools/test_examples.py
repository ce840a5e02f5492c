"""The deployment examples say what the package does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.plan import parse_budget
from vllm_subspec.tools.bench_process import RUNTIME_ALLOWANCE_BYTES

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    (service,) = compose["services"].values()
    return dict(service)


def test_the_one_argument_is_valid(service: dict[str, Any]) -> None:
    (argument,) = [a for a in service["command"] if a.startswith("--speculative-config=")]
    options = json.loads(argument.partition("=")[2])
    assert options.pop("method") == "subspec"
    assert SubSpecConfig(**options).memory_budget is not None


def test_the_container_has_the_budget_and_the_allowance(service: dict[str, Any]) -> None:
    (argument,) = [a for a in service["command"] if a.startswith("--speculative-config=")]
    budget = parse_budget(json.loads(argument.partition("=")[2])["memory_budget"], 0)
    number, unit = service["mem_limit"][:-1], service["mem_limit"][-1]
    assert unit == "g"  # compose's word for GiB
    assert int(number) << 30 == budget + RUNTIME_ALLOWANCE_BYTES
    assert service["memswap_limit"] == service["mem_limit"]  # of memory and swap together


def test_the_cache_outlives_the_container(service: dict[str, Any]) -> None:
    mounted = [volume.split(":")[1] for volume in service["volumes"]]
    assert service["environment"]["SUBSPEC_CACHE"] in mounted


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o100


def test_an_unknown_client_is_named() -> None:
    command = ["bash", str(EXAMPLES / "clients.sh"), "nobody", "model"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no client is called nobody: openai, bench, lm-eval or guidellm" in done.stderr
