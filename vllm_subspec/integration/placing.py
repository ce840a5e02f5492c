"""The placement of the model that vLLM is building: by budget, or by count without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import SubSpecError
from vllm_subspec.machine import load_or_measure
from vllm_subspec.plan import (
    ModelShape,
    Placement,
    Sensitivity,
    Unit,
    parse_budget,
    place,
    plan,
)
from vllm_subspec.shadow import ShadowSettings, available_bits
from vllm_subspec.shadow.formats import refusal

logger = init_logger("vllm.subspec")

AUTO_SLOTS = 3
HEAD_BITS = 8
"""Of the head's shadow without a budget: a low-bit head costs more agreement than all layers."""


def place_on_ranks(
    config: SubSpecConfig,
    vllm_config: VllmConfig,
    layers: Sequence[nn.Module],
    linears: Sequence[Mapping[str, LinearBase]],
    memory_bytes: int,
) -> Placement:
    """``place_model`` as the first rank has it, on all ranks, errors included.

    What it rests on (memory, figures, kernels, sensitivity) may differ between machines.
    """
    arguments = config, vllm_config, layers, linears, memory_bytes
    if ranks_of(vllm_config) == 1:
        return place_model(*arguments)
    group = get_tp_group()
    outcome: Placement | SubSpecError | None = None
    if group.rank_in_group == 0:
        try:
            outcome = place_model(*arguments)
        except SubSpecError as error:
            outcome = error
    outcome = group.broadcast_object(outcome, src=0)
    if isinstance(outcome, SubSpecError):
        raise outcome
    assert isinstance(outcome, Placement)
    return outcome


def place_model(
    config: SubSpecConfig,
    vllm_config: VllmConfig,
    layers: Sequence[nn.Module],
    linears: Sequence[Mapping[str, LinearBase]],
    memory_bytes: int,
) -> Placement:
    """Where each layer of this rank goes.

    Args:
        config: the settings; explicit values win over the plan.
        vllm_config: names the model, its KV cache and its ranks.
        layers: the decoder layers, weights not loaded yet.
        linears: the plain linears of each.
        memory_bytes: fast memory of this rank, of which a budget may be a share.

    Raises:
        BudgetError: the budget is too small, or more layers are to stay than there are.
        ConfigError: ``memory_budget`` is no size.
    """
    wanted = "auto" if config.memory_budget is None else config.memory_budget
    budget = parse_budget(wanted, memory_bytes)
    if config.stream != "off":
        _warn_if_it_fits(config, vllm_config, layers, budget)
    if config.memory_budget is None:
        return _place_by_count(config, vllm_config, len(layers))
    shape = model_shape(vllm_config, layers, linears)
    kv_bytes = vllm_config.cache_config.kv_cache_memory_bytes
    assert kv_bytes is not None  # `reserve_kv_cache` saw to it
    directory = Path(vllm_config.model_config.model)
    return plan(
        shape,
        budget,
        kv_bytes if config.share_kv else 2 * kv_bytes,
        load_or_measure(spill_directory(config), vllm_config.model_config.dtype).throttled(
            config.emulate_link
        ),
        (Sensitivity.load_for(directory) if directory.is_dir() else None)
        or Sensitivity.prior(len(layers)),
        sequences=_sequences(vllm_config, kv_bytes),
        bits=config.bits,
        resident_layers=config.resident_layers,
        slots=config.slots,
        width=config.width,
        depth=config.depth,
        max_nodes=config.max_nodes,
        node_limit=config.node_count,
        available_bits=available_bits(),
        speculate=config.speculate,
        post_speculation=config.post_speculation and ranks_of(vllm_config) == 1,
        share_layers=config.share_layers,
    )


