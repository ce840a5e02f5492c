"""What stopping each tree by itself brings: fixed depth, one live depth, and adaptive depth.

One engine, one request at a time, prompt by prompt: each is answered in every mode before the next
one is, in an order that turns, so that a disk whose speed swings favours none. A round without
measuring comes first, so that each mode has learnt. Answers in float32 must not differ; in
bfloat16 they may by near-ties, as `vllm-subspec verify` tells. Exit status 1: in float32 they did.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vllm_subspec.statistics import Statistics, total
from vllm_subspec.tools.bench_command import parse_options
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.provenance import provenance

BASE = "live"


@dataclass
class Answers:
    """What one mode did.

    Attributes:
        seconds: of each answer, the prompt's pass included.
        counted: what the counters grew by.
        tokens: of each answer.
    """

    seconds: list[float] = field(default_factory=list)
    counted: list[Statistics] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def figures(self, base: Answers) -> dict[str, float]:
        """Steps are a pass's; ``gain`` is the median over answers of base's seconds to ours."""
        counted = Statistics.from_report(total(answer.to_report() for answer in self.counted))
        pairs = zip(base.seconds, self.seconds, strict=True)
        return {
            "tokens_per_s": sum(map(len, self.tokens)) / sum(self.seconds),
            "tau": counted.tau,
            "depth": counted.levels_per_pass,
            "steps": counted.draft_steps / counted.target_passes,
            "steps_in_passes": counted.overlapped_draft_steps / counted.target_passes,
            "step_ms": 1e3 * counted.draft_step_s,
            "gain": median(before / after for before, after in pairs),
            "other_answers": sum(a != b for a, b in zip(base.tokens, self.tokens, strict=True)),
        }


def measure(given: argparse.Namespace) -> dict[str, Answers]:
    """All modes, all prompts, all rounds, on one engine."""
    from vllm_subspec.integration.offline import LLM, SamplingParams
    from vllm_subspec.integration.stats import stats

    options = {"method": "subspec", "memory_budget": given.budget, **parse_options(given.options)}
    llm = LLM(
        str(given.model),
        dtype=given.dtype,
        max_model_len=given.max_model_len,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=options,
    )
    depth = llm.collective_rpc("subspec_placement")[0]["tree"]["depth"]
    modes = {"fixed": {"depth": depth}, BASE: {"adaptive_depth": False}, "adaptive": {}}
    found = {mode: Answers() for mode in modes}
    turn = list(modes)
    for number in range(given.rounds + 1):
        for seed, prompt in enumerate(PROMPTS[: given.prompts]):
            params = SamplingParams(
                temperature=given.temperature,
                top_p=0.9 if given.temperature else 1.0,
                seed=seed if given.temperature else None,
                max_tokens=given.tokens,
                ignore_eos=True,
            )
            turn = turn[1:] + turn[:1]
            for mode in turn:
                llm.collective_rpc("set_draft_policy", args=(modes[mode],))
                before, began = stats(llm), time.monotonic()
                chat = [{"role": "user", "content": prompt}]
                (answer,) = llm.chat(chat, params, use_tqdm=False)
                if number:
                    found[mode].seconds.append(time.monotonic() - began)
                    found[mode].counted.append(stats(llm) - before)
                    found[mode].tokens.append(list(answer.outputs[0].token_ids))
        print(f"round {number} of {given.rounds} is over", flush=True)
    return found


def show(table: dict[str, dict[str, float]]) -> None:
    """The table, for people."""
    names: Sequence[str] = list(table[BASE])
    print("mode      " + " ".join(f"{name:>15}" for name in names))
    for mode, row in table.items():
        print(f"{mode:10}" + " ".join(f"{row[name]:15.2f}" for name in names))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--budget", required=True, help="memory_budget: 1110MB, 50%%")
    parser.add_argument("--prompts", type=int, default=8, help="of ours, 12 at most")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=320)
    parser.add_argument("--options", default="{}", help='SubSpec\'s others, as JSON: {"bits": 4}')
    parser.add_argument("--json", type=Path, help="write everything here too")
    given = parser.parse_args()
    found = measure(given)
    table = {mode: answers.figures(found[BASE]) for mode, answers in found.items()}
    show(table)
    if given.json is not None:
        report: dict[str, Any] = {
            "modes": table,
            "seconds": {mode: answers.seconds for mode, answers in found.items()},
            "provenance": provenance("ci/soak adaptive"),
        }
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    same = all(row["other_answers"] == 0 for row in table.values())
    return int(given.dtype == "float32" and not same)


if __name__ == "__main__":
    raise SystemExit(main())
