"""An engine of a sweep: lets the model write, and replays drafts along what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from vllm_subspec import envs
from vllm_subspec.draft.replay import Pass
from vllm_subspec.plan import ModelShape, Placement

_EXTENSION = "vllm_subspec.integration.replay.ReplayExtension"
_BLOCK_TOKENS = 128  # vLLM's CPU block
_MOST_PROMPT_TOKENS = 128
_KEPT_STEPS = 64  # that a request may live while others still read their prompts
_UNDRAFTED = {"extra_args": {"subspec": False}, "ignore_eos": True}

Texts = list[tuple[list[int], int]]
"""Token ids of prompt and answer, and how many of them are the prompt."""


class ReplayEngine:
    """vLLM in this process, its requests standing still while drafts are replayed.

    Args:
        llm: vLLM's ``LLM`` with the extension.
        at_once: texts that it has room for.
    """

    def __init__(self, llm: Any, at_once: int) -> None:
        from vllm_subspec.integration.offline import SamplingParams

        self._llm = llm
        self._at_once = at_once
        self._params = SamplingParams
        self._ids = count()

    @property
    def placement(self) -> Placement:
        """Of the layers."""
        return Placement.from_json(self.rpc("subspec_placement"))

    @property
    def shadow_bytes(self) -> int:
        """Of all shadows, the head's too."""
        return int(self.rpc("subspec_statistics")["shadow_bytes"])

    def rpc(self, method: str, *args: Any) -> Any:
        """The answer of the only worker."""
        return self._llm.collective_rpc(method, args=args)[0]

    def write(self, prompts: Sequence[str], new_tokens: int, temperature: float) -> Texts:
        """Answers without drafts, all at once; sampled ones have the prompt's place as seed."""
        tokenizer = self._llm.get_tokenizer()
        asked = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
            for prompt in prompts
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens in asked],
            self._sampling(len(asked), temperature, new_tokens),
            use_tqdm=False,
        )
        return [
            ([*tokens, *output.outputs[0].token_ids], len(tokens))
            for tokens, output in zip(asked, outputs, strict=True)
        ]

    @contextmanager
    def _holding(self, texts: Texts, temperature: float) -> Iterator[None]:
        """Keys and values of ``texts`` are there inside the block, as the target computes them."""
        engine = self._llm.llm_engine
        waiting = {str(next(self._ids)): tokens for tokens, _ in texts}
        ids = list(waiting)
        params = self._sampling(len(ids), temperature, _KEPT_STEPS)
        for id_, param in zip(ids, params, strict=True):
            engine.add_request(id_, {"prompt_token_ids": waiting[id_]}, param)
        while waiting:
            for output in engine.step():
                waiting.pop(output.request_id, None)
        try:
            yield
        finally:
            engine.abort_request(ids)
            engine.step()

    def replay(
        self,
        texts: Texts,
        temperature: float,
        width: int,
        draft_temperature: float,
        depths: Sequence[int],
    ) -> list[list[list[Pass]]]:
        """Passes by text and depth."""
        found: list[list[list[Pass]]] = []
        for first in range(0, len(texts), self._at_once):
            held = texts[first : first + self._at_once]
            with self._holding(held, temperature):
                found += self.rpc("subspec_replay", held, width, draft_temperature, list(depths))
        return found

    def score(
        self, sequences: Sequence[Sequence[int]], alone: bool
    ) -> list[tuple[list[float], list[int]]]:
        """Of each sequence: surprise by its next tokens in nats, and the likeliest tokens."""
        found: list[tuple[list[float], list[int]]] = self.rpc(
            "subspec_score", [list(tokens) for tokens in sequences], alone
        )
        return found

    def alone_step_s(self, text: tuple[list[int], int]) -> float:
        """Seconds a token takes the shadow alone."""
        with self._holding([text], 0.0):
            return float(self.rpc("subspec_alone_step_s", text))

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return list(self._llm.get_tokenizer().encode(text))

    def _sampling(self, number: int, temperature: float, max_tokens: int) -> list[Any]:
        return [
            self._params(temperature=temperature, seed=seed, max_tokens=max_tokens, **_UNDRAFTED)
            for seed in range(number)
        ]


@contextmanager
def replay_engine(
    model: Path, options: Mapping[str, Any], at_once: int, new_tokens: int
) -> Iterator[ReplayEngine]:
    """Start an engine in this process, and stop it; its memory stays with the process.

    Args:
        model: a Hugging Face folder with a chat template.
        options: of SubSpec; without ``memory_budget`` the weights stay in memory.
        at_once: texts to have room for.
        new_tokens: of a text.

    Raises:
        UnsupportedError: no kernel serves these shadows.
        BudgetError: the budget is too small.
    """
    from vllm_subspec.integration.offline import LLM

    envs.keep_engine_in_process()
    room = _MOST_PROMPT_TOKENS + new_tokens + _KEPT_STEPS
    blocks = at_once * -(-room // _BLOCK_TOKENS) + 1
    place = {} if "memory_budget" in options else {"stream": "off", "width": 1, "depth": 1}
    llm = LLM(
        str(model),
        speculative_config={"method": "subspec", **place, **options},
        worker_extension_cls=_EXTENSION,
        max_model_len=room,
        max_num_seqs=at_once,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=blocks * _BLOCK_TOKENS * ModelShape.read(model).kv_bytes_per_token,
    )
    try:
        yield ReplayEngine(llm, at_once)
    finally:
        llm.llm_engine.engine_core.shutdown()
