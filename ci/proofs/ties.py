"""Where float32 itself has two right answers: tokens so near that a batch's shape tells them apart.

A product of one row is summed in another order than one of many rows, so plain vLLM may answer the
same request in two ways too. How near two tokens were says plain vLLM: its log-probabilities of
both, after penalties, temperature and whatever else, with the noise of the request's seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from proofs.clients import Answer
from proofs.pool import Case
from proofs.servers import serve
from vllm_subspec.tools.audit import first_difference
from vllm_subspec.verify.noise import gumbel_noise, peek_integers

TOLERANCE = 2e-4
"""Widest gap between two logits that float32's rounding may close.

Over 20 answers of up to 96 tokens, each computed alone, among 32 at once, and at once as a prompt
(plain vLLM, SmolLM2-135M, 8 best tokens a position, 13439 pairs), the difference of two logits
moved by 1.2e-5 rms and 1.1e-4 at most.
"""
_LOGPROBS = ("--logprobs-mode=processed_logprobs",)


@dataclass(frozen=True)
class Difference:
    """An answer that is not the reference's.

    Attributes:
        case: what was asked.
        expected, found: the answers, of which the second may be a part.
        what: differs, and how it was asked for.
    """

    case: Case
    expected: Answer
    found: Answer
    what: str

    def __str__(self) -> str:
        return f"{self.case.name}, {self.what}"


@dataclass(frozen=True)
class Verdict:
    """Differences told apart; both as text.

    Attributes:
        near_ties: float32's rounding explains them.
        wrong: it does not.
    """

    near_ties: list[str]
    wrong: list[str]


def audited(differences: Sequence[Difference], model: Path, log: Path) -> Verdict:
    """Judge each one's first token that differs; a server is started only if there is any."""
    verdict = Verdict([], [])
    if not differences:
        return verdict
    with serve(model, log, None, _LOGPROBS) as plain:
        for difference in differences:
            gap = _gap(plain.url, difference)
            if gap is not None and gap <= TOLERANCE:
                verdict.near_ties.append(f"{difference}; logits {gap:.1e} apart")
            else:
                verdict.wrong.append(f"{difference}; logits {gap} apart")
    return verdict


def _gap(url: str, difference: Difference) -> float | None:
    """Between the logits of the two tokens, noise included; ``None``: it is not about tokens."""
    for index, choice in difference.found.choices.items():
        if index not in difference.expected.choices:
            return None
        expected = difference.expected.choices[index].tokens
        if not difference.found.is_whole:
            expected = expected[: len(choice.tokens)]
        position = first_difference(expected, choice.tokens)
        if position is None:
            continue
        if position in (len(expected), len(choice.tokens)):
            return None  # one had ended
        pair = [expected[position], choice.tokens[position]]
        return _gap_between(url, difference.case, index, expected[:position], pair)
    return None


def _gap_between(
    url: str, case: Case, index: int, before: Sequence[int], pair: Sequence[int]
) -> float | None:
    """``None``: plain vLLM did not come to that place again."""
    position = len(before)
    body = case.body | {
        "model": "m",
        "echo": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
        "logprob_token_ids": list(pair),
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=None, trust_env=False).json()
    found = next(part for part in reply["choices"] if part["index"] == index)
    if found["token_ids"][:position] != list(before):
        return None
    told = found["logprobs"]["top_logprobs"][position]
    keys = torch.tensor([told[f"token_id:{token}"] for token in pair], dtype=torch.float64)
    temperature = case.body.get("temperature", 1.0)
    if temperature > 0:
        generator = torch.Generator().manual_seed(case.body["seed"] + index)
        draw = peek_integers(generator, position + 1)[-1]
        keys = temperature * (keys + gumbel_noise(draw, torch.tensor(pair)))
    return float((keys[0] - keys[1]).abs())
