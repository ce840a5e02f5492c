"""The ways to serve that the benchmark compares, and the engine arguments of each."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vllm_subspec.config import PRESETS, SubSpecConfig
from vllm_subspec.errors import BudgetError, ConfigError, DependencyError
from vllm_subspec.plan import MachineFigures, Sensitivity, plan
from vllm_subspec.plan.cycle import Work, compute_s
from vllm_subspec.plan.machine import DEFAULT
from vllm_subspec.plan.shapes import ModelShape

_CHAIN_DRAFTS = 16
"""Drafts a step of vLLM's own chain methods. A streamed pass costs nearly the same for 1 token and
for 17, so short chains would make them look worse than they are; past 16 they accept no more."""
_DRAFT_MODEL_DRAFTS = 8
_BLOCK_TOKENS = 128  # vLLM's CPU block
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_WORTH_DOUBLING = 1.05  # where a batch of twice the size makes less more, it only waits longer


@dataclass(frozen=True)
class Mode:
    """One way to serve.

    Attributes:
        name: as given to ``--modes``.
        meaning: one line for the reader of the table.
        options: SubSpec's own options that make the mode what it is.
        method: vLLM's speculative method over our stream, if it is one of vLLM's.
        streams: whether SubSpec is there at all.
        batched: ask as many at once as make the most tokens a second, not one.
        sampled_only: differs from the mode before it where requests are sampled only.
    """

    name: str
    meaning: str
    options: Mapping[str, Any] = field(default_factory=dict)
    method: Mapping[str, Any] | None = None
    streams: bool = True
    batched: bool = False
    sampled_only: bool = False

    def temperatures(self, asked: Sequence[float]) -> list[float]:
        """Those of ``asked`` at which there is something to see."""
        return [t for t in asked if t or not self.sampled_only]


_PLAIN = {"speculate": False}
# What makes a peer's tree ours is left out of it: bits where they pay, noise, drafting in a pass.
_PEER = {"bits": 4, "noise_coupling": False, "post_speculation": False}
# MXFP4 has no CPU kernel. Integers with a zero point in groups of 64 draft better than it does.
_APART = {**PRESETS["mlspecqd"], "bits": 4, "group_size": 64}
_PIECES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("+layers", "and drafts through resident layers", {"share_layers": True}),
    ("+kv", "and over the target's keys and values", {"share_kv": True}),
    ("+tree", "and a tree, 4 wide", {"width": 4}),
    ("+sharpening", "and sharpened, T_d 0.2", {"draft_temperature": 0.2}),
    ("+coupling", "and with the target's noise; sampled only", {"noise_coupling": True}),
    ("+overlap", "and drafts during the pass", {"post_speculation": True}),
    ("+bits", "and bits where they pay", {"bits": "auto"}),
)


def _ladder() -> Iterator[Mode]:
    """One piece of SubSpec more from mode to mode, from a model apart on; trees of 16 levels.

    What is left to ``subspec`` after the last: width and depth as planned, depth tuned live.
    """
    options = dict(_APART)
    for name, meaning, piece in _PIECES:
        options |= piece
        yield Mode(name, meaning, dict(options), sampled_only=name == "+coupling")


_ALL = (
    Mode("plain", "streaming, nothing drafted, the whole budget to residents", _PLAIN),
    Mode("subspec", "all that SubSpec does, as the plan chose"),
    Mode("chain", "SubSpec with one node a level", {"width": 1}),
    Mode("subspec-4bit", "SubSpec with every shadow at 4 bits", {"bits": 4}),
    Mode("no-post", "SubSpec without drafting during the pass", {"post_speculation": False}),
    Mode("uniform", "SubSpec with trees of one depth at a time", {"adaptive_depth": False}),
    Mode(
        "ngram",
        "vLLM's n-gram method over our stream",
        _PLAIN,
        {
            "method": "ngram",
            "num_speculative_tokens": _CHAIN_DRAFTS,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    ),
    Mode("suffix", "vLLM's suffix decoding over our stream", _PLAIN, {"method": "suffix"}),
    Mode("vllm", "vLLM as it is, every weight in memory; does not fit, is killed", streams=False),
    Mode(
        "flexgen",
        "FlexGen's way: plain streaming at the batch that the plan finds best, all of it counted",
        _PLAIN,
        batched=True,
    ),
    Mode(
        "leviathan",
        "a small draft model apart: vLLM's draft model method over our stream",
        _PLAIN,
        {"method": "draft_model", "num_speculative_tokens": _DRAFT_MODEL_DRAFTS},
    ),
    Mode(
        "mlspecqd",
        "ML-SpecQD's: a chain of 16 by a 4-bit model apart, own layers and KV; integers for MXFP4",
        _APART,
    ),
    Mode(
        "specinfer",
        "SpecInfer's tree, 8x6, not sharpened; our 4-bit shadow for its small model",
        {**PRESETS["specinfer"], **_PEER},
    ),
    Mode(
        "specexec",
        "SpecExec's, the best 64 of 16x16, not sharpened; our 4-bit shadow for its small model",
        {**PRESETS["specexec"], **_PEER},
    ),
    *_ladder(),
)
MODES: Mapping[str, Mode] = {mode.name: mode for mode in _ALL}
GROUPS: Mapping[str, Sequence[str]] = {
    "peers": ("plain", "flexgen", "leviathan", "mlspecqd", "specinfer", "specexec", "subspec"),
    "ladder": ("plain", "mlspecqd", *(name for name, _, _ in _PIECES), "subspec"),
}


@dataclass(frozen=True)
class Workload:
    """What every mode of one benchmark does alike.

    Attributes:
        model: folder of the target.
        budget_bytes: SubSpec's ``memory_budget``, the same for all modes.
        prompts: user messages, asked one after another, end of text ignored.
        max_tokens: new tokens for each.
        max_model_len: positions that the KV cache holds.
        options: SubSpec options of every mode.
        draft_model: folder of the draft model of mode ``leviathan``.
        temperatures: at which all prompts are asked; 0 is greedy.
        machine: by which the best batch is found.
    """

    model: Path
    budget_bytes: int
    prompts: tuple[str, ...]
    max_tokens: int
    max_model_len: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)
    draft_model: Path | None = None
    temperatures: tuple[float, ...] = (0.0,)
    machine: MachineFigures = DEFAULT


def parse_modes(text: str, draft_model: Path | None) -> list[Mode]:
    """The modes of ``--modes``, in the order given; those of groups that overlap come once.

    Raises:
        ConfigError: an unknown mode, one given twice, or no draft model for ``leviathan``.
        DependencyError: suffix decoding without the package that it needs.
    """
    given = [name.strip() for name in text.split(",")]
    for name in given:
        if name not in MODES and name not in GROUPS:
            raise ConfigError(
                f"mode {name!r} is unknown; the modes are {', '.join(MODES)}; groups of them are "
                f"{', '.join(GROUPS)}"
            )
    if len(set(given)) < len(given):
        raise ConfigError(f"--modes {text} names a mode twice; name each once")
    names = list(dict.fromkeys(each for name in given for each in GROUPS.get(name, (name,))))
    if "leviathan" in names and draft_model is None:
        raise ConfigError("mode 'leviathan' needs a draft: add --draft-model FOLDER")
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


def engine_arguments(mode: Mode, work: Workload, batch: int = 1) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``LLM`` for one mode, with ``batch`` requests at once.

    Raises:
        BudgetError: the draft model alone takes the whole budget.
    """
    target = ModelShape.read(work.model)
    kv_bytes = _kv_bytes(target, work, batch)
    arguments: dict[str, Any] = {
        "model": str(work.model),
        "max_model_len": work.max_model_len,
        "max_num_seqs": batch,
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
    if method["method"] == "draft_model":
        assert work.draft_model is not None
        method["model"] = str(work.draft_model)
        draft = ModelShape.read(work.draft_model)
        draft_kv_bytes = _kv_bytes(draft, work)
        arguments["kv_cache_memory_bytes"] = kv_bytes + draft_kv_bytes
        subspec["memory_budget"] = _left_by_draft(work, draft, draft_kv_bytes)
    return arguments | {"speculative_config": method, "additional_config": {"subspec": subspec}}


def best_batch(work: Workload) -> int:
    """Requests at once with the most predicted tokens a second by plain streaming: one pass serves
    all, but their KV cache takes the place of resident layers, and their rows are computed.

    Raises:
        BudgetError: not even one fits.
    """
    shape = ModelShape.read(work.model)
    units = [*shape.layers, *([shape.head] if shape.head else [])]
    machine = work.machine.throttled(work.options.get("emulate_link"))
    best, fastest = 1, 0.0
    for batch in _BATCHES:
        try:
            placement = plan(
                shape,
                work.budget_bytes,
                _kv_bytes(shape, work, batch),
                machine,
                Sensitivity.prior(len(shape.layers)),
                sequences=batch,
                speculate=False,
            )
        except BudgetError:
            if batch == 1:
                raise
            break
        streamed = placement.prediction.streamed_bytes
        weights = sum(unit.num_weights for unit in units)
        nbytes = sum(unit.weight_bytes for unit in units)
        whole = Work(len(shape.layers), streamed, 0, weights, nbytes, 0.0)
        computing = float(compute_s(whole, machine, np.array(float(batch))))
        rate = batch / max(streamed / machine.link_bytes_per_s, computing)
        if rate > _WORTH_DOUBLING * fastest:
            best, fastest = batch, rate
    return best


def _kv_bytes(shape: ModelShape, work: Workload, sequences: int = 1) -> int:
    """KV cache for so many sequences, in whole blocks, and the block that vLLM keeps for itself."""
    blocks = -(-work.max_model_len // _BLOCK_TOKENS) * sequences + 1
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
