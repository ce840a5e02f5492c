"""No speed without right tokens: every mode's answers against the reference's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_subspec.tools.audit import Divergence, Noise, audit

Answers = Sequence[Mapping[str, Any]]
_Ids = tuple[tuple[int, ...], ...]


@dataclass
class _Found:
    """What the audit said about one mode."""

    answers: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    wrong: int = 0


class Gate:
    """Audits each distinct set of answers once (see tools/audit.py); a float32 model ties never.

    Args:
        model: folder of the target.
        reference: mode whose first answers are the truth.
        noise: that the answers were sampled by; none for greedy ones.
    """

    def __init__(self, model: Path, reference: str, noise: Noise | None = None) -> None:
        self._model = model
        self._reference = reference
        self._noise = noise
        self._exact = json.loads((model / "config.json").read_text()).get("dtype") == "float32"
        self._prompts: list[list[int]] = []
        self._truth: _Ids = ()
        self._waiting: list[tuple[str, _Ids]] = []
        self._seen: set[tuple[str, _Ids]] = set()
        self._found: dict[str, _Found] = {}

    @property
    def passed(self) -> bool:
        """Whether something was judged, and no token of it was wrong."""
        return bool(self._found) and not any(found.wrong for found in self._found.values())

    def take(self, mode: str, answers: Answers) -> None:
        """Keep a mode's answers for ``judge``; the reference's first ones become the truth."""
        ids = tuple(tuple(answer["tokens"]) for answer in answers)
        if mode == self._reference and not self._truth:
            self._truth = ids
            self._prompts = [list(answer["prompt"]) for answer in answers]
        self._waiting.append((mode, ids))

    def judge(self, say: Callable[[str], None]) -> None:
        """Audit what was taken since the last call; the model is loaded for differences only."""
        for mode, ids in self._waiting:
            found = self._found.setdefault(mode, _Found())
            found.answers += len(ids)
            if (mode, ids) in self._seen:
                continue  # the same answers again: their divergences are counted already
            self._seen.add((mode, ids))
            divergences = audit(self._model, self._prompts, self._truth, ids, self._noise)
            wrong = [d for d in divergences if self._exact or not d.is_near_tie]
            found.divergences += divergences
            found.wrong += len(wrong)
            say(
                f"  gate, {mode}: {len(divergences)} of {len(ids)} answers differ, "
                f"{len(divergences) - len(wrong)} by near-ties, {len(wrong)} wrongly"
            )
        self._waiting.clear()

    def report(self) -> dict[str, Any]:
        """JSON-serialisable: by mode, answers compared, near-ties, wrong tokens, and each place."""
        return {
            "passed": self.passed,
            "modes": {
                mode: {
                    "answers": found.answers,
                    "near_ties": len(found.divergences) - found.wrong,
                    "wrong_tokens": found.wrong,
                    "divergences": [_plain(divergence) for divergence in found.divergences],
                }
                for mode, found in self._found.items()
            },
        }


def _plain(divergence: Divergence) -> dict[str, Any]:
    """JSON has no infinity: an answer that ended early has no gap."""
    told = asdict(divergence)
    return told | {"gap": told["gap"] if told["gap"] != float("inf") else None}
