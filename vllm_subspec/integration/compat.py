"""Which vLLM this release works with: a version range, and every seam it touches."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_subspec import envs
from vllm_subspec.errors import VersionError

logger = logging.getLogger(__name__)

TESTED_VLLM = SpecifierSet(">=0.32,<0.34", prereleases=True)


@dataclass(frozen=True)
class Seam:
    """A function of vLLM that we override or call, and the parameters we count on."""

    module: str
    name: str
    parameters: tuple[str, ...]


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_TRITON_ATTN = "vllm.v1.attention.backends.triton_attn"
_FLASH_ATTN = "vllm.v1.attention.backends.flash_attn"
_SAMPLER = "vllm.v1.sample.sampler"
_OFFLOADER = "vllm.model_executor.offloader.base"
_LOGGERS = "vllm.v1.metrics.loggers"
_LINEAR = "vllm.model_executor.layers.linear"

SEAMS = tuple(
    Seam(module, name, tuple(parameters.split()))
    for module, name, parameters in (
        # plugin
        ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "self"),
        ("vllm.engine.arg_utils", "EngineArgs.add_cli_args", "parser"),
        (
            "vllm.sampling_params",
            "SamplingParams._validate_spec_decode",
            "self speculative_config",
        ),
        ("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", "vllm_config"),
        ("vllm.v1.executor.abstract", "Executor.__init__", "self vllm_config"),
        ("vllm.v1.engine.async_llm", "AsyncLLM.shutdown", "self timeout"),
        # statistics
        (_LOGGERS, "StatLoggerManager.__init__", "self vllm_config"),
        (_LOGGERS, "AggregateStatLoggerBase.__init__", "self vllm_config engine_indexes"),
        (
            _LOGGERS,
            "StatLoggerBase.record",
            "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
        ),
        (_LOGGERS, "StatLoggerBase.log", "self"),
        (_LOGGERS, "StatLoggerBase.log_engine_initialized", "self"),
        ("vllm.distributed.ec_transfer.ec_connector.metrics", "ECConnectorStats", "data"),
        # worker and runner
        ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "self"),
        ("vllm.v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", "self"),
        ("vllm.v1.worker.gpu_worker", "Worker.reload_weights", "self"),
        (_RUNNER, "GPUModelRunner.__init__", "self vllm_config device"),
        (_CPU_RUNNER, "CPUModelRunner.__init__", "self vllm_config device"),
        (_CPU_RUNNER, "CPUModelRunner.load_model", "self"),
        (_CPU_RUNNER, "CPUModelRunner.initialize_kv_cache", "self kv_cache_config"),
        (_RUNNER, "GPUModelRunner.shutdown", "self"),
        (_RUNNER, "GPUModelRunner.execute_model", "self scheduler_output"),
        (
            _RUNNER,
            "GPUModelRunner._prepare_inputs",
            "self scheduler_output num_scheduled_tokens",
        ),
        (_RUNNER, "GPUModelRunner._build_attention_metadata", "self num_tokens num_reqs"),
        (_RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
        (_RUNNER, "GPUModelRunner._sample", "self logits spec_decode_metadata"),
        (_RUNNER, "GPUModelRunner._bookkeeping_sync", "self scheduler_output"),
        (_RUNNER, "GPUModelRunner._input_fits_in_drafter", "self common_attn_metadata"),
        (
            _RUNNER,
            "GPUModelRunner.propose_draft_token_ids",
            "self scheduler_output sampled_token_ids",
        ),
        (_RUNNER, "GPUModelRunner._on_request_state_removed", "self req_id req_state"),
        ("vllm.forward_context", "set_forward_context", "attn_metadata vllm_config num_tokens"),
        # sampling
        (
            "vllm.v1.sample.rejection_sampler",
            "RejectionSampler.__init__",
            "self sampler spec_config device",
        ),
        (
            "vllm.v1.sample.rejection_sampler",
            "RejectionSampler.forward",
            "self metadata draft_probs logits sampling_metadata",
        ),
        (
            _SAMPLER,
            "Sampler.apply_logits_processors",
            "self logits sampling_metadata predict_bonus_token",
        ),
        (_SAMPLER, "Sampler.apply_temperature", "logits temp all_random"),
        (_SAMPLER, "Sampler.greedy_sample", "logits"),
        (_SAMPLER, "Sampler.compute_logprobs", "logits"),
        (_SAMPLER, "Sampler.gather_logprobs", "logprobs num_logprobs token_ids"),
        ("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", "logits k p"),
        (
            "vllm.v1.sample.logits_processor.builtin",
            "MinPLogitsProcessor.__init__",
            "self vllm_config device is_pin_memory",
        ),
        # attention
        (_CPU_ATTN, "CPUAttentionBackend.get_impl_cls", ""),
        (_CPU_ATTN, "CPUAttentionBackend.get_builder_cls", ""),
        (_CPU_ATTN, "CPUAttentionMetadataBuilder._set_isa_to_layers", "self layer_names"),
        (
            _CPU_ATTN,
            "CPUAttentionBackendImpl.__init__",
            "self num_heads head_size scale num_kv_heads",
        ),
        (
            _CPU_ATTN,
            "CPUAttentionBackendImpl.forward",
            "self layer query key value kv_cache attn_metadata output",
        ),
        ("vllm.v1.attention.backends.registry", "register_backend", "backend class_path"),
        (
            "vllm.v1.attention.selector",
            "_cached_get_attn_backend",
            "backend attn_selector_config num_heads",
        ),
        # weights
        (_OFFLOADER, "BaseOffloader.wrap_modules", "self modules_generator prefix"),
        (_OFFLOADER, "BaseOffloader.post_init", "self"),
        (_OFFLOADER, "set_offloader", "instance"),
        (_LINEAR, "LinearMethodBase.create_weights", "self layer"),
        (_LINEAR, "LinearMethodBase.apply", "self layer x bias"),
        (
            "vllm.model_executor.layers.quantization.base_config",
            "QuantizeMethodBase.process_weights_after_loading",
            "self layer",
        ),
    )
)

CUDA_SEAMS = tuple(
    Seam(module, name, tuple(parameters.split()))
    for module, name, parameters in (
        ("vllm.v1.worker.gpu_worker", "Worker.init_device", "self"),
        ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "self"),
        (_RUNNER, "GPUModelRunner.load_model", "self load_dummy_weights"),
        (_RUNNER, "GPUModelRunner.initialize_kv_cache", "self kv_cache_config"),
        (_RUNNER, "GPUModelRunner._dummy_sampler_run", "self hidden_states"),
        ("vllm.utils.torch_utils", "current_stream", ""),
        (_OFFLOADER, "should_pin_memory", ""),
        (_TRITON_ATTN, "TritonAttentionBackend.get_impl_cls", ""),
        (_TRITON_ATTN, "TritonAttentionBackend.get_builder_cls", ""),
        (
            "vllm.v1.attention.backend",
            "AttentionMetadataBuilder.get_cudagraph_support",
            "vllm_config kv_cache_spec",
        ),
        (
            _TRITON_ATTN,
            "TritonAttentionImpl.__init__",
            "self num_heads head_size scale num_kv_heads",
        ),
        (
            _TRITON_ATTN,
            "TritonAttentionImpl.forward",
            "self layer query key value kv_cache attn_metadata output",
        ),
        (_FLASH_ATTN, "FlashAttentionBackend.get_impl_cls", ""),
        (_FLASH_ATTN, "FlashAttentionBackend.get_builder_cls", ""),
        (
            _FLASH_ATTN,
            "FlashAttentionMetadataBuilder.get_cudagraph_support",
            "vllm_config kv_cache_spec",
        ),
        (
            _FLASH_ATTN,
            "FlashAttentionImpl.__init__",
            "self num_heads head_size scale num_kv_heads",
        ),
        (
            _FLASH_ATTN,
            "FlashAttentionImpl.forward",
            "self layer query key value kv_cache attn_metadata output",
        ),
    )
)
"""Those of ``cuda_device`` and ``cuda_attention``: no business of a CPU's start, which would import
GPU backends."""


def check_vllm() -> None:
    """Refuse an untested vLLM, or one whose seams differ from what we override on a CPU.

    Raises:
        VersionError: names the range, or the seam.
    """
    version = vllm.__version__
    if not _is_tested(version) and not envs.allow_untested_vllm():
        raise VersionError(
            f"vLLM {version} is outside the tested range {TESTED_VLLM}: install a tested one, or "
            f"set SUBSPEC_ALLOW_UNTESTED_VLLM=1 to run at your own risk"
        )
    check_seams(SEAMS)


def check_seams(seams: Iterable[Seam]) -> None:
    """Refuse a vLLM that has not all of ``seams``.

    Raises:
        VersionError: names them.
    """
    broken = [problem for seam in seams if (problem := seam_problem(seam)) is not None]
    if broken:
        raise VersionError(
            f"vLLM {vllm.__version__} differs where SubSpec reaches into it: {'; '.join(broken)}. "
            f"Install a vLLM in {TESTED_VLLM}"
        )


def _is_tested(version: str) -> bool:
    try:
        return Version(version) in TESTED_VLLM
    except InvalidVersion:  # vLLM calls a build without version information "dev"
        return False


def seam_problem(seam: Seam) -> str | None:
    """What is wrong with a seam in the installed vLLM; ``None`` if nothing."""
    try:
        target = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        return f"{seam.module}.{seam.name} is missing ({error})"
    found = tuple(inspect.signature(target).parameters)
    if found[: len(seam.parameters)] != seam.parameters:
        return f"{seam.module}.{seam.name} takes {found}, not {seam.parameters}"
    return None
