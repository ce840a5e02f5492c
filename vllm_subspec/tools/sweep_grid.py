"""What a sweep measures: settings of shadow, tree and sampling, and which go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError

PLANNED = "planned"
_MX_GROUP = 32


@dataclass(frozen=True)
class Setting:
    """One shadow, one width, one way to sample; a tree of any depth comes with it.

    Attributes:
        bits: of every layer's shadow, the head's having 8; or "planned": those of the plan for the
            sweep's budget.
        group_size: weights that share a scale; always 32 with "mxfp4".
        resident_layers: from the last one back; ``None`` where the plan decides.
        width: nodes per level.
        draft_temperature: sharpening T_d.
        temperature: of the request; 0 is greedy.
    """

    bits: int | str
    group_size: int
    resident_layers: int | None
    width: int
    draft_temperature: float
    temperature: float

    @property
    def shadow(self) -> Setting:
        """The same shadow with the other settings at their least: what needs its own engine."""
        return replace(self, width=1, draft_temperature=1.0, temperature=0.0)

    def options(self) -> dict[str, Any]:
        """SubSpec's options that make the shadow."""
        chosen: dict[str, Any] = {"group_size": self.group_size}
        if self.bits != PLANNED:
            chosen |= {"bits": self.bits, "resident_layers": self.resident_layers}
        return chosen

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


AXES = tuple(Setting.__dataclass_fields__)


@dataclass(frozen=True)
class Grid:
    """Settings that differ from a base in few of their values.

    Attributes:
        values: of each of ``AXES``, the base's first.
        depths: of the trees, ascending; one replay serves them all.
        together: how many axes may differ from the base at once.

    Raises:
        ConfigError: an axis has no value or one twice, or a value is out of range.
    """

    values: Mapping[str, Sequence[Any]]
    depths: Sequence[int]
    together: int

    def __post_init__(self) -> None:
        for name, values in {**self.values, "depth": self.depths}.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} is {list(values)}: give at least one value, each once")
        for setting in self.settings():
            if setting.temperature < 0:
                raise ConfigError(f"temperature {setting.temperature}: give 0, or more")
            SubSpecConfig(
                **setting.options(),
                width=setting.width,
                depth=max(self.depths),
                draft_temperature=setting.draft_temperature,
            )
        SubSpecConfig(depth=min(self.depths))

    @property
    def base(self) -> Setting:
        """All axes at their first value."""
        return _setting(*(self.values[name][0] for name in AXES))

    def settings(self) -> list[Setting]:
        """All of them, those of one shadow next to each other, the base's first."""
        base = [self.values[name][0] for name in AXES]
        chosen = [
            _setting(*values)
            for values in product(*(self.values[name] for name in AXES))
            if sum(a != b for a, b in zip(values, base, strict=True)) <= self.together
        ]
        return list(dict.fromkeys(chosen))


def _setting(bits: int | str, group_size: int, resident: int | None, *rest: Any) -> Setting:
    """What a format or the plan decides by itself is no axis."""
    if bits == "mxfp4":
        group_size = _MX_GROUP
    return Setting(bits, group_size, None if bits == PLANNED else resident, *rest)


def label(bits: int | str) -> str:
    """A shadow in a word."""
    return f"{bits} bits" if isinstance(bits, int) else bits


def parse_list(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """The values of a comma-separated option; words among numbers stay words.

    Raises:
        ConfigError: a value is not of that kind.
    """
    return tuple(_value(name, part.strip(), kind) for part in text.split(","))


def _value(name: str, part: str, kind: type) -> Any:
    if name == "bits" and part in ("mxfp4", PLANNED):
        return part
    if name == "bits" and part == "5":
        raise ConfigError("bits 5: there is no format of 5 bits; the nearest are 4 and 6")
    try:
        return kind(part)
    except ValueError:
        raise ConfigError(
            f"{name}: {part!r} is no {kind.__name__}; give values and commas"
        ) from None
