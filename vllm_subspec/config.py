"""Every setting of SubSpec, validated in one place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_subspec.errors import ConfigError


def _user_path(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise ValueError("this names no folder; name one, or leave the option out")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{error}; write the whole path") from error


def _auto_is_none(value: object) -> object:
    return None if value == "auto" else value


_AUTO = BeforeValidator(_auto_is_none)  # "auto", like leaving the option out, lets the plan decide

AUTO_WIDTH, AUTO_DEPTH = 4, 16
"""The tree to begin with where neither the user nor a plan chose one."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "chain": {"width": 1},
    # A draft model made of the target's weights by casting them, with all that a model has of its
    # own: layers and context; a chain of fixed length (arXiv 2503.13565). One level of it.
    "mlspecqd": {
        "bits": "mxfp4",
        "group_size": 32,
        "width": 1,
        "depth": 16,
        "draft_temperature": 1.0,
        "noise_coupling": False,
        "post_speculation": False,
        "share_layers": False,
        "share_kv": False,
    },
    # Best-first search keeps the most probable nodes up to a budget: a wide beam, not sharpened,
    # cut to its best nodes, keeps the same ones (arXiv 2406.02532).
    "specexec": {"width": 16, "depth": 16, "max_nodes": 64, "draft_temperature": 1.0},
    # Wide and shallow, not sharpened (arXiv 2305.09781).
    "specinfer": {"width": 8, "depth": 6, "draft_temperature": 1.0},
    "subspec": {"width": 6, "depth": 48},  # arXiv 2509.18344
}


class SubSpecConfig(BaseModel):
    """Settings of speculation, shadows and streaming (frozen).

    Travels to every vLLM process as ``VllmConfig.additional_config["subspec"]``.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    preset: Literal["chain", "mlspecqd", "specexec", "specinfer", "subspec"] | None = Field(
        default=None, description="a published method; options given beside it win"
    )
    memory_budget: int | float | str | None = Field(
        default=None,
        description="fast-tier memory for weights, shadows, slots, scratch and KV: 8GiB, 70%, auto",
    )
    width: Annotated[int | None, _AUTO] = Field(
        default=None, ge=1, le=32, description="nodes per level, k; 1 is a chain"
    )
    depth: Annotated[int | None, _AUTO] = Field(
        default=None, ge=1, le=256, description="levels of the tree, D"
    )
    max_nodes: Annotated[int | None, _AUTO] = Field(
        default=None, ge=1, le=8192, description="best nodes kept for verification"
    )
    draft_temperature: float = Field(
        default=0.2, gt=0, le=10, description="sharpening T_d; shapes the tree, never the output"
    )
    noise_coupling: bool = Field(
        default=True, description="draft sampled requests with the target's own noise"
    )
    adaptive_depth: bool = Field(
        default=True,
        description="let each tree stop where it promises too little; needs depth open",
    )
    post_speculation: bool = Field(
        default=True, description="draft on while the target's weights stream"
    )
    share_layers: bool = Field(
        default=True, description="draft through resident layers as they are, not by shadows"
    )
    share_kv: bool = Field(
        default=True, description="draft over the target's keys and values, not over own ones"
    )
    bits: Annotated[Literal[2, 3, 4, 6, 8, "mxfp4"] | None, _AUTO] = Field(
        default=None,
        description="bits per weight of every shadow; 2, 3 and mxfp4 for experiments: slow",
    )
    group_size: Literal[32, 64, 128, 256] = Field(
        default=64, description="weights that share a scale"
    )
    quantizer: Literal["hqq", "rtn"] = Field(
        default="hqq", description="how 2- to 4-bit shadows are made; others round to nearest"
    )
    resident_layers: Annotated[int | None, _AUTO] = Field(
        default=None, ge=0, description="layers, from the last one back, kept on the fast tier"
    )
    stream: Literal["auto", "disk", "host", "off"] = Field(
        default="auto", description="where streamed layers rest; off keeps them on the fast tier"
    )
    stream_dir: Annotated[Path, BeforeValidator(_user_path)] | None = Field(
        default=None, strict=False, description="folder of the spill; ~ is the user's home"
    )
    slots: Annotated[int | None, _AUTO] = Field(
        default=None, ge=1, le=1024, description="fast-tier buffers, one layer each"
    )
    emulate_link: float | None = Field(
        default=None, gt=0, description="bytes per second to throttle the link to (experiments)"
    )
    speculate: bool = Field(default=True, description="false: stream only, draft nothing")
    unmeasured_cuda: bool = Field(
        default=False, description="run on a GPU, where SubSpec has never run yet"
    )

    @model_validator(mode="after")
    def _refuse_what_cancels_out(self) -> Self:
        if self.stream != "off":
            return self
        if not self.speculate:
            raise ValueError(
                "speculate = False with stream = 'off' leaves nothing to do: change one of them, "
                "or run vLLM without SubSpec"
            )
        idle = [
            name
            for name in ("memory_budget", "stream_dir", "emulate_link")
            if getattr(self, name) is not None
        ]
        if idle:
            raise ValueError(
                f"{' and '.join(idle)} would have no effect with stream = 'off': leave it out, or "
                f"set stream to 'disk'"
            )
        return self

    @model_validator(mode="after")
    def _refuse_bits_out_of_place(self) -> Self:
        if self.bits in (2, 3, "mxfp4") and self.memory_budget is not None:
            raise ValueError(
                f"bits = {self.bits!r} has no CPU kernel, so no plan counts on it: leave "
                "memory_budget out, or set bits to 4, 6 or 8"
            )
        if self.bits == "mxfp4" and self.group_size != 32:
            raise ValueError(
                f"bits = 'mxfp4' has groups of 32 by definition, not {self.group_size}: set "
                "group_size to 32"
            )
        return self

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**_with_preset(options))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error

    @property
    def node_count(self) -> int:
        """Most nodes that a tree hands to verification; the engine is started for that many."""
        grown = (self.width or AUTO_WIDTH) * (self.depth or AUTO_DEPTH)
        return grown if self.max_nodes is None else min(grown, self.max_nodes)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The known options, in their documented order."""
        return tuple(cls.model_fields)

    def to_options(self) -> dict[str, Any]:
        """The settings as JSON-serialisable options; ``SubSpecConfig(**options)`` restores them."""
        return self.model_dump(mode="json")


def _with_preset(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options over those of their preset; a wrong preset is left for validation to name."""
    preset = options.get("preset")
    return {**(PRESETS.get(preset, {}) if isinstance(preset, str) else {}), **options}


def _explain(error: ValidationError) -> str:
    """One line per problem: the option, its value, the reason, and the fix."""
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        reason = problem["msg"].removeprefix("Value error, ")
        if not name:
            lines.append(reason)
        elif problem["type"] == "extra_forbidden":
            known = SubSpecConfig.option_names()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            lines.append(f"unknown option {name!r}: {hint}known options are {', '.join(known)}")
        else:
            lines.append(f"option {name!r} = {problem['input']!r}: {reason}")
    return "; ".join(lines)
