"""Every environment variable that this package reads, with its default and effect."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_subspec.errors import ConfigError


def cache_dir() -> Path:
    """Where shadows are cached: ``SUBSPEC_CACHE``, default ``$XDG_CACHE_HOME/vllm-subspec``.

    ``XDG_CACHE_HOME`` defaults to ``~/.cache``; one that is no absolute path does not count, as its
    specification has it.

    Raises:
        ConfigError: ``SUBSPEC_CACHE`` is no absolute path: server and workers may stand elsewhere,
            and nobody but a shell expands ``~``.
    """
    if explicit := os.environ.get("SUBSPEC_CACHE"):
        if not os.path.isabs(explicit):
            raise ConfigError(f"SUBSPEC_CACHE is {explicit!r}: give an absolute path")
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "vllm-subspec"


def limit_onednn_kernels(count: int) -> None:
    """Let oneDNN, and torch in front of it, keep ``count`` products each, unless the user says.

    They read ``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` (compiled ones) and ``LRU_CACHE_CAPACITY`` (their
    descriptions) at their first product in a process; later calls have no effect.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(count))


def allow_untested_vllm() -> bool:
    """``SUBSPEC_ALLOW_UNTESTED_VLLM=1`` lets SubSpec run outside the tested vLLM range.

    Raises:
        ConfigError: it is set to anything but 0 or 1.
    """
    value = os.environ.get("SUBSPEC_ALLOW_UNTESTED_VLLM") or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"SUBSPEC_ALLOW_UNTESTED_VLLM is {value!r}: set it to 1, or to 0")
    return value == "1"


def keep_engine_in_process() -> None:
    """``VLLM_ENABLE_V1_MULTIPROCESSING=0``: vLLM's engines step when this process says so."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
