"""Budgets in all their forms, and the memory of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import device_memory_bytes, parse_budget
from vllm_subspec.plan.budget import divided

TOTAL = 1_000_000_007
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@settings(deadline=None, max_examples=60)
@given(hundredths=st.integers(100, 10**6), unit=st.sampled_from(sorted(UNITS)), gap=st.booleans())
def test_a_size_with_its_unit(hundredths: int, unit: str, gap: bool) -> None:
    text = f"{hundredths // 100}.{hundredths % 100:02}{' ' * gap}{unit}"
    assert parse_budget(text, TOTAL) == hundredths * UNITS[unit] // 100


@settings(deadline=None, max_examples=60)
@given(percent=st.integers(1, 100))
def test_shares_of_the_total_agree_in_every_form(percent: int) -> None:
    expected = TOTAL * percent // 100
    assert parse_budget(f"{percent}%", TOTAL) == expected
    assert parse_budget(percent / 100, TOTAL) == expected
    assert parse_budget(f"{percent / 100:.2f}", TOTAL) == expected


@settings(deadline=None, max_examples=60)
@given(count=st.integers(2, 10**15))
def test_whole_bytes(count: int) -> None:
    assert parse_budget(count, TOTAL) == count
    assert parse_budget(str(count), TOTAL) == count


def test_auto_is_seven_tenths() -> None:
    assert parse_budget("auto", 1000) == 700


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("8gib", "unknown unit 'gib'"),
        ("8 apples", "unknown unit 'apples'"),
        ("", "not a size"),
        ("-3GiB", "not a size"),
        ("1e9", "unknown unit|not a size"),
        ("101%", "no share in"),
        ("0%", "no share in"),
        (0.0, "no share in"),
        (1.5, "no share in"),
        (float("nan"), "no share in"),
        ("1.5", "no share in"),
        (0, "less than one byte"),
        (-5, "less than one byte"),
        ("0.4B", "less than one byte"),
        (1, "'100%' or '1B'"),
        ("1", "'100%' or '1B'"),
        (True, "type bool"),
        (None, "type NoneType"),
    ],
)
def test_what_is_no_budget_is_refused_with_the_forms(value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        parse_budget(value, TOTAL)  # type: ignore[arg-type]
    assert "memory_budget" in str(refused.value)


def machine(root: Path, groups: str, limits: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal:     1000 kB\nMemFree: 10 kB\n", "proc/self/cgroup": groups}
    for name, text in (files | limits).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, 1_024_000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n"}, 1_024_000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "5000\n"}, 5000),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/b/memory.max": "9000\n", "sys/fs/cgroup/a/memory.max": "7000\n"},
            7000,
        ),
        ("0::/gone/here\n", {"sys/fs/cgroup/memory.max": "6000\n"}, 6000),
        (
            "9:name=systemd:/\n4:memory:/x\n0::/\n",
            {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4000\n"},
            4000,
        ),
        (
            "4:cpu,memory:/x\n",
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)},
            1_024_000,
        ),
        ("5:cpu:/x\n", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4000\n"}, 1_024_000),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    assert device_memory_bytes(machine(tmp_path, groups, limits)) == expected


def test_a_system_without_proc_asks_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the budget in bytes"):
        device_memory_bytes(tmp_path)


def test_this_machine_has_memory() -> None:
    assert 2**26 < device_memory_bytes() < 2**50


@pytest.mark.parametrize(
    ("value", "each"),
    [
        ("70%", 0.35),
        (0.5, 0.25),
        ("auto", 0.35),
        ("8GiB", "8GiB"),
        (1200, 1200),
        ("1.5GB", "1.5GB"),
    ],
)
def test_of_a_share_each_replica_has_its_part(value: str | float, each: str | float) -> None:
    assert divided(value, 2) == each
    assert divided(value, 1) == value
    assert parse_budget(divided(value, 2), 1000) == parse_budget(each, 1000)
