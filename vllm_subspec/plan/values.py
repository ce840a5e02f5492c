"""Frozen values to JSON objects and back, with errors that name the wrong key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm_subspec.errors import ConfigError


def check_keys(kind: type, value: Any) -> Mapping[str, Any]:
    """``value`` if it is a mapping whose keys are exactly the fields of the dataclass ``kind``.

    Raises:
        ConfigError: it is not: it was written by another release, or by hand.
    """
    known = {field.name for field in fields(kind)}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{kind.__name__} is {value!r}, not an object: give one with {', '.join(sorted(known))}"
        )
    if wrong := known ^ set(value):
        name = min(wrong, key=str)
        state = "lacks" if name in known else "has the unknown key"
        raise ConfigError(
            f"{kind.__name__} {state} {name!r}: write exactly {', '.join(sorted(known))}, or make "
            "it anew with this release"
        )
    return value


def check_number(kind: type, name: str, value: Any, *, low: float) -> float:
    """``value`` if it is a finite number of at least ``low``.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < 1e300:
        raise ConfigError(
            f"{kind.__name__}.{name} is {value!r}: give a finite number of at least {low:g}"
        )
    return value
