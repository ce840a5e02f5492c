"""Draft candidates ranked as the request's own sampler would, noise included (design D10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_subspec.integration.rows import RowProcessor
from vllm_subspec.verify.position_noise import PositionNoise

_NO_TOP_K = 1 << 30
_NUM_RANKED = 256  # tokens of a row that noise may lift; the rest are never the target's draw


class RankedRequest(Protocol):
    """What is asked of a request: see ``DraftRequest``."""

    batch_row: int
    output: list[int]
    generator: torch.Generator | None


class DraftRanking:
    """Ranks the draft's candidates as the request's own sampler would, noise included (D10)."""

    def __init__(
        self,
        rows: RowProcessor,
        requests: Sequence[RankedRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        depth: int,
        noise: PositionNoise | None,
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._noise = noise
        self._requests = requests
        self._metadata = metadata
        self._params = params
        chosen = [params[request.batch_row] for request in requests]
        self._alters = any(
            p.min_tokens
            or p.logit_bias
            or p.bad_words
            or p.allowed_token_ids
            or p.presence_penalty
            or p.frequency_penalty
            or p.repetition_penalty != 1.0
            for p in chosen
        )
        self._sampled = torch.tensor([request.generator is not None for request in requests])
        self.is_plain = not self._alters and not bool(self._sampled.any())
        self._draws = [
            None
            if noise is None or request.generator is None
            else noise.peek(request.generator, depth)
            for request in requests
        ]
        if bool(self._sampled.any()):
            self._temperature = _column([max(p.temperature, 1e-5) for p in chosen], device)
            self._top_k = _column([p.top_k if p.top_k > 0 else _NO_TOP_K for p in chosen], device)
            self._top_p = _column([p.top_p for p in chosen], device)
            self._min_p = _column([p.min_p for p in chosen], device)
            self._is_cut = any(p.top_k > 0 for p in chosen)

    def __call__(self, logits: torch.Tensor, level: int, history: torch.Tensor) -> torch.Tensor:
        if self._alters:
            logits = self._altered(logits, history)
        sampled = self._sampled.nonzero().flatten()
        if len(sampled):
            logits[sampled] = self._noisy(logits[sampled], level, sampled)
        return logits

    def _altered(self, logits: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        m = logits.shape[1]
        rows = [request.batch_row for request in self._requests for _ in range(m)]
        outputs = [request.output for request in self._requests for _ in range(m)]
        paths = history.flatten(0, 1).tolist()
        histories = [[*output, *path] for output, path in zip(outputs, paths, strict=True)]
        selected = self._rows.select_rows(self._metadata, self._params, rows, histories)
        altered = self._rows.sampler.apply_logits_processors(logits.flatten(0, 1), selected, False)
        return altered.view_as(logits)

    def _noisy(self, logits: torch.Tensor, level: int, which: torch.Tensor) -> torch.Tensor:
        """Temperature, min-p, top-k, top-p on each row's best tokens, plus the target's noise.

        Order and cuts follow vLLM's sampler; only the tail beyond the best tokens is left out,
        which can cost agreement and never exactness.
        """
        temperature, top_k = self._temperature[which], self._top_k[which]
        best, ids = logits.topk(min(_NUM_RANKED, logits.shape[-1]), dim=-1)
        ranked = best / temperature
        total = (logits / temperature).logsumexp(-1, keepdim=True)
        probs = (ranked - total).exp()
        barred = probs < self._min_p[which] * probs[..., :1]
        barred |= torch.arange(ids.shape[-1], device=ids.device) >= top_k
        kept = probs.masked_fill(barred, 0)
        if self._is_cut:
            kept = kept / kept.sum(-1, keepdim=True)
        barred |= kept.cumsum(-1) - kept >= self._top_p[which]
        if self._noise is not None:
            draws = torch.stack([self._draws[i][level] for i in which.tolist()])
            ranked = (ranked + self._noise.gumbel(draws, ids)).float()
        ranked = ranked.masked_fill(barred, float("-inf"))
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, ranked)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """[requests, 1, 1], to meet [requests, m, vocab]."""
    return torch.tensor(values, device=device)[:, None, None]
