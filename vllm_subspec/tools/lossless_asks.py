"""What the losslessness protocol asks, and of whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from vllm_subspec.errors import ConfigError
from vllm_subspec.tools.distribution import NextTokenLaw, Prefix
from vllm_subspec.tools.lossless_control import MUST_FAIL, WRONG_SAMPLERS
from vllm_subspec.tools.lossless_worker import Ask
from vllm_subspec.tools.prompts import PROMPTS
from vllm_subspec.tools.questions import load_questions

OPENINGS = ("Once upon a time", "Thank you very much for", "The sun rises in the", "My name is")
"""Texts whose next tokens are drawn many times: short, and open enough for many ends."""
SEED_TEMPERATURE = 0.8
"""Of the seeded requests, which set nothing else: so their noise can be added in an audit."""
ANSWER_TOKENS = 64
DRAWN_TOKENS = 5
LAW_SIZE = 64
"""Most probable tokens that a law names; the others count as one."""

_TASK_TOKENS = 32
_GAP_LAW_SIZE = 20
_DEPTH_TOGETHER = 8
_CONTROL_SHARE = 4
CONTROL_TOKENS = 16
"""New tokens of each answer of a wrong sampler: it goes wrong at once or not at all."""


@dataclass(frozen=True)
class Texts:
    """Token ids of everything that is asked.

    Attributes:
        chats: prompts of the greedy and the seeded requests.
        questions: prompts of the questions with checkable answers.
        openings: by text, what unseeded requests draw the next tokens of.
    """

    chats: Sequence[Sequence[int]]
    questions: Sequence[Sequence[int]]
    openings: Mapping[str, Sequence[int]]

    @classmethod
    def read(cls, model: Path) -> Texts:
        """By the tokenizer of a model's folder, and its chat template if it has one.

        Raises:
            ConfigError: the folder has no tokenizer.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{model} has no tokenizer that can be read ({error}): give a Hugging Face folder "
                "with one"
            ) from error

        def chat(text: str) -> list[int]:
            if tokenizer.chat_template is None:
                return list(tokenizer.encode(text))
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            return list(ids)

        return cls(
            [chat(text) for text in PROMPTS],
            [chat(question.question) for question in load_questions()],
            {text: list(tokenizer.encode(text)) for text in OPENINGS},
        )


@dataclass(frozen=True)
class Plan:
    """The requests of one engine after another.

    Attributes:
        texts: what is asked.
        draws: unseeded requests for each opening.
        depth_is_open: live tuning finds the depth of trees, and may find that many requests at
            once pay for none: then those asked together get trees of a fixed depth.
    """

    texts: Texts
    draws: int
    depth_is_open: bool = True

    @property
    def seeds(self) -> list[int]:
        """Of the seeded requests."""
        return list(range(len(self.texts.chats)))

    @property
    def of_judged(self) -> dict[str, Ask]:
        """Greedy requests one after another, all others together."""
        texts = self.texts
        greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}
        draw = {"temperature": 1.0, "max_tokens": DRAWN_TOKENS, "ignore_eos": True}
        openings = [opening for opening in texts.openings.values() for _ in range(self.draws)]
        fixed = {"depth": _DEPTH_TOGETHER} if self.depth_is_open else {}
        return {
            "greedy": Ask(texts.chats, greedy, alone=True),
            "seeded": Ask(
                texts.chats,
                greedy | {"temperature": SEED_TEMPERATURE},
                seeds=self.seeds,
                policy=fixed,
            ),
            "unseeded": Ask(openings, draw | {"detokenize": False}, policy=fixed),
            "tasks": Ask(texts.questions, greedy | {"max_tokens": _TASK_TOKENS}, policy=fixed),
        }

    @property
    def of_control(self) -> dict[str, Ask]:
        """By ``SAMPLER/CHECK``, what each wrong sampler must fail in; shorter, and fewer draws."""
        asks = replace(self, draws=self.draws // _CONTROL_SHARE).of_judged
        found = {}
        for wrong in WRONG_SAMPLERS:
            for name in MUST_FAIL[wrong]:
                params = dict(asks[name].params)
                params["max_tokens"] = min(params["max_tokens"], CONTROL_TOKENS)
                # A draft that knows the target's noise is seldom wrong: too seldom for a few draws
                # to show that the target was not asked.
                policy = {**asks[name].policy, "noise_coupling": False}
                found[f"{wrong}/{name}"] = replace(
                    asks[name], params=params, policy=policy, wrong=wrong
                )
        return found

    def of_reference(self, drawn: Sequence[tuple[str, Prefix]]) -> dict[str, Ask]:
        """The same, but instead of draws the laws of what the others drew (see `distinct`)."""
        asks = self.of_judged
        greedy = asks["greedy"]
        laws = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": LAW_SIZE}
        return {
            "greedy": replace(
                greedy,
                # One after another: a text token by token and the same at once are then as
                # different in shape as batches get, and so is their rounding.
                params={**greedy.params, "logprobs": _GAP_LAW_SIZE},
                rescore=True,
            ),
            "seeded": replace(asks["seeded"], policy={}),
            "tasks": replace(asks["tasks"], policy={}),
            "laws": Ask(
                [[*self.texts.openings[opening], *draw] for opening, draw in drawn],
                laws | {"detokenize": False},
                laws=DRAWN_TOKENS,
            ),
        }

    def by_opening(self, tokens: Sequence[Sequence[int]]) -> dict[str, list[Prefix]]:
        """The answers of ``unseeded``, sorted."""
        each = len(tokens) // len(self.texts.openings)
        return {
            opening: [tuple(draw) for draw in tokens[index * each : (index + 1) * each]]
            for index, opening in enumerate(self.texts.openings)
        }

    def distinct(self, answers: Sequence[Sequence[Sequence[int]]]) -> list[tuple[str, Prefix]]:
        """One draw, with its opening, for each that differs before the last token.

        Args:
            answers: of ``unseeded`` requests, an entry for each time they were asked.
        """
        found: dict[tuple[str, Prefix], Prefix] = {}
        for tokens in answers:
            for opening, draws in self.by_opening(tokens).items():
                found |= {(opening, draw[:-1]): draw for draw in draws}
        return sorted((opening, draw) for (opening, _), draw in found.items())


def laws_by_prefix(
    drawn: Sequence[tuple[str, Prefix]], told: Sequence[Sequence[Any]]
) -> dict[str, dict[Prefix, NextTokenLaw]]:
    """By opening and drawn prefix, what the reference told of ``Plan.of_reference``'s laws."""
    found: dict[str, dict[Prefix, NextTokenLaw]] = {}
    for (opening, draw), laws in zip(drawn, told, strict=True):
        known = found.setdefault(opening, {})
        for position, (tokens, logprobs) in enumerate(laws):
            if draw[:position] not in known:
                known[draw[:position]] = NextTokenLaw.from_logprobs(tokens, logprobs)
    return found
