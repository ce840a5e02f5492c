"""Resident memory of serving a model: streamed by SubSpec, or with its weights in RAM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_subspec import envs
from vllm_subspec.files import private_directory
from vllm_subspec.tools.measure import ask, openai_client
from vllm_subspec.tools.serving import Memory, free_port, running, vllm_serve

KV_CACHE_BYTES = 256 << 20
_PROMPT = "Describe the water cycle to a ten-year-old child."
_NEW_TOKENS = 32
_WAYS = {
    "SubSpec, streamed from disk": {"method": "subspec"},
    "plain streaming from disk": {"method": "subspec", "speculate": False},
    "vLLM, weights in RAM": None,
}


@dataclass(frozen=True)
class MemoryUse:
    """A way to serve, and its worker's memory after it served: libraries and KV cache included."""

    way: str
    memory: Memory


def measure_memory(model: Path) -> Iterator[MemoryUse]:
    """Serve ``model`` in each way in turn, with the same KV cache, and answer one prompt.

    Args:
        model: Hugging Face folder with a chat template, in a dtype that vLLM serves.

    Raises:
        ServerError: a server did not start.
        openai.OpenAIError: it did not answer.
    """
    for way, speculative_config in _WAYS.items():
        port = free_port()
        options = [
            "--max-model-len=1024",
            "--max-num-seqs=4",
            f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
            "--enforce-eager",
        ]
        if speculative_config is not None:
            options.append(f"--speculative-config={json.dumps(speculative_config)}")
        # This variable would win over the size of the KV cache above.
        command = ["env", "-u", "VLLM_CPU_KVCACHE_SPACE", *vllm_serve(model, port, options)]
        log = private_directory(envs.cache_dir() / "logs") / "memory.log"
        with running(command, port, log, timeout_s=600) as server, openai_client(server) as client:
            ask(client, str(model), _PROMPT, _NEW_TOKENS, lambda text: None)
            yield MemoryUse(way, server.memory())
