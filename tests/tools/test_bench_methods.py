"""vLLM's own speculative methods over our stream: what the engine is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_subspec.errors import ConfigError
from vllm_subspec.integration.arguments import CPU_WORKER

STREAMS_ONLY = {"subspec": {"speculate": False, "slots": 2}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def start(llama: str, **arguments: Any) -> VllmConfig:
    engine_args = EngineArgs(llama, skip_tokenizer_init=True, **arguments)
    config: VllmConfig = engine_args.create_engine_config()
    again: VllmConfig = engine_args.create_engine_config()  # as a server does
    assert again.additional_config == config.additional_config
    assert again.parallel_config.worker_cls == config.parallel_config.worker_cls
    return config


def methods(llama: str) -> dict[str, dict[str, Any]]:
    return {
        "ngram": {"num_speculative_tokens": 3, "prompt_lookup_max": 4},
        "draft_model": {"num_speculative_tokens": 3, "model": llama},
    }


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_method_stays_and_our_worker_streams(method: str, llama: str) -> None:
    options = {"method": method, **methods(llama)[method]}
    config = start(llama, speculative_config=options, additional_config=STREAMS_ONLY)
    speculative = config.speculative_config
    assert speculative is not None
    assert (speculative.method, speculative.num_speculative_tokens) == (method, 3)
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert config.additional_config["subspec"]["speculate"] is False
    assert config.additional_config["subspec"]["slots"] == 2
    assert config.model_config.enforce_eager


def test_by_flags(llama: str) -> None:
    flags = {"spec_method": "ngram", "spec_tokens": 2, "additional_config": STREAMS_ONLY}
    config = EngineArgs(llama, skip_tokenizer_init=True, **flags).create_engine_config()
    assert config.speculative_config is not None
    assert config.speculative_config.method == "ngram"


def test_streaming_alone_is_as_before(llama: str) -> None:
    config = start(llama, additional_config=STREAMS_ONLY)
    assert config.speculative_config is None
    assert config.additional_config.keys() == {"subspec"}


@pytest.mark.parametrize("settings", [{}, {"speculate": True}])
def test_two_ways_to_speculate_at_once(settings: dict[str, Any], llama: str) -> None:
    options = {"method": "ngram", **methods(llama)["ngram"]}
    with pytest.raises(ConfigError, match="keep one, or set speculate to false"):
        start(llama, speculative_config=options, additional_config={"subspec": settings})


def test_other_methods_are_still_refused(llama: str) -> None:
    options = {"method": "eagle", "model": llama, "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"'eagle' and SubSpec are asked for at once; keep one$"):
        start(llama, speculative_config=options, additional_config=STREAMS_ONLY)
