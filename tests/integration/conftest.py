"""Checkpoints without weights: vLLM's configuration of a model needs no more than its config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WriteConfig = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def _inspect_models_in_this_process() -> Iterator[None]:
    """vLLM looks at a model's class in a process of its own, which takes ten seconds each."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        yield


@pytest.fixture(scope="session")
def write_config(tmp_path_factory: pytest.TempPathFactory) -> WriteConfig:
    """``write_config(**changes)`` -> folder of a tiny Llama's config with those changes."""

    def write(**changes: Any) -> str:
        directory = tmp_path_factory.mktemp("config")
        (directory / "config.json").write_text(json.dumps(LLAMA | changes))
        return str(directory)

    return write


@pytest.fixture(scope="session")
def llama(write_config: WriteConfig) -> str:
    return write_config()


@pytest.fixture(scope="session")
def without_plugin(llama: str) -> dict[str, Any]:
    """What `describe.py` finds in a process whose VLLM_PLUGINS lets no plugin in."""
    script = Path(__file__).with_name("describe.py")
    done = subprocess.run(
        [sys.executable, str(script), llama],
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
