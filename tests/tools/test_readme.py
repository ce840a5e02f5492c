"""The README's tables, commands and links say what the code says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import typer.main

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError
from vllm_subspec.tools.bench_modes import MODES
from vllm_subspec.tools.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def rows_after(header: str) -> list[str]:
    """The rows of the table with this header line."""
    _, _, rest = README.partition(f"\n{header}\n")
    table = rest.split("\n\n")[0].splitlines()
    assert re.fullmatch(r"[|-]+", table[0]), f"no table with the header {header!r}"
    return table[1:]


def default_of(name: str) -> str:
    """As the table writes it: "auto" where leaving the option out means the same as that word."""
    default = SubSpecConfig.model_fields[name].default
    if default is not None:
        return json.dumps(default).strip('"')
    try:
        return "none" if getattr(SubSpecConfig(**{name: "auto"}), name) else "auto"
    except ConfigError:
        return "none"


def test_options_are_those_of_the_configuration() -> None:
    expected = [
        f"| `{name}` | {default_of(name)} | {field.description} |"
        for name, field in SubSpecConfig.model_fields.items()
    ]
    assert rows_after("| option | default | effect |") == expected


def test_variables_are_those_that_are_read() -> None:
    source = Path(envs.__file__).read_text()
    read = set(re.findall(r'environ\.get\("(SUBSPEC_\w+)"', source))
    told = {row.split("`")[1] for row in rows_after("| variable | default | effect |")}
    assert read
    assert told == read


def test_features_name_tests_that_exist() -> None:
    rows = [row.strip("| ").split(" | ") for row in rows_after("| feature | how it runs | test |")]
    assert len(rows) > 20
    for feature, how, test in rows:
        assert re.match(r"exact\b|(chain|undrafted|refused): \w", how), feature
        path, name, parameter = re.fullmatch(r"`(\S+\.py)::(\w+)(?:\[(\S+)\])?`", test).groups()  # type: ignore[union-attr]
        tree = ast.parse((ROOT / "tests" / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert parameter is None or parameter in texts, test


def test_options_of_a_request_are_those_that_are_read() -> None:
    source = (ROOT / "vllm_subspec" / "integration" / "request_options.py").read_text()
    known = re.search(r"^KNOWN = (\(.*\))$", source, re.MULTILINE)
    assert known is not None
    told = {row.split('"')[1] for row in rows_after("| option of a request | effect |")}
    assert told == set(ast.literal_eval(known[1]))


def test_benchmark_modes_are_those_of_the_benchmark() -> None:
    expected = [f"| `{mode.name}` | {mode.meaning} |" for mode in MODES.values()]
    assert rows_after("| mode | meaning |") == expected


def test_commands_it_shows_exist_with_their_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    told = set(re.findall(r"vllm-subspec ([a-z][a-z-]*)", README))
    assert {"plan", "doctor", "bench"} <= told <= set(commands)
    _, _, example = README.partition("\nvllm-subspec bench ")
    options = set(re.findall(r"--[a-z-]+", example.split("```")[0]))
    known = {opt for parameter in commands["bench"].params for opt in parameter.opts}
    assert options
    assert options <= known


def test_settings_it_shows_are_valid() -> None:
    shown = re.findall(r'\{"method": "subspec"(?:, "[^}]*)?\}', README)
    assert shown
    for text in shown:
        SubSpecConfig(**{name: v for name, v in json.loads(text).items() if name != "method"})


def test_examples_and_documents_it_links_to_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert {"examples/serve.sh", "examples/offline.py", "examples/embed_async.py"} <= set(links)
    headings = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
    assert [link for link in links if not (ROOT / link).is_file() and link not in anchors] == []


def test_folders_of_the_layout_exist_and_none_is_missing() -> None:
    told = [row.split("`")[1] for row in rows_after("| folder | duty |")]
    assert [path for path in told if not (ROOT / path).exists()] == []
    package = ROOT / "vllm_subspec"
    rooms = {f"vllm_subspec/{path.parent.name}" for path in package.glob("*/__init__.py")}
    assert rooms <= set(told)


def test_no_placeholder_or_machine_path_is_left() -> None:
    assert "@@" not in README
    assert re.findall(r"(?:^|[\s`'\"])/(?:root|home|work|tmp)/\S+", README) == []
