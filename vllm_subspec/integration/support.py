"""What SubSpec does not serve exactly (design D7), refused by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.integration.arguments import OWN_METHOD_KEY, PROPOSER
from vllm_subspec.integration.placing import auto_bits
from vllm_subspec.plan import place
from vllm_subspec.shadow import ShadowSettings, available_bits, kernel_status
from vllm_subspec.shadow.formats import shadow_format

_Refusals = Iterable[tuple[bool, str, str]]  # whether it applies, what, and why not


def refuse_arguments(engine_args: Any, config: SubSpecConfig) -> None:
    """Check what ``EngineArgs`` tell before the model's configuration is read.

    Raises:
        UnsupportedError: a platform or an engine feature that SubSpec does not serve exactly.
        DependencyError: the quantizer's package is missing.
    """
    for applies, what, why in _refused_features(engine_args, config):
        if applies:
            raise UnsupportedError(
                f"SubSpec does not work with {what}: {why}. Drop it, or run without SubSpec"
            )
    if config.speculate:
        planned = available_bits() if config.memory_budget is not None else (auto_bits(),)
        for bits in (config.bits,) if config.bits is not None else planned:
            settings = ShadowSettings(bits, config.group_size, config.quantizer)
            shadow_format(bits).recipe(settings)  # imports what it needs


def _refused_features(args: Any, config: SubSpecConfig) -> _Refusals:
    yield from _refused_platforms(args, config)
    yield (args.worker_cls != "auto", f"--worker-cls {args.worker_cls}", "it brings its own worker")
    yield (
        args.pipeline_parallel_size > 1,
        f"--pipeline-parallel-size {args.pipeline_parallel_size}",
        "the draft needs every layer in one process; use --tensor-parallel-size",
    )
    for kind in ("decode", "prefill"):
        size = getattr(args, f"{kind}_context_parallel_size")
        yield (
            size > 1,
            f"--{kind}-context-parallel-size {size}",
            "a tree's keys and values lie on one rank",
        )
    yield (
        "ray" in (args.distributed_executor_backend, args.data_parallel_backend),
        "Ray's executor",
        "vLLM has none for CPUs; ranks on several machines: --nnodes, --node-rank, --master-addr",
    )
    yield (args.enable_dbo, "--enable-dbo", "a tree's batch cannot be split in two")
    yield (
        args.quantization is not None,
        f"--quantization {args.quantization}",
        "the shadow is made from an unquantised target",
    )
    yield (
        args.kv_transfer_config is not None,
        "--kv-transfer-config",
        "a connector may copy blocks before an accepted path is compacted",
    )
    yield (
        args.kv_offloading_size is not None,
        f"--kv-offloading-size {args.kv_offloading_size}",
        "it may copy blocks before an accepted path is compacted",
    )
    yield (
        args.ec_transfer_config is not None,
        "--ec-transfer-config",
        "it hands over what encoders of multi-modal models made, and SubSpec serves text",
    )
    yield (args.enable_lora, "--enable-lora", "the shadow is of the base model")
    yield (
        args.offload_backend not in ("auto", None)
        or args.cpu_offload_gb > 0
        or args.offload_group_size > 0,
        "vLLM's own weight offloading (--offload-backend, --cpu-offload-gb, --offload-group-size)",
        "it streams weights itself; choose how much stays by resident_layers",
    )
    yield (
        args.weight_transfer_config is not None,
        "--weight-transfer-config",
        "shadows and spill would keep the old weights",
    )
    yield (
        config.speculate and bool(args.logits_processors),
        f"--logits-processors {args.logits_processors}",
        "vLLM does not run custom ones under speculation; {'speculate': false} does",
    )


def _refused_platforms(args: Any, config: SubSpecConfig) -> _Refusals:
    is_cuda = current_platform.is_cuda()
    yield (
        not (current_platform.is_cpu() or (is_cuda and config.unmeasured_cuda)),
        f"the platform {current_platform.device_type!r}",
        "this release runs on CPUs (install vllm-subspec[cpu])"
        + ("; its CUDA path has never run on a GPU: unmeasured_cuda tries it" if is_cuda else ""),
    )
    if not is_cuda:
        yield (config.unmeasured_cuda, "unmeasured_cuda", "this machine's vLLM is for CPUs")
        yield (
            config.stream == "host",
            "stream = 'host'",
            "pinned host RAM is the slow tier of a GPU; use 'disk' or 'off'",
        )
        return
    yield (
        not config.share_kv,
        "share_kv = false on CUDA",
        "a draft with a context of its own is an experiment for CPUs",
    )
    yield (
        config.memory_budget is not None,
        "memory_budget on CUDA",
        "plans rest on figures of CPUs yet; set resident_layers, and --gpu-memory-utilization",
    )
    yield (
        config.stream == "disk" or config.stream_dir is not None,
        "a spill on disk on CUDA",
        "pinned host RAM is the slow tier of a GPU; leave out stream_dir, and stream or 'host'",
    )
    yield (
        args.tensor_parallel_size > 1,
        f"--tensor-parallel-size {args.tensor_parallel_size} on CUDA",
        "several GPUs are untried",
    )
    yield (
        args.async_scheduling is True,
        "--async-scheduling",
        "each step's tokens are needed before the next is made",
    )
    yield (
        config.speculate and not kernel_status().startswith("native"),
        "CUDA on this machine",
        f"shadows are made on the host, by a kernel that is not there: {kernel_status()}",
    )


def refuse_engine(vllm_config: VllmConfig, config: SubSpecConfig) -> None:
    """Check what vLLM made of the arguments and of the checkpoint's configuration.

    Raises:
        UnsupportedError: a model that SubSpec does not serve exactly.
        ConfigError: the tree never fits a step, or the checkpoint names its own speculation.
        BudgetError: more resident layers than there are.
    """
    model = vllm_config.model_config
    for applies, what, why in _refused_models(model):
        if applies:
            raise UnsupportedError(
                f"SubSpec cannot serve {model.model}, {what}: {why}. Run it without SubSpec"
            )
    if is_quantized_kv_cache(vllm_config.cache_config.cache_dtype):
        raise UnsupportedError(
            f"SubSpec does not draft through a {vllm_config.cache_config.cache_dtype} KV cache: "
            f"set --kv-cache-dtype auto"
        )
    if vllm_config.use_v2_model_runner:
        raise UnsupportedError(
            "vLLM chose its Model Runner V2, and SubSpec extends V1: set the environment variable "
            "VLLM_USE_V2_MODEL_RUNNER=0, and drop options that need V2 (watermarking)"
        )
    found = vllm_config.speculative_config
    if not _is_as_asked(vllm_config, config):
        raise ConfigError(
            f"the checkpoint names its own speculative method, {found.method!r}, and vLLM prefers "
            f"it to SubSpec: serve the target model {model.model} by its own path"
        )
    place(model.get_total_num_hidden_layers(), config.resident_layers or 0, config.slots or 3)
    if config.speculate:
        _refuse_large_trees(vllm_config, config)


def _is_as_asked(vllm_config: VllmConfig, config: SubSpecConfig) -> bool:
    """Whether the speculation that vLLM set up is the one that the arguments asked for."""
    found = vllm_config.speculative_config
    beside = vllm_config.additional_config.get(OWN_METHOD_KEY)
    if beside is not None:
        return found is not None and found.method == beside
    model = found.model if found is not None else None
    return bool(model == (PROPOSER if config.speculate else None))


def _refused_models(model: ModelConfig) -> _Refusals:
    yield (
        model.runner_type != "generate",
        f"a {model.runner_type} model",
        "there is no generated text to speculate on",
    )
    yield (
        model.is_encoder_decoder,
        "an encoder-decoder model",
        "drafts have no cross-attention",
    )
    yield (
        model.is_attention_free or model.is_hybrid or model.has_inner_state,
        "a model with recurrent state (Mamba, hybrid)",
        "state that a rejected draft advanced cannot be taken back",
    )
    yield (
        model.quantization is not None,
        f"a quantised checkpoint ({model.quantization})",
        "the shadow is made from an unquantised target; serve the BF16, FP16 or FP32 checkpoint",
    )
    yield (
        model.using_transformers_backend(),
        f"a model that vLLM runs through Transformers ({model.architecture})",
        "layers that vLLM does not build itself cannot be streamed",
    )
    yield (model.use_mla, "a model with latent attention (MLA)", "its KV cache is not read yet")
    yield (model.is_moe, "a mixture of experts", "only plain linears are shadowed and streamed yet")
    yield (
        model.uses_mrope,
        "a model with multi-modal positions (M-RoPE)",
        "a tree node has one position",
    )
    yield (
        model.is_multimodal_model,
        f"a multi-modal model ({model.architecture})",
        "only the language model's layers are streamed and planned for; serve a text-only one",
    )
    yield (model.is_diffusion, "a diffusion model", "it does not decode token by token")
    yield (model.uses_alibi, "a model with ALiBi", "drafts attend without slopes")
    yield (
        getattr(model.hf_text_config, "attention_chunk_size", None) is not None,
        "a model with chunked local attention",
        "trees are verified over the whole context",
    )


def _refuse_large_trees(vllm_config: VllmConfig, config: SubSpecConfig) -> None:
    nodes = config.node_count
    budget = vllm_config.scheduler_config.max_num_scheduled_tokens
    if nodes + 1 > budget:
        raise ConfigError(
            f"a tree of {nodes} nodes and its root never fit a step of {budget} tokens: set "
            f"--max-num-batched-tokens to {nodes + 1} or more, or max_nodes to {budget - 1}"
        )
