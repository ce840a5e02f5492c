"""What SubSpec does not serve is refused before anything is loaded: value, reason and fix."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform

from vllm_subspec import SubSpecConfig
from vllm_subspec.errors import (
    BudgetError,
    ConfigError,
    DependencyError,
    SubSpecError,
    UnsupportedError,
)
from vllm_subspec.integration import support
from vllm_subspec.integration.arguments import GPU_WORKER
from vllm_subspec.integration.worker import SubSpecCPUWorker

pytestmark = pytest.mark.engine

PROPOSER = "vllm_subspec.SubstituteProposer"


def ask(model: str, options: Any = None, **arguments: Any) -> VllmConfig:
    given = {"method": "subspec", **(options or {})}
    return EngineArgs(
        model, speculative_config=given, skip_tokenizer_init=True, **arguments
    ).create_engine_config()


def refusal(kind: type[SubSpecError], model: str, options: Any = None, **arguments: Any) -> str:
    with pytest.raises(SubSpecError) as refused:
        ask(model, options, **arguments)
    assert type(refused.value) is kind
    return str(refused.value)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"widht": 3},
            ["unknown option 'widht'", "did you mean 'width'", "depth", "emulate_link"],
        ),
        ({"tree": 3}, ["unknown option 'tree'", "known options are", "speculate"]),
        ({"depth": "8"}, ["option 'depth' = '8'", "valid integer"]),
        ({"depth": 0}, ["option 'depth' = 0", "greater than or equal to 1"]),
        ({"width": 33}, ["option 'width' = 33", "less than or equal to 32"]),
        ({"bits": 5}, ["option 'bits' = 5", "2, 3, 4, 6, 8 or 'mxfp4'"]),
        ({"group_size": 48}, ["option 'group_size' = 48", "32, 64, 128 or 256"]),
        ({"quantizer": "awq"}, ["option 'quantizer' = 'awq'", "'hqq' or 'rtn'"]),
        ({"slots": 0}, ["option 'slots' = 0", "greater than or equal to 1"]),
        ({"num_speculative_tokens": "4"}, ["option 'max_nodes' = '4'", "valid integer"]),
        ({"draft_tensor_parallel_size": 1}, ["unknown option 'draft_tensor_parallel_size'"]),
        ({"speculate": "no"}, ["option 'speculate' = 'no'", "valid boolean"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options(options: dict[str, Any], parts: list[str], llama: str) -> None:
    message = refusal(ConfigError, llama, options)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            {"speculative_config": {"method": "subspec", "max_nodes": 4}, "spec_tokens": 8},
            r"option 'max_nodes' is given twice: 4, and 8 by num_speculative_tokens",
        ),
        (
            {
                "speculative_config": {"method": "subspec", "depth": 4},
                "additional_config": {"subspec": {"depth": 8}},
            },
            r"option 'depth' is given twice: 4, and 8 by additional_config\['subspec'\]",
        ),
        (
            {"speculative_config": {"method": "subspec", "max-nodes": 4, "max_nodes": 5}},
            r"option 'max_nodes' is given twice: 4, and 5 by speculative_config",
        ),
        (
            {"speculative_config": {"method": "ngram"}, "spec_method": "subspec"},
            r"option 'method' is given twice: 'ngram', and 'subspec' by --spec-method",
        ),
        (
            {"speculative_config": {"method": "eagle", "model": PROPOSER}},
            r"speculative method 'eagle' and SubSpec are asked for at once",
        ),
        (
            {
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
                "additional_config": {"subspec": {}},
            },
            r"speculative method 'ngram' and SubSpec are asked for at once",
        ),
        (
            {"speculative_config": {"method": "subspec", "model": "some/draft"}},
            r"speculative model 'some/draft': .* takes no draft model",
        ),
        ({"spec_method": "subspec", "spec_model": "x"}, r"speculative model 'x'"),
        ({"spec_method": "subspec", "speculative_config": 3}, r"speculative_config = 3: use"),
        ({"additional_config": {"subspec": 3}}, r"additional_config\['subspec'\] = 3 must map"),
    ],
)
def test_contradictory_arguments(arguments: dict[str, Any], part: str, llama: str) -> None:
    with pytest.raises(ConfigError, match=part):
        EngineArgs(llama, skip_tokenizer_init=True, **arguments).create_engine_config()


# -- engine arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"worker_cls": "my.Worker"}, "--worker-cls my.Worker: it brings its own worker"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2: .*--tensor-parallel-size"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"distributed_executor_backend": "ray"}, "Ray's executor: .* --nnodes"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "Ray's executor: .* --nnodes"),
        ({"enable_dbo": True}, "--enable-dbo"),
        ({"quantization": "fp8"}, "--quantization fp8: .* unquantised target"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "--kv-transfer-config",
        ),
        ({"ec_transfer_config": {"ec_role": "ec_consumer"}}, "--ec-transfer-config"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size 1.0"),
        ({"enable_lora": True}, "--enable-lora: the shadow is of the base model"),
        ({"cpu_offload_gb": 1}, "vLLM's own weight offloading .* resident_layers"),
        ({"offload_backend": "uva"}, "vLLM's own weight offloading"),
        ({"offload_group_size": 2}, "vLLM's own weight offloading"),
        ({"weight_transfer_config": {"backend": "nccl"}}, "--weight-transfer-config"),
        ({"logits_processors": ["my.Processor"]}, r"--logits-processors \['my.Processor'\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_engine_features(arguments: dict[str, Any], part: str, llama: str) -> None:
    message = refusal(UnsupportedError, llama, **arguments)
    assert re.search(f"SubSpec does not work with {part}", message)
    assert message.endswith("Drop it, or run without SubSpec")


def test_vllm_has_no_ray_executor_for_cpus() -> None:
    """Once it has, there is no reason left to refuse it (vllm/v1/executor/ray_utils.py)."""
    assert CpuPlatform.ray_device_key == ""


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as SubSpec's refusals look at the platform."""
    cuda = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cuda")
    monkeypatch.setattr(support, "current_platform", cuda)


