"""Every setting of SubSpec, validated in one place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_subspec.errors import ConfigError


class SubSpecConfig(BaseModel):
    """Settings of speculation, shadows and streaming (frozen).

    Travels to every vLLM process as ``VllmConfig.additional_config["subspec"]``.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int = Field(default=4, ge=1, le=32, description="nodes per level, k; 1 is a chain")
    depth: int = Field(default=16, ge=1, le=256, description="levels of the tree, D")
    max_nodes: int | None = Field(
        default=None, ge=1, le=8192, description="best nodes kept for verification"
    )
    draft_temperature: float = Field(
        default=0.2, gt=0, le=10, description="sharpening T_d; shapes the tree, never the output"
    )
    bits: Literal[4, 8] = Field(default=4, description="bits per weight of the shadow")
    group_size: int = Field(default=64, ge=32, le=256, description="weights that share a scale")
    quantizer: Literal["hqq", "rtn"] = Field(default="hqq", description="how the shadow is made")
    resident_layers: int = Field(
        default=0, ge=0, description="layers, from the last one back, kept on the fast tier"
    )
    stream: Literal["auto", "disk", "host", "off"] = Field(
        default="auto", description="where streamed layers rest; off keeps them on the fast tier"
    )
    stream_dir: Path | None = Field(default=None, strict=False, description="folder of the spill")
    slots: int = Field(default=3, ge=1, le=1024, description="fast-tier buffers, one layer each")
    emulate_link: float | None = Field(
        default=None, gt=0, description="bytes per second to throttle the link to (experiments)"
    )
    speculate: bool = Field(default=True, description="false: stream only, draft nothing")

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The known options, in their documented order."""
        return tuple(cls.model_fields)

    def to_options(self) -> dict[str, Any]:
        """The settings as JSON-serialisable options; ``SubSpecConfig(**options)`` restores them."""
        return self.model_dump(mode="json")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SubSpecConfig:
        """Parse options as a user wrote them; dashes in names count as underscores.

        Raises:
            ConfigError: see the class.
        """
        return cls(**{str(name).replace("-", "_"): value for name, value in options.items()})


def _explain(error: ValidationError) -> str:
    """One line per problem: the option, its value, the reason, and the fix."""
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = SubSpecConfig.option_names()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            lines.append(f"unknown option {name!r}: {hint}known options are {', '.join(known)}")
        else:
            lines.append(f"option {name!r} = {problem['input']!r}: {problem['msg']}")
    return "; ".join(lines)
