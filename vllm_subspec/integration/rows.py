"""vLLM's own logits processing, applied to arbitrary rows of tree nodes.

A row belongs to a request and has its own history: the request's output, then the tokens on the
node's path. `select_rows` makes the `SamplingMetadata` under which vLLM's `Sampler` methods treat
each row as a request of its own (vLLM v1/sample/sampler.py, v1/sample/metadata.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class RowProcessor:
    """Turns raw logits of rows into what the request's sampler compares."""

    def __init__(self, sampler: Sampler, vllm_config: VllmConfig, device: torch.device) -> None:
        self.sampler = sampler
        self._vllm_config = vllm_config
        self._device = device

    def process(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        requests: Sequence[int],
        histories: Sequence[list[int]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply every processor of vLLM's sampler, in its order, up to the draw.

        Args:
            logits: float32 [rows, vocab], changed in place.
            metadata: of the batch.
            params: of the batch's requests.
            requests: batch index of each row.
            histories: output tokens before each row's draw, path included.

        Returns:
            Processed logits [rows, vocab] (those of greedy rows without temperature) and the
            greedy rows, bool [rows].
        """
        rows = self.select_rows(metadata, params, requests, histories)
        # vLLM's thinking budgets find a request's row only where each has one, as for bonus tokens.
        one_row_each = rows.thinking_budget_state_holder is not None
        logits = self.sampler.apply_logits_processors(logits, rows, one_row_each)
        if rows.all_greedy:
            return logits, torch.ones(len(requests), dtype=torch.bool, device=logits.device)
        assert rows.temperature is not None
        greedy = rows.temperature < _SAMPLING_EPS
        untouched = logits[greedy]
        logits = self.sampler.apply_temperature(logits, rows.temperature, rows.all_random)
        for processor in rows.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, rows.top_k, rows.top_p)
        logits[greedy] = untouched
        return logits, greedy

    def select_rows(
        self,
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        requests: Sequence[int],
        histories: Sequence[list[int]],
    ) -> SamplingMetadata:
        """The batch's metadata with one entry per row; see the module."""
        index = torch.tensor(requests, dtype=torch.int64, device=self._device)

        def pick(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[index]

        penalties = not metadata.no_penalties
        bad_words = {
            row: metadata.bad_words_token_ids[request]
            for row, request in enumerate(requests)
            if request in metadata.bad_words_token_ids
        }
        row_params = [params[request] for request in requests]
        return replace(
            metadata,
            temperature=pick(metadata.temperature),
            top_p=pick(metadata.top_p),
            top_k=pick(metadata.top_k),
            generators={},
            prompt_token_ids=pick(metadata.prompt_token_ids) if penalties else None,
            frequency_penalties=pick(metadata.frequency_penalties) if penalties else None,
            presence_penalties=pick(metadata.presence_penalties) if penalties else None,
            repetition_penalties=pick(metadata.repetition_penalties) if penalties else None,
            output_token_ids=list(histories),
            allowed_token_ids_mask=pick(metadata.allowed_token_ids_mask),
            bad_words_token_ids=bad_words,
            logitsprocs=LogitsProcessors(self._processors(row_params, histories)),
            logprob_token_ids=None,
            spec_token_ids=None,
            thinking_budget_state_holder=self._thinking_budgets(metadata, requests),
        )

    @staticmethod
    def _thinking_budgets(
        metadata: SamplingMetadata, requests: Sequence[int]
    ) -> ThinkingBudgetStateHolder | None:
        """vLLM keeps thinking budgets by batch index: the runner then verifies roots only."""
        holder = metadata.thinking_budget_state_holder
        if not has_thinking_budgets(holder):
            return None
        assert list(requests) == list(range(len(requests))), "thinking budgets exclude trees"
        return holder

    def _processors(
        self, params: Sequence[SamplingParams], histories: Sequence[list[int]]
    ) -> list[LogitsProcessor]:
        """vLLM's built-in processors that these rows need, loaded with one entry per row."""
        kinds: list[type[LogitsProcessor]] = []
        if any(p.min_tokens for p in params):
            kinds.append(MinTokensLogitsProcessor)
        if any(p.logit_bias for p in params):
            kinds.append(LogitBiasLogitsProcessor)
        update = BatchUpdate(
            batch_size=len(params),
            removed=(),
            added=[(row, p, None, histories[row]) for row, p in enumerate(params)],
            moved=(),
        )
        processors: list[LogitsProcessor] = []
        for kind in kinds:
            processor = kind(self._vllm_config, self._device, False)
            processor.update_state(update)
            processors.append(processor)
        if any(p.min_p for p in params):
            processors.append(_RowMinP(params, self._device))
        return processors


def has_thinking_budgets(holder: ThinkingBudgetStateHolder | None) -> bool:
    """Whether any request of the batch has a budget of thinking tokens."""
    return holder is not None and holder.has_tracked_requests()


class _RowMinP(MinPLogitsProcessor):
    """min-p for any number of rows; the base class holds one entry per request at most."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self.min_p_count = len(params)
        self.min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=device)
