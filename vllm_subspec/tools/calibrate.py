"""The command ``vllm-subspec calibrate``: shadows fitted to what a model reads and writes, and how
sensitive its layers are to few bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm_subspec.plan import Sensitivity
from vllm_subspec.shadow import available_bits
from vllm_subspec.tools.bench_report import table
from vllm_subspec.tools.prompts import PROMPTS

_PROMPTS = PROMPTS[-4:]  # a benchmark takes the first ones
_NEW_TOKENS = 64
_CALIBRATION_ANSWERS = 8  # half of them greedy, half sampled
_CALIBRATION_TOKENS = 160  # of an answer


def calibrate_shadows(
    model: Path,
    bits: Sequence[int] | None = None,
    prompts: Sequence[str] = _PROMPTS,
    new_tokens: int = _CALIBRATION_TOKENS,
) -> int:
    """Let the model write, greedily and sampled, and fit its shadows to that; serving finds them.

    Streams the weights: RAM holds about two decoder layers, and the KV cache.

    Args:
        model: a Hugging Face folder with a chat template.
        bits: of the shadows; default: all that this machine has kernels for.
        prompts: chat messages, used again and again.
        new_tokens: of an answer, end of text ignored.

    Returns:
        How many files of the shadow cache were written or replaced.

    Raises:
        ConfigError: unknown bits.
        UnsupportedError: SubSpec does not serve this model, or these bits here.
    """
    from vllm_subspec.integration.offline import LLM, SamplingParams

    bits = list(available_bits() if bits is None else dict.fromkeys(bits))
    llm = LLM(
        str(model),
        speculative_config={
            "method": "subspec", "stream": "disk", "bits": bits[-1], "width": 4, "depth": 16,
        },
        worker_extension_cls="vllm_subspec.integration.calibration.CalibrationExtension",
        max_model_len=1024,
        max_num_seqs=_CALIBRATION_ANSWERS,
        kv_cache_memory_bytes=512 << 20,
    )  # fmt: skip
    asked = list(islice(cycle(prompts), _CALIBRATION_ANSWERS))
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    greedy, sampled = (
        SamplingParams(temperature=temperature, seed=0, max_tokens=new_tokens, ignore_eos=True)
        for temperature in (0.0, 1.0)
    )
    half = _CALIBRATION_ANSWERS // 2
    params = [greedy] * half + [sampled] * half
    answers: Sequence[Any] = llm.chat(chats, params, use_tqdm=False)
    sequences = [[*a.prompt_token_ids, *a.outputs[0].token_ids] for a in answers]
    (num_files,) = llm.collective_rpc("subspec_calibrate", args=(sequences, bits))
    return int(num_files)


def measure_sensitivity(
    model: Path, prompts: Sequence[str] = _PROMPTS, new_tokens: int = _NEW_TOKENS
) -> Sensitivity:
    """Let the model write, then measure on what it wrote; the weights are in RAM meanwhile.

    Args:
        model: a Hugging Face folder with a chat template.
        prompts: chat messages.
        new_tokens: per prompt, end of text ignored.

    Raises:
        UnsupportedError: SubSpec does not serve this model.
    """
    from vllm_subspec.integration.offline import LLM, SamplingParams

    llm = LLM(
        str(model),
        # A chain of one, since only the shadows' noise is looked at; 8 bits are quickly made.
        speculative_config={
            "method": "subspec", "stream": "off", "bits": 8, "width": 1, "depth": 1,
        },
        # bf16 rounding, which any change stirs, would drown what 8 bits do: 2 millinats a layer.
        dtype="float32",
        worker_extension_cls="vllm_subspec.integration.calibration.CalibrationExtension",
        max_model_len=1024,
        max_num_seqs=len(prompts),
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    answers = llm.chat(chats, params, use_tqdm=False)
    sequences = [
        ([*answer.prompt_token_ids, *answer.outputs[0].token_ids], len(answer.prompt_token_ids))
        for answer in answers
    ]
    bits = available_bits()
    (found,) = llm.collective_rpc("subspec_sensitivity", args=(sequences, bits))
    return Sensitivity({b: tuple(values) for b, values in zip(bits, found, strict=True)})


def render(sensitivity: Sensitivity) -> str:
    """A markdown table of 1000 * KL by unit and bits, and their sums."""
    kl = sensitivity.kl
    last = sensitivity.num_layers
    rows = [
        [name, *(f"{1e3 * kl[bits][unit]:.3f}" for bits in kl)]
        for unit, name in enumerate([*(f"layer {n}" for n in range(last)), "head"])
    ]
    rows.append(["all layers", *(f"{1e3 * sum(kl[bits][:last]):.3f}" for bits in kl)])
    return "\n".join(table(["KL in millinats", *(f"{bits} bits" for bits in kl)], rows))
