"""Models that SubSpec does not serve are refused by their configuration alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs

from vllm_subspec import SubSpecConfig
from vllm_subspec.errors import ConfigError, SubSpecError, UnsupportedError
from vllm_subspec.integration import support

pytestmark = pytest.mark.engine


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


MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token"}
            | {"symmetric": True, "dynamic": True},
        }
    },
}


def architecture(name: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": model_type, **more}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        pytest.param(
            {"quantization_config": AWQ},
            r"a quantised checkpoint \(awq\): .*; serve the BF16",
            id="awq",
        ),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            r"a quantised checkpoint \(fp8\)",
            id="fp8",
        ),
        pytest.param(
            {"quantization_config": COMPRESSED},
            r"a quantised checkpoint \(compressed-tensors\)",
            id="compressed-tensors",
        ),
        pytest.param(WHISPER, "an encoder-decoder model", id="whisper"),
        pytest.param(
            architecture("T5ForConditionalGeneration", "t5", is_encoder_decoder=True, d_model=64),
            "an encoder-decoder model",
            id="t5",
        ),
        pytest.param(
            architecture("MambaForCausalLM", "mamba"), r"recurrent state \(Mamba", id="mamba"
        ),
        pytest.param(
            architecture("JambaForCausalLM", "jamba", num_hidden_layers=8, num_experts=1),
            "recurrent state",
            id="jamba",
        ),
        pytest.param(MLA, r"latent attention \(MLA\)", id="mla"),
        pytest.param(
            architecture("MixtralForCausalLM", "mixtral", num_local_experts=4),
            "a mixture of experts: only plain linears",
            id="mixtral",
        ),
        pytest.param(architecture("BloomForCausalLM", "bloom"), "ALiBi", id="bloom"),
        pytest.param(architecture("BertModel", "bert"), "a pooling model", id="bert"),
        pytest.param(
            architecture("LlamaForSequenceClassification", "llama", num_labels=2),
            "a pooling model",
            id="classifier",
        ),
        pytest.param(
            architecture("BambaForCausalLM", "bamba"),
            r"runs through Transformers \(TransformersForCausalLM\)",
            id="transformers",
        ),
    ],
)
def test_models(changes: dict[str, Any], what: str, write_config: Callable[..., str]) -> None:
    model = write_config(**changes)
    message = refusal(UnsupportedError, model)
    assert message.startswith(f"SubSpec cannot serve {model}, ")
    assert re.search(what, message)
    assert message.endswith("Run it without SubSpec")


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("uses_mrope", True, "M-RoPE"),  # its classes need torchvision, which must stay out
        ("is_multimodal_model", True, "a multi-modal model .* text-only one"),
        ("is_diffusion", True, "a diffusion model"),
        ("is_hybrid", True, "recurrent state"),
        ("has_inner_state", True, "recurrent state"),
        ("is_attention_free", True, "recurrent state"),
    ],
)
def test_models_that_need_no_config_of_their_own(
    name: str, value: bool, what: str, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ask(llama)
    vars(config.model_config).pop(name, None)  # of a cached property
    monkeypatch.setattr(type(config.model_config), name, value)
    with pytest.raises(UnsupportedError, match=what):
        support.refuse_engine(config, SubSpecConfig())


def test_chunked_local_attention(write_config: Callable[..., str]) -> None:
    message = refusal(UnsupportedError, write_config(attention_chunk_size=64))
    assert "chunked local attention" in message


def test_pooling_asked_for_by_hand(llama: str) -> None:
    assert "a pooling model" in refusal(UnsupportedError, llama, runner="pooling")


@pytest.mark.parametrize("speculate", [True, False])
def test_a_checkpoint_that_names_its_own_speculation(
    speculate: bool, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def override(model: str, tokenizer: Any, **rest: Any) -> tuple[str, Any, dict[str, Any]]:
        return model, tokenizer, {"method": "ngram", "num_speculative_tokens": 2}

    monkeypatch.setattr(arg_utils, "maybe_override_with_speculators", override)
    message = refusal(ConfigError, llama, {"speculate": speculate})
    assert "names its own speculative method, 'ngram'" in message
    assert llama in message
