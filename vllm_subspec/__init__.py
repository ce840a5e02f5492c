"""SubSpec for vLLM: serve a model that does not fit, its own low-bit shadow as the draft.

Public names load on first use, so this package imports where vLLM is absent:
``SubSpecConfig`` (settings), ``SubstituteProposer`` (the class that vLLM's own
``{"method": "custom_class", "model": "vllm_subspec.SubstituteProposer"}`` names), ``stats`` (what
an engine counted) and its ``Statistics``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_subspec.config import SubSpecConfig
    from vllm_subspec.integration.proposer import SubstituteProposer
    from vllm_subspec.integration.stats import stats
    from vllm_subspec.statistics import Statistics

    __version__: str

__all__ = ["Statistics", "SubSpecConfig", "SubstituteProposer", "__version__", "stats"]

_ROOM_OF = {
    "Statistics": "vllm_subspec.statistics",
    "SubSpecConfig": "vllm_subspec.config",
    "SubstituteProposer": "vllm_subspec.integration.proposer",
    "stats": "vllm_subspec.integration.stats",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("vllm-subspec")
    if room := _ROOM_OF.get(name):
        return getattr(import_module(room), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
