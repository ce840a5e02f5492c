"""The README's tables of options and variables say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig

README = (Path(__file__).parents[2] / "README.md").read_text()


def rows_after(header: str) -> list[str]:
    """The rows of the table with this header line."""
    _, _, rest = README.partition(f"\n{header}\n")
    table = rest.split("\n\n")[0].splitlines()
    assert re.fullmatch(r"[|-]+", table[0]), f"no table with the header {header!r}"
    return table[1:]


def test_options_are_those_of_the_configuration() -> None:
    expected = []
    for name, field in SubSpecConfig.model_fields.items():
        default = json.dumps(field.default).strip('"').replace("null", "none")
        expected.append(f"| `{name}` | {default} | {field.description} |")
    assert rows_after("| option | default | effect |") == expected


def test_variables_are_those_that_are_read() -> None:
    source = Path(envs.__file__).read_text()
    read = set(re.findall(r'environ\.get\("(SUBSPEC_\w+)"', source))
    told = {row.split("`")[1] for row in rows_after("| variable | default | effect |")}
    assert read
    assert told == read


def test_examples_and_documents_it_links_to_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert {"examples/serve.sh", "examples/offline.py", "examples/embed_async.py"} <= set(links)
    root = Path(__file__).parents[2]
    assert [link for link in links if not (root / link).is_file()] == []


def test_no_placeholder_or_machine_path_is_left() -> None:
    assert "@@" not in README
    assert re.findall(r"(?:^|[\s`'\"])/(?:root|home|work|tmp)/\S+", README) == []
