"""Every environment variable that this package reads, with its default and effect."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where shadows are cached: ``SUBSPEC_CACHE``, default ``$XDG_CACHE_HOME/vllm-subspec``.

    ``XDG_CACHE_HOME`` defaults to ``~/.cache``.
    """
    if explicit := os.environ.get("SUBSPEC_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vllm-subspec"


def limit_onednn_kernels(count: int) -> None:
    """Let oneDNN keep ``count`` compiled products: ``ONEDNN_PRIMITIVE_CACHE_CAPACITY``, if not set.

    It reads that at its first product in a process; later calls have no effect.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(count))


def allow_untested_vllm() -> bool:
    """``SUBSPEC_ALLOW_UNTESTED_VLLM=1`` lets SubSpec run outside the tested vLLM range."""
    return os.environ.get("SUBSPEC_ALLOW_UNTESTED_VLLM", "0") == "1"
