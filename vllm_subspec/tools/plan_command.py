"""The command ``vllm-subspec plan``: the placement and its prediction, from file headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.machine import load_or_measure
from vllm_subspec.plan import (
    MachineFigures,
    ModelShape,
    Placement,
    Sensitivity,
    device_memory_bytes,
    parse_budget,
    plan,
)
from vllm_subspec.shadow.formats import shadow_format
from vllm_subspec.tools.bench_report import describe_placement, gib, table

_BITS = (4, 6, 8)
_NOT_PLANNED = ("memory_budget", "stream")


@dataclass(frozen=True)
class Answer:
    """A placement, and what it was made from.

    Attributes:
        model: folder name.
        shape: of the model.
        budget_bytes: what the ledger must not exceed.
        machine: the figures behind the prediction.
        sensitivity_is_measured: false: it is another model's.
        placement: with prediction and ledger.
    """

    model: str
    shape: ModelShape
    budget_bytes: int
    machine: MachineFigures
    sensitivity_is_measured: bool
    placement: Placement

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable; ``Placement.from_json`` takes the key ``placement``."""
        return {
            "model": self.model,
            "model_bytes": self.shape.total_bytes,
            "budget_bytes": self.budget_bytes,
            "machine": self.machine.to_json(),
            "sensitivity_is_measured": self.sensitivity_is_measured,
            "placement": self.placement.to_json(),
        }


@dataclass(frozen=True)
class Question:
    """The command line of ``vllm-subspec plan``, as given."""

    model: Path
    budget: str
    context: int
    sequences: int
    options: str
    machine: Path | None
    sensitivity: Path | None

    def answer(self) -> Answer:
        """Plan.

        Raises:
            ConfigError: a wrong value, or a folder that holds no decoder-only model.
            BudgetError: the budget is too small; it names one that works.
        """
        shape = ModelShape.read(self.model)
        config = self._config()
        machine = (
            load_or_measure(envs.cache_dir() / "spill", served_dtype(self.model))
            if self.machine is None
            else MachineFigures.from_json(_read(self.machine))
        ).throttled(config.emulate_link)
        measured = (
            Sensitivity.load_for(self.model)
            if self.sensitivity is None
            else Sensitivity.from_json(_read(self.sensitivity))
        )
        sensitivity = measured or Sensitivity.prior(len(shape.layers))
        budget_bytes = parse_budget(self.budget, device_memory_bytes())
        kv_bytes = shape.kv_bytes_per_token * self.context * self.sequences
        placement = plan(
            shape,
            budget_bytes,
            kv_bytes if config.share_kv else 2 * kv_bytes,
            machine,
            sensitivity,
            sequences=self.sequences,
            bits=config.bits,
            resident_layers=config.resident_layers,
            slots=config.slots,
            width=config.width,
            depth=config.depth,
            max_nodes=config.max_nodes,
            node_limit=config.node_count,
            available_bits=available_bits() if config.speculate else _BITS,
            speculate=config.speculate,
            post_speculation=config.post_speculation,
            share_layers=config.share_layers,
        )
        return Answer(
            self.model.resolve().name,
            shape,
            budget_bytes,
            machine,
            measured is not None,
            placement,
        )

    def _config(self) -> SubSpecConfig:
        try:
            options = json.loads(self.options)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--options {self.options!r} is no JSON: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"--options {self.options!r} is no JSON object")
        if given := [name for name in _NOT_PLANNED if name in options]:
            raise ConfigError(f"leave {', '.join(given)} out of --options: --budget streams")
        return SubSpecConfig(**options)


def served_dtype(model: Path) -> torch.dtype:
    """In which the model is served: its configuration's."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    dtype: torch.dtype = getattr(torch, config.get("dtype", config.get("torch_dtype", "bfloat16")))
    return dtype


def available_bits() -> tuple[int, ...]:
    """Bits that this machine has a shadow kernel for; the first call on a machine builds it."""
    return tuple(bits for bits in _BITS if _has_kernel(bits))


def _has_kernel(bits: int) -> bool:
    try:
        shadow_format(bits)
    except UnsupportedError:
        return False
    return True


def _read(path: Path) -> Mapping[str, Any]:
    try:
        value: Mapping[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    return value


def render(answer: Answer) -> str:
    """Markdown: the placement, the ledger of the budget, and the prediction."""
    placement, predicted = answer.placement, answer.placement.prediction
    ledger = [[item.name, f"{item.bytes / 1e6:.1f} MB"] for item in placement.memory if item.bytes]
    ledger.append(["together", f"{placement.total_bytes / 1e6:.1f} MB"])
    ledger.append(["budget", f"{answer.budget_bytes / 1e6:.1f} MB"])
    figures = [
        ["tokens/s", f"{predicted.tokens_per_s:.2f}"],
        ["tau", f"{predicted.tau:.2f}"],
        ["draft step", f"{1e3 * predicted.draft_step_s:.1f} ms"],
        ["target pass", f"{1e3 * predicted.target_pass_s:.0f} ms"],
        ["cycle", f"{1e3 * predicted.cycle_s:.0f} ms"],
        ["link busy", f"{predicted.link_utilization:.0%}"],
        ["streamed a pass", f"{predicted.streamed_bytes / 1e6:.0f} MB"],
    ]
    measured = answer.sensitivity_is_measured
    sensitivity = "measured" if measured else "NOT MEASURED, another model's"
    lines = [
        f"{answer.model}, {gib(answer.shape.total_bytes)}, in {gib(answer.budget_bytes)}: "
        f"{describe_placement(placement)}",
        *([f"bits by layer: {_bits(placement)}"] if placement.tree is not None else []),
        "",
        *table(["memory", "size"], ledger),
        "",
        *table(["prediction", "figure"], figures),
        "",
        f"Sensitivity of the layers: {sensitivity}.",
    ]
    return "\n".join(lines)


def _bits(placement: Placement) -> str:
    """Each layer's bits in order, a dot for a resident one."""
    return " ".join("." if bits is None else str(bits) for bits in placement.bits)
