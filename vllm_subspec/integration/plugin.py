"""Entry point ``vllm.general_plugins``: makes ``subspec`` a known method, and nothing else."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in every process, several times; inert until somebody asks for SubSpec."""
    from vllm_subspec.integration.patches import apply_patches

    apply_patches()
