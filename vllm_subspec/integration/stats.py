"""An engine's statistics for programs that embed it: ``vllm_subspec.stats``."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, overload

from vllm_subspec.errors import ConfigError
from vllm_subspec.integration.arguments import CONFIG_KEY
from vllm_subspec.statistics import Report, Statistics

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


@overload
def stats(engine: LLM) -> Statistics: ...
@overload
def stats(engine: AsyncLLM) -> Awaitable[Statistics]: ...


def stats(engine: LLM | AsyncLLM) -> Statistics | Awaitable[Statistics]:
    """What an engine with SubSpec counted since start, over all its ranks.

    The difference of two is what happened in between. Of data parallel replicas it is the first
    one's; ``/metrics`` tells them apart.

    Args:
        engine: vLLM's ``LLM``, or its ``AsyncLLM``, for which the answer is to be awaited.

    Raises:
        ConfigError: the engine runs without SubSpec.

    Example:
        >>> before = vllm_subspec.stats(llm)
        >>> llm.generate(prompts)
        >>> print((vllm_subspec.stats(llm) - before).tau)
    """
    config = getattr(engine, "llm_engine", engine).vllm_config
    if CONFIG_KEY not in (config.additional_config or {}):
        raise ConfigError(
            f"{type(engine).__name__} of {config.model_config.model} runs without SubSpec and has "
            f"no statistics of it: start it with speculative_config={{'method': 'subspec'}}"
        )
    reports: Any = engine.collective_rpc("subspec_statistics")
    return _merged_later(reports) if inspect.isawaitable(reports) else Statistics.of_ranks(reports)


async def _merged_later(reports: Awaitable[list[Report]]) -> Statistics:
    return Statistics.of_ranks(await reports)
