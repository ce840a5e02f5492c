"""Fixtures that every room's tests share, and how `pytest -n auto` divides the machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

MOST_WORKERS = 4
BYTES_PER_WORKER = 3 << 30
"""An engine in a test's own process, a second one beside it, and the models that it wrote."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: one a core, while there is memory for them."""
    by_memory = psutil.virtual_memory().available // BYTES_PER_WORKER
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)), by_memory))


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker its own share of the cores, before torch or vLLM count them.

    OpenMP makes one thread a core that it sees, and vLLM binds one to each: with all cores in
    every worker they would wait for each other at each barrier. Children inherit the share.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        index, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[index::count] or cores)
        # Of the torch that is in this process already, if any; OpenMP itself has not begun.
        os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))


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

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker's own lies in that of the session
    with FileLock(base / f"{name}.lock"):  # the first worker that needs it writes it for all
        write_example_model(base / name, ExampleModel(dtype="float32", num_layers=num_layers))
    return base / name