@pytest.mark.usefixtures("on_cuda")
def test_the_cuda_platform(llama: str) -> None:
    message = refusal(UnsupportedError, llama)
    assert "the platform 'cuda': this release runs on CPUs" in message
    assert "vllm-subspec[cpu]" in message
    assert "has never run on a GPU: unmeasured_cuda tries it" in message


@pytest.mark.usefixtures("on_cuda")
def test_cuda_runs_for_those_who_say_so(llama: str) -> None:
    for options in ({}, {"stream": "host"}, {"stream": "off"}, {"speculate": False}):
        config = ask(llama, {"unmeasured_cuda": True, **options})
        assert config.parallel_config.worker_cls == GPU_WORKER
        assert config.scheduler_config.async_scheduling is False


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"memory_budget": "8GiB"}, {}, "set resident_layers"),
        ({"stream": "disk"}, {}, "pinned host RAM is the slow tier of a GPU"),
        ({"stream_dir": "/tmp"}, {}, "leave out stream_dir"),
        ({"share_kv": False}, {}, "an experiment for CPUs"),
        ({}, {"tensor_parallel_size": 2}, "several GPUs are untried"),
        ({}, {"async_scheduling": True}, "--async-scheduling"),
    ],
    ids=str,
)
def test_what_cuda_does_not_serve(
    options: dict[str, Any], arguments: dict[str, Any], message: str, llama: str
) -> None:
    found = refusal(UnsupportedError, llama, {"unmeasured_cuda": True, **options}, **arguments)
    assert message in found


@pytest.mark.usefixtures("on_cuda")
def test_cuda_without_the_kernel_that_makes_shadows(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "kernel_status", lambda: "torch's own: no compiler")
    assert "no compiler" in refusal(UnsupportedError, llama, {"unmeasured_cuda": True})


@pytest.mark.parametrize(
    ("options", "what"),
    [({"stream": "host"}, "'disk' or 'off'"), ({"unmeasured_cuda": True}, "vLLM is for CPUs")],
    ids=str,
)
def test_what_is_for_cuda(options: dict[str, Any], what: str, llama: str) -> None:
    assert what in refusal(UnsupportedError, llama, options)


def test_logits_processors_work_without_speculation(llama: str) -> None:
    config = ask(llama, {"speculate": False}, logits_processors=["my.Processor"])
    assert config.model_config.logits_processors == ["my.Processor"]


def test_model_runner_v2(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ask(llama, {"speculate": False})
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    with pytest.raises(UnsupportedError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        support.refuse_engine(config, SubSpecConfig(speculate=False))


def test_a_quantised_kv_cache(llama: str) -> None:
    message = refusal(UnsupportedError, llama, kv_cache_dtype="fp8")
    assert "fp8 KV cache: set --kv-cache-dtype auto" in message


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}])
def test_a_tree_larger_than_a_step(settings: dict[str, Any], llama: str) -> None:
    message = refusal(ConfigError, llama, max_num_batched_tokens=64, **settings)
    assert "tree of 64 nodes" in message
    assert "step of 64 tokens" in message
    assert "--max-num-batched-tokens to 65" in message
    assert "max_nodes to 63" in message
    ask(llama, {"max_nodes": 63}, max_num_batched_tokens=64, **settings)
    ask(llama, {"speculate": False}, max_num_batched_tokens=64, **settings)


def test_a_tree_larger_than_the_default_step(llama: str) -> None:
    message = refusal(ConfigError, llama, {"width": 32, "depth": 256})
    assert "tree of 8192 nodes" in message


@pytest.mark.parametrize("layers", [3, 4])
def test_more_resident_layers_than_can_be(layers: int, llama: str) -> None:
    message = refusal(BudgetError, llama, {"resident_layers": layers})
    assert f"resident_layers={layers}" in message
    assert "choose at most 2" in message
    ask(llama, {"resident_layers": 2})


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"load_format": "dummy"},
        {"dtype": "bfloat16"},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": True},
        {"enforce_eager": True},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_what_is_served(arguments: dict[str, Any], llama: str) -> None:
    assert "subspec" in ask(llama, **arguments).additional_config


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        ({}, "60%"),
        ({"data_parallel_size": 2}, 0.3),
        ({"data_parallel_size": 3, "data_parallel_size_local": 2}, 0.3),
    ],
    ids=str,
)
def test_replicas_on_one_machine_divide_a_share(
    arguments: dict[str, Any], share: Any, llama: str
) -> None:
    options = {"memory_budget": "60%"}
    config = ask(llama, options, data_parallel_address="127.0.0.1", **arguments)
    assert config.additional_config["subspec"]["memory_budget"] == share


def test_weights_replaced_in_place() -> None:
    """They would reach neither the spill nor the shadows."""
    engine_worker = object.__new__(SubSpecCPUWorker)
    with pytest.raises(UnsupportedError, match="start the engine again"):
        engine_worker.reload_weights(weights_path="new")


# -- packages --------------------------------------------------------------------------------------


def test_a_missing_hqq(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hqq", None)
    message = refusal(DependencyError, llama, {"bits": 4})
    assert "`pip install hqq`" in message
    assert "quantizer to 'rtn'" in message
    for options in ({"bits": 4, "quantizer": "rtn"}, {"bits": 8}, {"speculate": False}):
        ask(llama, options)
