"""Prompts through a running server, as a client sees them, and what SubSpec counted meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import DefaultHttpxClient, OpenAI

from vllm_subspec.statistics import Statistics, growth
from vllm_subspec.tools.serving import Server, ServerError

_WARM_UP_TOKENS = 4
Show = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        prompt: token ids of the prompt, chat template included.
        tokens: token ids of the answer, the end-of-text token included.
        text: the answer.
        seconds: from sending the request to the end of the answer.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """Prompts asked one after another.

    Attributes:
        answers: in the prompts' order.
        statistics: what SubSpec's counters grew by; levels lists are as long as the longest.
    """

    answers: tuple[Answer, ...]
    statistics: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Wall time of all requests, the prompts' own passes included."""
        return sum(answer.seconds for answer in self.answers)

    @property
    def new_tokens(self) -> int:
        """Tokens that reached the client."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of request time."""
        return self.new_tokens / self.seconds


def run_prompts(
    server: Server, model: str, prompts: Sequence[str], new_tokens: int, show: Show
) -> Run:
    """Ask each prompt as a chat message, greedily, after a short request that is not counted.

    Args:
        server: serves ``model``, with SubSpec's worker.
        model: the name it is served under.
        prompts: user messages.
        new_tokens: at most, for each.
        show: called with each piece of text as it arrives.

    Raises:
        openai.OpenAIError: a request failed.
        ServerError: the counters cannot be read, or the token ids do not add up.
    """
    with openai_client(server) as client:
        ask(client, model, prompts[0], _WARM_UP_TOKENS, lambda text: None)
        before = server.statistics()
        answers = []
        for prompt in prompts:
            show(f"\n> {prompt}\n")
            answers.append(ask(client, model, prompt, new_tokens, show))
            show("\n")
        return Run(tuple(answers), growth(before, server.statistics()))


@contextmanager
def openai_client(server: Server) -> Iterator[OpenAI]:
    """A client of ``server`` that goes past any proxy, for as long as the block lasts."""
    with DefaultHttpxClient(trust_env=False) as http:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0)


def ask(client: OpenAI, model: str, prompt: str, new_tokens: int, show: Show) -> Answer:
    """One chat completion, streamed, with the token ids that vLLM returns on request."""
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=new_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    prompt_ids: list[int] = []
    tokens: list[int] = []
    pieces: list[str] = []
    counted = 0
    for chunk in stream:
        prompt_ids += (chunk.model_extra or {}).get("prompt_token_ids") or []
        for choice in chunk.choices:
            tokens += (choice.model_extra or {}).get("token_ids") or []
            if choice.delta.content:
                pieces.append(choice.delta.content)
                show(choice.delta.content)
        if chunk.usage is not None:
            counted = chunk.usage.completion_tokens
    seconds = time.perf_counter() - began
    if not prompt_ids or len(tokens) != counted:
        raise ServerError(
            f"the server counted {counted} new tokens, but returned the ids of {len(tokens)}, and "
            f"{len(prompt_ids)} of the prompt: it must be a vLLM that knows return_token_ids"
        )
    return Answer(tuple(prompt_ids), tuple(tokens), "".join(pieces), seconds)


def stream_figures(run: Run) -> dict[str, Any]:
    """How the link was used: bytes a pass, bytes/s while it was busy, and its busy share.

    The share is of the requests' wall time, the prompts' own passes included, since the stream
    runs in those too.
    """
    counted = Statistics.from_report(run.statistics)
    return {
        "streamed_bytes_per_pass": counted.streamed_bytes_per_pass,
        "link_bandwidth": counted.link_bandwidth,
        "link_utilization": counted.stream_read_busy_s / run.seconds,
    }


def speculation_figures(run: Run) -> dict[str, Any]:
    """Acceptance, and where a decode step's time goes.

    ``acceptance_length`` is the paper's tau: tokens that reached the output per target pass, each
    answer's first token left out, since the prompt's own pass gives that one.
    ``draft_step_ms`` is of steps between passes; 0 where there was none.
    """
    counted = Statistics.from_report(run.statistics)
    return {
        "acceptance_length": (run.new_tokens - len(run.answers)) / counted.target_passes,
        "target_passes": counted.target_passes,
        "nodes_per_pass": counted.nodes_per_pass,
        "acceptance_by_level": list(counted.acceptance_by_level),
        "draft_step_ms": 1e3 * counted.draft_step_s,
        "target_pass_ms": 1e3 * counted.target_pass_s,
    }
