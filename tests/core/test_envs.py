"""Every environment variable is read in one file, and documented there."""

from __future__ import annotations

import ast
import inspect
import os
import re
from pathlib import Path

import pytest

import vllm_subspec
from vllm_subspec import envs
from vllm_subspec.errors import ConfigError

PACKAGE = Path(vllm_subspec.__file__).parent


def variables_read(source: str) -> set[str]:
    """String literals that name an environment variable."""
    texts = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant))
    return {
        t for t in texts if isinstance(t, str) and re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", t)
    }


def test_each_variable_is_documented_where_it_is_read() -> None:
    found = set()
    for function in vars(envs).values():
        if inspect.isfunction(function):
            names = variables_read(inspect.getsource(function))
            assert names, f"{function.__name__} reads no variable"
            for name in names:
                assert f"``{name}" in (function.__doc__ or ""), f"{name} is not documented"
            found |= names
    assert found >= {"SUBSPEC_CACHE", "XDG_CACHE_HOME", "SUBSPEC_ALLOW_UNTESTED_VLLM"}


def test_a_user_s_count_of_kernels_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.setenv(name, "7")
    envs.limit_onednn_kernels(64)
    assert [os.environ[name] for name in names] == ["7", "7"]
    for name in names:
        monkeypatch.delenv(name)
    envs.limit_onednn_kernels(64)
    assert [os.environ[name] for name in names] == ["64", "64"]


def test_no_other_file_reads_the_environment() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path != Path(envs.__file__):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
                assert name not in ("environ", "environb", "getenv", "putenv"), path


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSPEC_CACHE", "/explicit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert envs.cache_dir() == Path("/explicit")
    monkeypatch.setenv("SUBSPEC_CACHE", "")
    assert envs.cache_dir() == Path("/xdg/vllm-subspec")
    monkeypatch.delenv("SUBSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.cache_dir() == Path("/home/somebody/.cache/vllm-subspec")


@pytest.mark.parametrize("value", ["cache", "./cache", "~/cache", "~"])
def test_a_cache_that_depends_on_where_one_stands(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBSPEC_CACHE", value)
    with pytest.raises(ConfigError, match=f"SUBSPEC_CACHE is '{value}': give an absolute path"):
        envs.cache_dir()
    monkeypatch.delenv("SUBSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.cache_dir() == Path("/home/somebody/.cache/vllm-subspec")


@pytest.mark.parametrize(("value", "allowed"), [("1", True), ("0", False), ("", False)])
def test_allow_untested_vllm(value: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSPEC_ALLOW_UNTESTED_VLLM", value)
    assert envs.allow_untested_vllm() is allowed
    monkeypatch.delenv("SUBSPEC_ALLOW_UNTESTED_VLLM")
    assert envs.allow_untested_vllm() is False


@pytest.mark.parametrize("value", ["true", "yes", "2", " 1"])
def test_neither_yes_nor_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSPEC_ALLOW_UNTESTED_VLLM", value)
    with pytest.raises(ConfigError, match=f"SUBSPEC_ALLOW_UNTESTED_VLLM is '{value}': set it to 1"):
        envs.allow_untested_vllm()
