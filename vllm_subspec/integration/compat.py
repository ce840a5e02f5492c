"""Which vLLM this release works with: a version range, and every seam it touches."""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

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
SEAMS = (
    Seam("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("self",)),
    Seam("vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("parser",)),
    Seam(
        "vllm.sampling_params",
        "SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
    ),
    Seam(_RUNNER, "GPUModelRunner.__init__", ("self", "vllm_config", "device")),
    Seam(_RUNNER, "GPUModelRunner.execute_model", ("self", "scheduler_output")),
    Seam(
        _RUNNER,
        "GPUModelRunner._prepare_inputs",
        ("self", "scheduler_output", "num_scheduled_tokens"),
    ),
    Seam(_RUNNER, "GPUModelRunner._build_attention_metadata", ("self", "num_tokens", "num_reqs")),
    Seam(_RUNNER, "GPUModelRunner._sample", ("self", "logits", "spec_decode_metadata")),
    Seam(_RUNNER, "GPUModelRunner._bookkeeping_sync", ("self", "scheduler_output")),
    Seam(_RUNNER, "GPUModelRunner._input_fits_in_drafter", ("self", "common_attn_metadata")),
    Seam(
        _RUNNER,
        "GPUModelRunner.propose_draft_token_ids",
        ("self", "scheduler_output", "sampled_token_ids"),
    ),
    Seam(_RUNNER, "GPUModelRunner._on_request_state_removed", ("self", "req_id", "req_state")),
    Seam("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ("self",)),
    Seam(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.forward",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Seam(
        "vllm.v1.sample.sampler",
        "Sampler.apply_logits_processors",
        ("self", "logits", "sampling_metadata", "predict_bonus_token"),
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.forward",
        ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionMetadataBuilder._set_isa_to_layers",
        ("self", "layer_names"),
    ),
    Seam(
        "vllm.model_executor.offloader.base",
        "BaseOffloader.wrap_modules",
        ("self", "modules_generator", "prefix"),
    ),
    Seam("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", ("vllm_config",)),
)


def check_vllm() -> None:
    """Refuse an untested vLLM, or one whose seams differ from what we override.

    Raises:
        VersionError: names the range, or the seam.
    """
    version = Version(vllm.__version__)
    if version not in TESTED_VLLM and not envs.allow_untested_vllm():
        raise VersionError(
            f"vLLM {version} is outside the tested range {TESTED_VLLM}: install a tested one, or "
            f"set SUBSPEC_ALLOW_UNTESTED_VLLM=1 to run at your own risk"
        )
    broken = [problem for seam in SEAMS if (problem := seam_problem(seam)) is not None]
    if broken:
        raise VersionError(
            f"vLLM {version} differs where SubSpec reaches into it: {'; '.join(broken)}. Install "
            f"a vLLM in {TESTED_VLLM}"
        )


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
