"""How well a model's shadow drafts: acceptance length by tree, sharpening and noise coupling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_subspec.tools.prompts import PROMPTS


@dataclass(frozen=True)
class Variant:
    """One row of the table: how trees grow, and how requests sample."""

    width: int
    depth: int
    draft_temperature: float = 0.2
    temperature: float = 0.0
    noise_coupling: bool = True

    @property
    def name(self) -> str:
        """The row's label."""
        sampling = "greedy" if self.temperature == 0 else f"T={self.temperature}, top-p 0.9"
        coupling = "" if self.noise_coupling else ", uncoupled"
        return f"{self.width}x{self.depth}, T_d={self.draft_temperature}, {sampling}{coupling}"


VARIANTS = (
    Variant(4, 24),
    Variant(1, 24),
    Variant(4, 24, draft_temperature=1.0),
    Variant(4, 24, temperature=0.6),
    Variant(4, 24, temperature=0.6, noise_coupling=False),
    Variant(4, 24, temperature=0.9),
    Variant(4, 24, temperature=0.9, noise_coupling=False),
)


@dataclass(frozen=True)
class Acceptance:
    """What a variant did: tokens committed per target pass, and nodes accepted by level."""

    variant: Variant
    acceptance_length: float
    nodes_per_pass: float
    acceptance_by_level: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.variant.name, **asdict(self)}


def measure_acceptance(
    model: str,
    bits: int,
    new_tokens: int,
    prompts: Sequence[str] = PROMPTS,
    variants: Sequence[Variant] = VARIANTS,
) -> list[Acceptance]:
    """Run every variant on one engine with the weights in RAM (acceptance needs no streaming).

    Args:
        model: a Hugging Face folder with a chat template.
        bits: of the shadow, group 64.
        new_tokens: per prompt, end of text ignored.
        prompts: chat messages.
        variants: rows to measure; the widest tree is what the engine is started for.
    """
    from vllm_subspec.integration.offline import LLM, SamplingParams
    from vllm_subspec.integration.stats import stats

    largest = max(variants, key=lambda variant: variant.width * variant.depth)
    options = {
        "method": "subspec",
        "width": largest.width,
        "depth": largest.depth,
        "bits": bits,
        "stream": "off",
    }
    llm = LLM(
        model,
        speculative_config=options,
        max_model_len=1024,
        max_num_seqs=len(prompts),
        kv_cache_memory_bytes=1 << 30,
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rows = []
    for variant in variants:
        policy = {
            name: getattr(variant, name)
            for name in ("width", "depth", "draft_temperature", "noise_coupling")
        }
        llm.collective_rpc("set_draft_policy", args=(policy,))
        before = stats(llm)
        params = [
            SamplingParams(
                temperature=variant.temperature,
                top_p=0.9 if variant.temperature else 1.0,
                seed=seed,
                max_tokens=new_tokens,
                ignore_eos=True,
            )
            for seed in range(len(prompts))
        ]
        llm.chat(chats, params, use_tqdm=False)
        grown = stats(llm) - before
        rows.append(Acceptance(variant, grown.tau, grown.nodes_per_pass, grown.acceptance_by_level))
    return rows


def render(rows: Sequence[Acceptance]) -> str:
    """A markdown table; the first row is what the last column compares with."""
    lines = [
        "| tree, sampling | acceptance length | nodes a pass | of the first row |",
        "|---|---|---|---|",
    ]
    for row in rows:
        share = row.acceptance_length / rows[0].acceptance_length
        lines.append(
            f"| {row.variant.name} | {row.acceptance_length:.2f} | {row.nodes_per_pass:.0f} "
            f"| {share:.0%} |"
        )
    return "\n".join(lines)
