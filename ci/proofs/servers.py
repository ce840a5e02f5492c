"""The servers of the proofs: in float32, so that token ids must be equal; on the loopback."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from proofs.pool import MODEL_LEN
from vllm_subspec.tools.serving import Server, free_port, running, vllm_serve

# Room for two of the longest requests: more than that at once are preempted and computed again.
# Prompts are chunked, and what a step may hold cuts trees.
LITTLE_ROOM = ("--num-gpu-blocks-override=24", "--max-num-batched-tokens=160")
# A plain server cannot go on with a seeded request whose prompt is chunked, or that is preempted.
MUCH_ROOM = ("--num-gpu-blocks-override=200", "--max-num-batched-tokens=2048")
START_S = 600.0


def options(subspec: dict[str, Any] | None) -> list[str]:
    """Of ``vllm serve``; ``None``: without SubSpec."""
    shared = [
        "--dtype=float32",
        f"--max-model-len={MODEL_LEN}",
        "--max-num-seqs=8",
        "--block-size=32",
        "--served-model-name=m",
        "--enforce-eager",
    ]
    if subspec is None:
        return [*shared, *MUCH_ROOM]
    speculative = json.dumps({"method": "subspec", "stream": "disk"} | subspec)
    return [*shared, *LITTLE_ROOM, f"--speculative-config={speculative}"]


def serve(
    model: Path, log: Path, subspec: dict[str, Any] | None, more: Sequence[str] = ()
) -> AbstractContextManager[Server]:
    """A server that answers; see ``running``. ``more``: options of ``vllm serve``."""
    port = free_port()
    return running(vllm_serve(model, port, [*options(subspec), *more]), port, log, START_S)
