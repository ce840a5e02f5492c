"""SubSpec in vLLM's offline engine: one argument more. Usage: python examples/offline.py MODEL"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams

import vllm_subspec

QUESTIONS = ("Why is the sky blue?", "Write a haiku about patience.")


def main(model: str) -> None:
    """Ask both questions in one batch, then say how well the shadow drafted."""
    llm = LLM(
        model,
        speculative_config={"method": "subspec"},
        max_model_len=2048,
        max_num_seqs=4,
    )
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48)):
        print(output.outputs[0].text, end="\n\n")
    print(f"{vllm_subspec.stats(llm).tau:.1f} tokens per target pass")


# vLLM starts its engine in a process of its own, which imports this file again.
if __name__ == "__main__":
    main(sys.argv[1])
