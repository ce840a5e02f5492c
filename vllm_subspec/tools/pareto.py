"""Quality against speed: the target streamed, SubSpec, and its shadow served alone.

SubSpec commits the target's own tokens, so its quality is the target's. Whoever can live with a
quantised model's answers has a faster choice; this says how much faster, and at what price.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from vllm_subspec.plan import ModelShape
from vllm_subspec.plan.budget import device_memory_bytes, parse_budget
from vllm_subspec.shadow import available_bits
from vllm_subspec.tools.bench import Bench
from vllm_subspec.tools.bench_modes import MODES, Workload
from vllm_subspec.tools.bench_report import table
from vllm_subspec.tools.own_process import in_own_process
from vllm_subspec.tools.plotting import Plot, new_axes, plot
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance
from vllm_subspec.tools.sweep_engine import ReplayEngine, Texts, replay_engine
from vllm_subspec.tools.sweep_grid import label
from vllm_subspec.tools.sweep_points import Shadows

FORMATS: Sequence[Mapping[str, Any]] = (
    {"bits": 8},
    {"bits": 6},
    {"bits": 4},
    {"bits": "mxfp4", "group_size": 32},
)
_CONTEXT = 512
_STREAMED = {"plain": "bf16, streamed", "subspec": "SubSpec"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pareto:
    """One comparison.

    Attributes:
        model: folder of the target.
        budget: memory of the streamed ways, as ``memory_budget`` takes it.
        prompts: how many of ours; the target's greedy answers are what agreement is about.
        new_tokens: of an answer, end of text ignored.
    """

    model: Path
    budget: str
    prompts: int
    new_tokens: int

    def run(self, say: Say) -> dict[str, Any]:
        """Everything; JSON-serialisable. ``tokens_per_s`` is ``None`` where nothing was measured.

        Raises:
            BudgetError: the budget is too small.
            WorkerError: a run failed.
        """
        ways = self._streamed(say)
        say("the target's quality")
        texts, quality = in_own_process(self._target)
        ways = [way | quality for way in ways]
        for options in FORMATS:
            name = f"{label(options['bits'])} alone"
            say(name)
            ways.append({"name": name, **in_own_process(self._alone, options, texts)})
        return {
            "model": self.model.resolve().name,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "ways": ways,
            "provenance": provenance(shlex.join(["vllm-subspec", *sys.argv[1:]])),
        }

    def _streamed(self, say: Say) -> list[dict[str, Any]]:
        work = Workload(
            self.model,
            parse_budget(self.budget, device_memory_bytes()),
            PROMPTS[: self.prompts],
            self.new_tokens,
            max_model_len=512,
        )
        bench = Bench(work, [MODES[name] for name in _STREAMED], 1, False)
        [report] = bench.rounds(say)
        gate = report["gate"]["modes"]["subspec"]
        modes = report.get("modes", {})  # no speed of wrong tokens
        return [
            {
                "name": shown,
                "tokens_per_s": modes[name]["decode_tokens_per_s"]["median"] if modes else None,
                "weight_bytes": work.budget_bytes,
                "wrong_tokens": gate["wrong_tokens"] if name == "subspec" else 0,
            }
            for name, shown in _STREAMED.items()
        ]

    def _target(self) -> tuple[Texts, dict[str, float]]:
        """Its greedy answers, and its quality."""
        with replay_engine(self.model, {"bits": 8}, self.prompts, self.new_tokens) as engine:
            texts = engine.write(PROMPTS[: self.prompts], self.new_tokens, 0.0)
            return texts, _quality(engine, texts, alone=False)

    def _alone(self, options: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
        with replay_engine(self.model, options, self.prompts, self.new_tokens) as engine:
            # Without a kernel there is no speed to tell.
            has_kernel = options["bits"] in available_bits()
            speed = 1 / engine.alone_step_s(texts[0]) if has_kernel else None
            shadows = Shadows(engine.placement, engine.shadow_bytes)
            return {
                "tokens_per_s": speed,
                "weight_bytes": shadows.draft_bytes(ModelShape.read(self.model)),
                **_quality(engine, texts, alone=True),
            }


def _quality(engine: ReplayEngine, texts: Texts, alone: bool) -> dict[str, float]:
    """Perplexity of a shipped text, and how often the target's own token is the likeliest."""
    ids = engine.encode(_shipped_text())
    chunks = [ids[start : start + _CONTEXT] for start in range(0, len(ids), _CONTEXT)]
    surprises = [s for nats, _ in engine.score(chunks, alone) for s in nats]
    same = []
    answers = [tokens for tokens, _ in texts]
    for (tokens, num_prompt), (_, best) in zip(texts, engine.score(answers, alone), strict=True):
        pairs = zip(tokens[num_prompt:], best[num_prompt - 1 :], strict=True)
        same += [token == likeliest for token, likeliest in pairs]
    return {"perplexity": math.exp(np.mean(surprises)), "agreement": float(np.mean(same))}


def _shipped_text() -> str:
    """Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I; in the public domain."""
    return files("vllm_subspec.tools").joinpath("data", "wonderland.txt").read_text("utf-8")


def render(report: Mapping[str, Any]) -> str:
    """A markdown table."""
    rows = [
        [
            way["name"],
            "no kernel" if way["tokens_per_s"] is None else f"{way['tokens_per_s']:.2f}",
            f"{way['perplexity']:.3f}",
            f"{way['agreement']:.1%}",
            f"{way['weight_bytes'] / 1e6:.0f} MB",
        ]
        for way in report["ways"]
    ]
    head = ["way to serve", "tokens/s", "perplexity", "agrees with bf16", "memory"]
    return "\n".join(table(head, rows))


def picture(report: Mapping[str, Any]) -> Plot:
    """Perplexity over tokens/s; what has no speed is left out."""
    figure, axes = new_axes("tokens/s", "perplexity")
    shown = [way for way in report["ways"] if way["tokens_per_s"] is not None]
    for way in shown:
        exact = way["name"] in _STREAMED.values()
        axes.plot(way["tokens_per_s"], way["perplexity"], "o", color="#2b7a3d" if exact else "#555")
        axes.annotate(
            f"{way['name']}\n{way['agreement']:.0%} agree",
            (way["tokens_per_s"], way["perplexity"]),
            fontsize=8, xytext=(5, 4), textcoords="offset points",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(0.25)
    return plot(
        "Quality against speed",
        "Right is faster, lower is better. Green: the target's own output, streamed. Grey: shadows "
        "served alone, whose answers differ.",
        figure,
    )


def write_json(report: Mapping[str, Any], file: Path) -> None:
    """Everything."""
    file.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
