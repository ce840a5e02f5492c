"""Clients of ``POST /v1/completions``: they take a whole answer, or go away while it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import httpx

from proofs.pool import Case

LOGPROB_TOLERANCE = 2e-3  # what another batch shape moves in float32 is far below


@dataclass
class Choice:
    """One of a request's answers, as far as it came."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[float | None]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, part: dict[str, Any]) -> None:
        """Append what one chunk, or the whole answer, holds of this choice."""
        self.text += part["text"]
        self.tokens += part.get("token_ids") or []
        self.finish_reason = part["finish_reason"] or self.finish_reason
        if part.get("stop_reason") is not None:
            self.stop_reason = part["stop_reason"]
        if part.get("logprobs"):
            tops = part["logprobs"]["top_logprobs"] or [None] * len(part["logprobs"]["tokens"])
            for own, top in zip(part["logprobs"]["token_logprobs"], tops, strict=True):
                # Ids are compared elsewhere; which of two equal tokens is named fifth is nothing.
                self.logprobs.append([own, *sorted((top or {}).values(), reverse=True)])


@dataclass
class Answer:
    """What a client has got.

    Attributes:
        status: of HTTP; 0 before it came.
        choices: by index.
        error: the message of an error that is the client's own.
        failure: what became of the server, or of the connection, before the end.
        is_whole: whether the answer came to its end.
    """

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    error: str | None = None
    failure: str | None = None
    is_whole: bool = False

    def take(self, payload: dict[str, Any]) -> None:
        """Add a chunk, or the whole answer."""
        if "error" in payload:
            code, message = payload["error"]["code"], payload["error"]["message"]
            if code >= httpx.codes.INTERNAL_SERVER_ERROR:
                self.failure = f"HTTP {code}: {message}"
            else:
                self.status, self.error = code, message
        for part in payload.get("choices", ()):
            self.choices.setdefault(part["index"], Choice()).take(part)


async def ask(
    client: httpx.AsyncClient,
    url: str,
    case: Case,
    *,
    stream: bool,
    answer: Answer,
    most_chunks: float = inf,
) -> None:
    """Ask ``case`` of the server at ``url``; ``answer`` fills as it comes, up to a cancellation.

    Args:
        client: its connection is closed with an answer that is left.
        url: of the server.
        case: what to ask.
        stream: whether the answer comes in chunks.
        answer: filled here.
        most_chunks: leave after so many of them.

    Raises:
        httpx.HTTPError: the connection broke.
    """
    body = case.body | {"model": "m", "stream": stream, "return_token_ids": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        answer.status = response.status_code
        if response.is_server_error:
            answer.failure = f"HTTP {response.status_code}: {(await response.aread())[:200]!r}"
            return
        if not stream or response.status_code != httpx.codes.OK:
            answer.take(json.loads(await response.aread()))
            answer.is_whole = True
            return
        chunks = 0
        async for line in response.aiter_lines():
            if chunks >= most_chunks:
                return
            if line == "data: [DONE]":
                answer.is_whole = answer.failure is None
            elif line.startswith("data: "):
                answer.take(json.loads(line.removeprefix("data: ")))
                chunks += 1


async def references(url: str, cases: Sequence[Case], at_once: int = 4) -> list[Answer]:
    """Every case's answer by a server without SubSpec, some requests at once.

    Raises:
        httpx.HTTPError: the server failed.
    """
    answers = [Answer() for _ in cases]
    queue = list(zip(cases, answers, strict=True))

    async def take_from_queue() -> None:
        while queue:
            case, answer = queue.pop()
            await ask(client, url, case, stream=False, answer=answer)

    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        await asyncio.gather(*(take_from_queue() for _ in range(at_once)))
    return answers


def difference(expected: Answer, found: Answer) -> str | None:
    """What is wrong with ``found``, of which only a part may have come; ``None`` if nothing."""
    ended = found.failure is None and found.status != 0
    if ended and (expected.status, expected.error) != (found.status, found.error):
        return f"{expected.status} {expected.error} became {found.status} {found.error}"
    if found.is_whole and expected.choices.keys() != found.choices.keys():
        return f"choices {sorted(expected.choices)} became {sorted(found.choices)}"
    for index, choice in found.choices.items():
        reference = expected.choices[index]
        if wrong := _difference(reference, choice, found.is_whole):
            return f"choice {index}: {wrong}"
    return None


def _difference(expected: Choice, found: Choice, is_whole: bool) -> str | None:
    tokens, text, logprobs = expected.tokens, expected.text, expected.logprobs
    if not is_whole:
        tokens, text = tokens[: len(found.tokens)], text[: len(found.text)]
        logprobs = logprobs[: len(found.logprobs)]
    if tokens != found.tokens:
        return f"tokens {tokens} became {found.tokens}"
    if text != found.text:
        return f"text {text!r} became {found.text!r}"
    if len(logprobs) != len(found.logprobs) or not all(map(_near, logprobs, found.logprobs)):
        return f"logprobs {logprobs} became {found.logprobs}"
    ends = expected.finish_reason, expected.stop_reason
    if is_whole and ends != (found.finish_reason, found.stop_reason):
        return f"end {ends} became {found.finish_reason, found.stop_reason}"
    return None


def _near(expected: list[float | None], found: list[float | None]) -> bool:
    return len(expected) == len(found) and all(
        a == b or (a is not None and b is not None and abs(a - b) <= LOGPROB_TOLERANCE)
        for a, b in zip(expected, found, strict=True)
    )
