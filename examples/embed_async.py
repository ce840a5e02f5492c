"""SubSpec inside an asyncio program. Usage: python examples/embed_async.py MODEL"""

from __future__ import annotations

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import vllm_subspec


async def main(model: str) -> None:
    """Print a completion as its pieces arrive."""
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            speculative_config={"method": "subspec"},
            max_model_len=2048,
            max_num_seqs=4,
        )
    )
    try:
        params = SamplingParams(
            temperature=0.7, top_p=0.9, seed=1, max_tokens=48, output_kind=RequestOutputKind.DELTA
        )
        async for piece in engine.generate("Once upon a time", params, request_id="story-1"):
            print(piece.outputs[0].text, end="", flush=True)
        counted = await vllm_subspec.stats(engine)
        print(f"\n{counted.tau:.1f} tokens per target pass")
    finally:
        engine.shutdown()


# vLLM starts its engine in a process of its own, which imports this file again.
if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
