"""vLLM's offline engine, for tools: they reach vLLM through this room only."""

from vllm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
