"""The core needs torch only (design D8), and rooms import along the arrows of the design."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_subspec

PACKAGE = Path(vllm_subspec.__file__).parent
FREE = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "loop"}
MAY_IMPORT = {
    "plan": FREE | {"draft.tree", "draft.tuning"},
    "shadow": FREE | {"plan"},
    "stream": FREE,
    "draft": FREE,
    "verify": FREE | {"draft.tree"},
    "machine": FREE | {"plan", "shadow", "stream"},
    "loop": FREE | {"plan", "shadow", "stream", "draft", "verify"},
}
ABOVE = {"__init__", "integration", "tools"}
CORE = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in ABOVE
]


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it, ``from a import b`` as ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_all_rooms_are_looked_at() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in CORE}
    assert rooms >= {*MAY_IMPORT, "config", "errors", "envs", "files"}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_never_imports_vllm(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_import_along_the_arrows(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT.get(room, FREE) | {room}
    for name in imports(path):
        if name.startswith("vllm_subspec."):
            target = name.removeprefix("vllm_subspec.")
            assert any(target == a or target.startswith(f"{a}.") for a in allowed), name


def test_the_kernels_import_torch_only() -> None:
    """Torch, that is, and what comes with Python."""
    kernels = importlib.import_module("subspec_kernels")
    paths = list(Path(kernels.__file__ or "").parent.rglob("*.py"))
    assert {path.parent.name for path in paths} > {"tree_attention", "kv_cache", "lowbit_linear"}
    allowed = {"torch", "triton", "subspec_kernels"} | sys.stdlib_module_names
    for path in paths:
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None
import vllm_subspec, vllm_subspec.loop
from vllm_subspec import SubSpecConfig
SubSpecConfig(width=2)
import vllm_subspec.plan, vllm_subspec.shadow, vllm_subspec.stream, vllm_subspec.tools.cli
heavy = {"transformers", "hqq", "triton", "gguf"} & set(sys.modules)
assert not heavy, heavy
try:
    vllm_subspec.SubstituteProposer
except ImportError:
    print("ok", vllm_subspec.__version__)
"""


def test_the_core_works_where_vllm_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok 0.")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vllm_subspec' has no attribute 'Nothing'"):
        vllm_subspec.Nothing  # noqa: B018
    assert set(vllm_subspec.__all__) <= set(dir(vllm_subspec))