def _sequences(vllm_config: VllmConfig, kv_bytes: int) -> int:
    """How many the KV cache can hold at their full length, and the scheduler runs at once."""
    each = vllm_config.model_config.max_model_len * kv_bytes_per_token(vllm_config)
    return max(1, min(vllm_config.scheduler_config.max_num_seqs, kv_bytes // each))


def _warn_if_it_fits(
    config: SubSpecConfig, vllm_config: VllmConfig, layers: Sequence[nn.Module], budget: int
) -> None:
    """Streaming only costs time where the fast tier could hold every weight."""
    rows, hidden = head_shape(vllm_config)
    model = vllm_config.model_config
    tables = 1 if getattr(model.hf_text_config, "tie_word_embeddings", False) else 2
    weights = tables * rows * hidden * model.dtype.itemsize
    weights += sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    kv_bytes = vllm_config.cache_config.kv_cache_memory_bytes
    if kv_bytes is None:  # vLLM will choose; one sequence at least
        kv_bytes = model.max_model_len * kv_bytes_per_token(vllm_config)
    if weights + kv_bytes > budget:
        return
    whose = f"memory_budget={config.memory_budget!r} allows"
    if config.memory_budget is None:
        whose = "memory_budget='auto' would allow here"
    logger.warning_once(
        "SubSpec has nothing to gain: all weights (%.2f GB) and the KV cache (%.2f GB) fit in the "
        "%.2f GB that %s. vLLM without SubSpec serves this model faster",
        weights / 1e9,
        kv_bytes / 1e9,
        budget / 1e9,
        whose,
        scope="global",
    )


def _place_by_count(config: SubSpecConfig, vllm_config: VllmConfig, num_layers: int) -> Placement:
    placement = place(num_layers, config.resident_layers or 0, config.slots or AUTO_SLOTS)
    if not config.speculate:
        return placement
    bits = config.bits or auto_bits()
    settings = ShadowSettings(HEAD_BITS, config.group_size, config.quantizer)
    has_kernel = refusal(*head_shape(vllm_config), settings) is None
    return Placement(
        num_layers=num_layers,
        streamed=placement.streamed,
        num_slots=placement.num_slots,
        bits=tuple(
            None if config.share_layers and not placement.is_streamed(i) else bits
            for i in range(num_layers)
        ),
        head_bits=HEAD_BITS if has_kernel else None,
    )


def auto_bits() -> int:
    """Of shadows where neither the user nor a budget chose: 6 bits draft nearly like the target,
    where there is a kernel for them."""
    return 6 if 6 in available_bits() else 4


def model_shape(
    vllm_config: VllmConfig,
    layers: Sequence[nn.Module],
    linears: Sequence[Mapping[str, LinearBase]],
) -> ModelShape:
    """Sizes of this rank's part of the model."""
    model = vllm_config.model_config
    rows, hidden = head_shape(vllm_config)
    table = rows * hidden
    units = tuple(
        Unit(f"layer {index}", _bytes(weights), sum(w.weight.numel() for w in weights.values()))
        for index, weights in enumerate(linears)
    )
    everything = sum(
        parameter.numel() * parameter.element_size()
        for layer in layers
        for parameter in layer.parameters()
    )
    itemsize = model.dtype.itemsize
    return ModelShape(
        layers=units,
        head=Unit("head", table * itemsize, table),
        embedding_bytes=table * itemsize,
        tied=bool(getattr(model.hf_text_config, "tie_word_embeddings", False)),
        other_bytes=everything - sum(unit.weight_bytes for unit in units) + hidden * itemsize,
        kv_bytes_per_token=kv_bytes_per_token(vllm_config),
        hidden_size=hidden,
    )


def _bytes(linears: Mapping[str, LinearBase]) -> int:
    weights = [linear.weight for linear in linears.values()]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def spill_directory(config: SubSpecConfig) -> Path:
    """Where streamed layers rest."""
    return config.stream_dir or envs.cache_dir() / "spill"


def head_shape(vllm_config: VllmConfig) -> tuple[int, int]:
    """[rows, hidden] of this rank's part of the head, and of the embedding table."""
    model = vllm_config.model_config
    rows = pad_vocab_size(model.get_vocab_size()) // ranks_of(vllm_config)
    return rows, model.get_hidden_size()


def ranks_of(vllm_config: VllmConfig) -> int:
    """Ranks that share each layer."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def kv_bytes_per_token(vllm_config: VllmConfig) -> int:
    """KV cache of one token over all layers of this rank, in the model's dtype."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    values = 2 * model.get_num_kv_heads(parallel) * model.get_head_size()
    return values * model.get_num_layers(parallel) * model.dtype.itemsize


def reserve_kv_cache(vllm_config: VllmConfig, given: int | None, sequences: int | None) -> None:
    """Under a budget, give the KV cache the size that was asked for.

    Without ``given`` bytes that is room for ``sequences`` (one where the user did not say) of
    ``max_model_len`` tokens. vLLM lets VLLM_CPU_KVCACHE_SPACE win over either; a budget does not.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    block = cache.block_size
    blocks = -(-model.max_model_len // block) * (sequences or 1) + 1  # vLLM keeps one for itself
    cache.kv_cache_memory_bytes = given or blocks * block * kv_bytes_per_token(vllm_config)
