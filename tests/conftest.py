"""Fixtures that every room's tests share: real models, written once a session, offline."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def example_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, whole, float32 (540 MB): it writes sensible English."""
    return _write(tmp_path_factory, "smollm2-135m", num_layers=None)


@pytest.fixture(scope="session")
def small_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its first 4 layers only, float32 (170 MB): real weights, senseless text."""
    return _write(tmp_path_factory, "smollm2-4-layers", num_layers=4)


def _write(tmp_path_factory: pytest.TempPathFactory, name: str, num_layers: int | None) -> Path:
    from vllm_subspec.tools.example_model import ExampleModel, write_example_model

    directory = tmp_path_factory.mktemp("models") / name
    write_example_model(directory, ExampleModel(dtype="float32", num_layers=num_layers))
    return directory
