"""A function in a process of its own."""

from __future__ import annotations

import os
import signal

import pytest

from vllm_subspec.errors import BudgetError
from vllm_subspec.tools.bench_process import WorkerError
from vllm_subspec.tools.own_process import in_own_process


def test_it_answers_from_elsewhere() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(sorted, [3, 1, 2]) == [1, 2, 3]


def test_its_errors_are_the_callers() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        in_own_process(int, "x")
    assert str(in_own_process(BudgetError, "too small")) == "too small"


def test_a_killed_process_is_an_error() -> None:
    with pytest.raises(WorkerError, match="exit status -9"):
        in_own_process(signal.raise_signal, signal.SIGKILL)
