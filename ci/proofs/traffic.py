"""Many clients at once, each with one request after another, and what became of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import httpx

from proofs.clients import Answer, ask, difference
from proofs.pool import Case
from proofs.ties import Difference
from vllm_subspec.tools.serving import Server

GIVEN_UP = 0.3  # of all requests
_SETTLED_S = 120.0


@dataclass(frozen=True)
class _Leaving:
    """How a client takes an answer, and when it goes away."""

    stream: bool
    after_s: float = inf
    after_chunks: float = inf

    @classmethod
    def drawn(cls, draw: random.Random) -> _Leaving:
        stream, gives_up = draw.random() < 0.6, draw.random() < GIVEN_UP
        if not gives_up:
            return cls(stream)
        if stream and draw.random() < 0.5:
            return cls(stream, after_chunks=draw.randint(1, 8))
        # The shortest go while the request waits, or its prompt is computed.
        return cls(stream, after_s=draw.choice((0.02, 0.3, 3.0)) * draw.random())


class Traffic:
    """Requests drawn from a pool, compared with the answers of a server without SubSpec.

    Args:
        url: of the server.
        cases: the pool.
        expected: their right answers.
        seed: of the draw; each client has one of its own.
        deadline_s: a request that takes longer hangs.

    Attributes:
        asked: requests begun.
        answered: whole answers compared, by feature.
        given_up: requests whose client went away, by what had come until then.
        wrong: what differed from the reference.
        hung: names of requests that took longer than the deadline.
        failures: connections that broke, and errors of the server's own.
    """

    def __init__(
        self,
        url: str,
        cases: Sequence[Case],
        expected: Sequence[Answer],
        seed: int,
        deadline_s: float,
    ) -> None:
        self._url, self._deadline_s, self._seed = url, deadline_s, seed
        self._pool = list(zip(cases, expected, strict=True))
        self.asked = 0
        self.answered: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self.wrong: list[Difference] = []
        self.hung: list[str] = []
        self.failures: list[str] = []

    async def run(self, clients: int, is_enough: Callable[[], bool]) -> None:
        """Let so many clients ask until it is enough; returns when their last answers are there.

        A client whose server fails asks no more.
        """
        # A connection that waits in a pool would hide that its request was given up.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client:
            await asyncio.gather(*(self._client(client, n, is_enough) for n in range(clients)))

    async def _client(
        self, client: httpx.AsyncClient, number: int, is_enough: Callable[[], bool]
    ) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not is_enough():
            case, expected = draw.choice(self._pool)
            leaving = _Leaving.drawn(draw)
            answer = Answer()
            self.asked += 1
            await self._ask(client, case, leaving, answer)
            if wrong := difference(expected, answer):
                how = "streamed" if leaving.stream else "whole"
                self.wrong.append(Difference(case, expected, answer, f"{how}: {wrong}"))
            if answer.failure is not None:
                self.failures.append(f"{case.name}: {answer.failure}")
                return
            self._count(case, answer)

    async def _ask(
        self, client: httpx.AsyncClient, case: Case, leaving: _Leaving, answer: Answer
    ) -> None:
        try:
            async with asyncio.timeout(min(leaving.after_s, self._deadline_s)):
                await ask(
                    client, self._url, case, stream=leaving.stream, answer=answer,
                    most_chunks=leaving.after_chunks,
                )  # fmt: skip
        except TimeoutError:
            if leaving.after_s > self._deadline_s:
                self.hung.append(case.name)
        except httpx.HTTPError as error:
            answer.failure = repr(error)

    def _count(self, case: Case, answer: Answer) -> None:
        if answer.is_whole:
            self.answered[case.name.partition("-")[2]] += 1
        elif case.name not in self.hung:
            begun = any(choice.tokens for choice in answer.choices.values())
            self.given_up["in mid-stream" if begun else "before a token came"] += 1


def metrics(server: Server) -> dict[str, float]:
    """The gauges and counters of ``/metrics`` that have one value, by name without ``vllm:``.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    text = httpx.get(f"{server.url}/metrics", timeout=60.0, trust_env=False).text
    values = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0].removeprefix("vllm:")] = float(value)
    return values


def left_behind(server: Server) -> dict[str, float]:
    """What a server without requests still holds; empty if it comes to rest.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    deadline = time.monotonic() + _SETTLED_S
    while True:
        now = metrics(server)
        held = {
            name: now[name]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        held["remembered_requests"] = server.statistics()["remembered_requests"]
        held = {name: value for name, value in held.items() if value != 0}
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.5)
