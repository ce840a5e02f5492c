"""The ways to serve that the benchmark compares, and the engine arguments of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import BudgetError, ConfigError, DependencyError
from vllm_subspec.plan.shapes import ModelShape

_CHAIN_DRAFTS = 16
"""Drafts a step of vLLM's own chain methods. A streamed pass costs nearly the same for 1 token and
for 17, so short chains would make them look worse than they are; past 16 they accept no more."""
_DRAFT_MODEL_DRAFTS = 8
_BLOCK_TOKENS = 128  # vLLM's CPU block


@dataclass(frozen=True)
class Mode:
    """One way to serve.

    Attributes:
        name: as given to ``--modes``.
        meaning: one line for the reader of the table.
        options: SubSpec's own options that make the mode what it is.
        method: vLLM's speculative method over our stream, if it is one of vLLM's.
        streams: whether SubSpec is there at all.
    """

    name: str
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] | None = None
    streams: bool = True


_ALL = (
    Mode(
        "plain", "streaming, nothing drafted, the whole budget to residents", {"speculate": False}
    ),
    Mode("subspec", "all that SubSpec does, as the plan chose"),
    Mode("chain", "SubSpec with one node a level", {"width": 1}),
    Mode("subspec-4bit", "SubSpec with every shadow at 4 bits", {"bits": 4}),
    Mode("no-post", "SubSpec without drafting during the pass", {"post_speculation": False}),
    Mode("uniform", "SubSpec with trees of one depth at a time", {"adaptive_depth": False}),
    Mode(
        "ngram",
        "vLLM's n-gram method over our stream",
        {"speculate": False},
        {
            "method": "ngram",
            "num_speculative_tokens": _CHAIN_DRAFTS,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    ),
    Mode(
        "suffix",
        "vLLM's suffix decoding over our stream",
        {"speculate": False},
        {"method": "suffix"},
    ),
    Mode(
        "draft_model",
        "vLLM's draft model method over our stream",
        {"speculate": False},
        {"method": "draft_model", "num_speculative_tokens": _DRAFT_MODEL_DRAFTS},
    ),
    Mode("vllm", "vLLM as it is, every weight in memory; does not fit, is killed", streams=False),
)
MODES: Mapping[str, Mode] = {mode.name: mode for mode in _ALL}


@dataclass(frozen=True)
class Workload:
    """What every mode of one benchmark does alike.

    Attributes:
        model: folder of the target.
        budget_bytes: SubSpec's ``memory_budget``, the same for all modes.
        prompts: user messages, asked one after another (batch 1, greedy, end of text ignored).
        max_tokens: new tokens for each.
        max_model_len: positions that the KV cache holds.
        options: SubSpec options of every mode.
        draft_model: folder of the draft model of mode ``draft_model``.
    """

    model: Path
    budget_bytes: int
    prompts: tuple[str, ...]
    max_tokens: int
    max_model_len: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)
    draft_model: Path | None = None


def parse_modes(text: str, draft_model: Path | None) -> list[Mode]:
    """The modes of ``--modes``, in the order given.

    Raises:
        ConfigError: an unknown mode, one given twice, or no draft model for ``draft_model``.
        DependencyError: suffix decoding without the package that it needs.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in MODES:
            raise ConfigError(f"mode {name!r} is unknown; the modes are {', '.join(MODES)}")
    if len(set(names)) < len(names):
        raise ConfigError(f"--modes {text} names a mode twice; name each once")
    if "draft_model" in names and draft_model is None:
        raise ConfigError("mode 'draft_model' needs a draft: add --draft-model FOLDER")
    if "suffix" in names and importlib.util.find_spec("arctic_inference") is None:
        raise DependencyError(
            "mode 'suffix' is vLLM's suffix decoding, which needs the package arctic-inference: "
            "install arctic-inference==0.1.1, or leave 'suffix' out of --modes"
        )
    return [MODES[name] for name in names]


def check_options(modes: Sequence[Mode], options: Mapping[str, Any]) -> None:
    """Refuse options that would undo what makes a mode, before anything runs.

    Raises:
        ConfigError: a wrong option, or one that a mode (or the budget) sets itself.
    """
    fixed = {"memory_budget", "speculate", "stream"}
    for mode in modes:
        taken = sorted(options.keys() & (fixed | mode.options.keys()))
        if taken:
            raise ConfigError(
                f"leave {', '.join(taken)} out of --options: mode {mode.name!r} and the budget "
                f"decide it"
            )
        SubSpecConfig(**{**options, **mode.options})


def engine_arguments(mode: Mode, work: Workload) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``LLM`` for one mode.

    Raises:
        BudgetError: the draft model alone takes the whole budget.
    """
    target = ModelShape.read(work.model)
    kv_bytes = _kv_bytes(target, work)
    arguments: dict[str, Any] = {
        "model": str(work.model),
        "max_model_len": work.max_model_len,
        "max_num_seqs": 1,
        "enforce_eager": True,
        # A prefix that the warm-up left in the cache would make one prompt's answer cheaper.
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": kv_bytes,
    }
    if not mode.streams:
        return arguments
    subspec = {"memory_budget": work.budget_bytes, **work.options, **mode.options}
    if mode.method is None:
        return arguments | {"speculative_config": {"method": "subspec", **subspec}}
    method = dict(mode.method)
    if mode.name == "draft_model":
        assert work.draft_model is not None
        method["model"] = str(work.draft_model)
        draft = ModelShape.read(work.draft_model)
        draft_kv_bytes = _kv_bytes(draft, work)
        arguments["kv_cache_memory_bytes"] = kv_bytes + draft_kv_bytes
        subspec["memory_budget"] = _left_by_draft(work, draft, draft_kv_bytes)
    return arguments | {"speculative_config": method, "additional_config": {"subspec": subspec}}


def _kv_bytes(shape: ModelShape, work: Workload) -> int:
    """KV cache for one sequence, in whole blocks, and the block that vLLM keeps for itself."""
    blocks = -(-work.max_model_len // _BLOCK_TOKENS) + 1
    return blocks * _BLOCK_TOKENS * shape.kv_bytes_per_token


def _left_by_draft(work: Workload, draft: ModelShape, kv_bytes: int) -> int:
    """The budget without the draft model, which stays in memory beside the streamed target."""
    head = draft.head.weight_bytes if draft.head is not None and not draft.tied else 0
    layers = sum(layer.weight_bytes for layer in draft.layers)
    taken = layers + head + draft.embedding_bytes + draft.other_bytes + kv_bytes
    if taken >= work.budget_bytes:
        raise BudgetError(
            f"the draft model {work.draft_model} takes {taken} of the budget's "
            f"{work.budget_bytes} bytes and leaves the target none: choose a smaller draft"
        )
    return work.budget_bytes - taken
