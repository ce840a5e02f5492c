"""What "8GiB", "70%" or "auto" means in bytes, and how much memory there is."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

from vllm_subspec.errors import ConfigError

AUTO_SHARE = Decimal("0.7")
"""Share of the memory that "auto" takes; libraries, activations and page cache need the rest."""

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_FORMS = (
    "write a size such as '8GiB', '1200MiB' or '1.5GB', a share such as '70%' or 0.7, "
    "a whole number of bytes, or 'auto'"
)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)")


def parse_budget(value: str | int | float, total_bytes: int) -> int:
    """Bytes that a memory budget stands for, rounded down.

    Args:
        value: a size with a unit ("8GiB", "1.5GB"), a share of ``total_bytes`` ("70%", or a float
            in (0, 1]), whole bytes (an int of at least 2), or "auto" (``AUTO_SHARE`` of the total).
            A string that holds a bare number is read like that number.
        total_bytes: memory of the device, already limited by a cgroup.

    Raises:
        ConfigError: ``value`` has none of these forms, or stands for no byte at all.
    """
    share = _share(value)
    exact = _size(value) if share is None else share * total_bytes
    if exact < 1:
        raise ConfigError(f"memory_budget {value!r} is less than one byte: {_FORMS}")
    return int(exact)


def divided(value: str | int | float, parts: int) -> str | int | float:
    """A budget for each of ``parts`` processes: of a share their part, a size as it is.

    Raises:
        ConfigError: ``value`` is no budget.
    """
    share = _share(value)
    return value if share is None or parts == 1 else float(share / parts)


def _share(value: str | int | float) -> Decimal | None:
    """The share of the total that ``value`` names, or None where it names a size."""
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigError(f"memory_budget {value!r} is no share in (0, 1]: {_FORMS}")
        return Decimal(repr(value))
    if not isinstance(value, str):
        return None
    if value.strip() == "auto":
        return AUTO_SHARE
    number, unit = _split(value)
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"memory_budget {value!r} is no share in (0%, 100%]: {_FORMS}")
        return number / 100
    if not unit and "." in value:
        return _share(float(number))
    return None


def _size(value: str | int | float) -> Decimal:
    if isinstance(value, str):
        number, unit = _split(value)
        if unit:
            return number * _UNITS[unit]
        value = int(number)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"memory_budget {value!r} is of type {type(value).__name__}: {_FORMS}")
    if value == 1:
        raise ConfigError("memory_budget 1 may mean one byte or all memory: write '100%' or '1B'")
    return Decimal(value)


def _split(value: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f"memory_budget {value!r} is not a size: {_FORMS}")
    unit = match[2]
    if unit and unit != "%" and unit not in _UNITS:
        raise ConfigError(
            f"memory_budget {value!r} has the unknown unit {unit!r}: use one of {', '.join(_UNITS)}"
        )
    return Decimal(match[1]), unit


def device_memory_bytes(root: Path = Path("/")) -> int:
    """Memory in bytes that this process may use: physical RAM, or less under a cgroup (v1, v2).

    Args:
        root: where proc and sys are mounted.

    Raises:
        ConfigError: the system has no /proc that tells.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"memory_budget needs the size of this machine's memory, which cannot be read "
            f"({error}): give the budget in bytes, such as '8GiB'"
        ) from error
    match = re.search(r"^MemTotal:\s+(\d+) kB$", meminfo, re.MULTILINE)
    assert match is not None, meminfo
    return min([int(match[1]) * 1024, *_cgroup_limits(root, groups)])


def _cgroup_limits(root: Path, groups: str) -> list[int]:
    """Limits of this process's memory cgroup and of all groups above it."""
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            # In a container the path may be the host's: then only the mount's own root exists.
            # A group without the file, such as the root of v2, has no limit of its own.
            file = group / name
            text = file.read_text(encoding="ascii").strip() if file.exists() else "max"
            if text != "max":
                limits.append(int(text))
            if group == base:
                break
            group = group.parent
    return limits
