"""What ``vllm-subspec doctor`` asks of the installed vLLM; nothing is loaded."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import vllm
import vllm.envs
from vllm.engine.arg_utils import EngineArgs

from vllm_subspec.errors import SubSpecError, VersionError
from vllm_subspec.integration.compat import SEAMS, TESTED_VLLM, check_vllm

_GROUP = "vllm.general_plugins"
_NAME = "subspec"


def vllm_facts() -> str:
    """Version, tested range, and number of seams."""
    return f"{vllm.__version__}, tested range {TESTED_VLLM}, {len(SEAMS)} seams"


def vllm_problem() -> str | None:
    """Why SubSpec would refuse this vLLM; ``None`` if it would not."""
    try:
        check_vllm()
    except VersionError as error:
        return str(error)
    return None


def plugin_problem() -> str | None:
    """Why vLLM would not find the plugin; ``None`` if it would."""
    if _NAME not in {entry.name for entry in entry_points(group=_GROUP)}:
        return f"no entry point {_NAME!r} in {_GROUP}: install vllm-subspec with pip"
    allowed = vllm.envs.VLLM_PLUGINS
    if allowed is not None and _NAME not in allowed:
        return f"VLLM_PLUGINS={','.join(allowed)} leaves {_NAME!r} out: add it, or unset that"
    return None


def reserved_cores() -> int | None:
    """Cores that vLLM keeps free of compute, by its environment variable; ``None`` if unset."""
    reserved: int | None = vllm.envs.VLLM_CPU_NUM_OF_RESERVED_CPU
    return reserved


def refusal(model: Path, options: dict[str, Any]) -> str | None:
    """Why this model would be refused with these SubSpec options; ``None`` if it would start.

    vLLM's own checks of the folder are part of it. No weight is read.
    """
    asked = {"method": "subspec", **options}
    try:
        EngineArgs(str(model), speculative_config=asked, max_model_len=1024).create_engine_config()
    except (SubSpecError, ValueError, OSError) as error:
        return str(error)
    return None
