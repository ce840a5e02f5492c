"""Drafting on the target's own module tree in draft view (design D1, D2, D10)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from subspec_kernels.kv_cache import gather_context
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.draft.growth import grow
from vllm_subspec.draft.scratch import DraftScratch
from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.integration.attention import DraftAttentionMetadata
from vllm_subspec.integration.linear import View
from vllm_subspec.integration.rows import RowProcessor
from vllm_subspec.verify.position_noise import PositionNoise

_NO_TOP_K = 1 << 30
_NUM_RANKED = 256  # tokens of a row that noise may lift; the rest are never the target's draw


@dataclass(frozen=True)
class DraftPolicy:
    """How trees are grown; it may change between passes, since no output depends on it.

    Attributes:
        shape: of the trees.
        draft_temperature: sharpening T_d.
        noise_coupling: whether sampled requests draft with the target's own noise (D10).
    """

    shape: TreeShape
    draft_temperature: float
    noise_coupling: bool

    @classmethod
    def of(cls, config: SubSpecConfig) -> DraftPolicy:
        """The policy that the settings ask for."""
        shape = TreeShape(config.width, config.depth, config.max_nodes)
        return cls(shape, config.draft_temperature, config.noise_coupling)


@dataclass(frozen=True)
class DraftRequest:
    """A request to draft for, between two target passes.

    Attributes:
        batch_row: its row in vLLM's persistent batch.
        root: last committed token; its keys and values are not in the cache yet.
        num_context: positions before the root, all in the cache.
        max_depth: levels that may still be committed, >= 1.
        output: tokens committed so far, the root included.
        generator: what a sampled request draws from, at the root's draw; ``None`` if greedy.
        block_ids: int64 per KV cache group, the request's blocks in order.
    """

    batch_row: int
    root: int
    num_context: int
    max_depth: int
    output: list[int]
    generator: torch.Generator | None
    block_ids: Sequence[torch.Tensor]


class Drafter:
    """Grows a tree for each request with the shadow, context read from vLLM's blocks."""

    def __init__(
        self,
        policy: DraftPolicy,
        vllm_config: VllmConfig,
        view: View,
        rows: RowProcessor,
        noise: PositionNoise,
    ) -> None:
        self.policy = policy
        self._vllm_config = vllm_config
        self._view = view
        self._rows = rows
        self._noise = noise
        self._scratch = DraftScratch(vllm_config.model_config.dtype, torch.device("cpu"))
        self.num_steps = 0
        self.seconds = 0.0

    def bind(self, model: nn.Module, layers: dict[str, Attention], groups: dict[str, int]) -> None:
        """Take the loaded model, its attention layers by name, and their KV cache groups."""
        self._model = model
        self._layers = list(layers.values())
        self._groups = [groups[name] for name in layers]
        self._heads = [(layer.num_kv_heads, layer.head_size) for layer in self._layers]
        self._metadata = {
            name: DraftAttentionMetadata(self._scratch, index) for index, name in enumerate(layers)
        }

    def draft(
        self,
        requests: Sequence[DraftRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
    ) -> list[Tree]:
        """One tree per request, none deeper than the request may still commit.

        Args:
            requests: at least one.
            metadata: of the whole batch.
            params: of the whole batch, by batch row.
        """
        start = time.perf_counter()
        policy = self.policy
        depth = min(policy.shape.depth, max(request.max_depth for request in requests))
        shape = replace(policy.shape, depth=depth)
        self._load_context(requests, shape)
        roots = torch.tensor([request.root for request in requests])
        noise = self._noise if policy.noise_coupling else None
        rank = _Rank(self._rows, requests, metadata, params, depth, noise)
        step = _Step(self, requests)
        trees = grow(step, roots, shape, policy.draft_temperature, None if rank.is_plain else rank)
        self.num_steps += depth
        self.seconds += time.perf_counter() - start
        return [
            tree.limit_depth(request.max_depth)
            for tree, request in zip(trees, requests, strict=True)
        ]

    def _load_context(self, requests: Sequence[DraftRequest], shape: TreeShape) -> None:
        contexts = [request.num_context for request in requests]
        self._scratch.begin(self._heads, contexts, 1 + shape.width * shape.depth)
        for index, (layer, group) in enumerate(zip(self._layers, self._groups, strict=True)):
            for row, request in enumerate(requests):
                keys, values = self._scratch.context(index, row)
                gather_context(
                    layer.kv_cache, request.block_ids[group], request.num_context, keys, values
                )


class _Step:
    """The draft forward of `grow`: one level of all requests through the model."""

    def __init__(self, drafter: Drafter, requests: Sequence[DraftRequest]) -> None:
        self._drafter = drafter
        self._root_positions = torch.tensor([[request.num_context] for request in requests])

    def __call__(self, tokens: torch.Tensor, level: int, mask: torch.Tensor) -> torch.Tensor:
        drafter = self._drafter
        drafter._scratch.advance(level, mask)
        # vLLM's C++ kernels read positions as a dense array: an expanded view would not do.
        positions = (self._root_positions + level).expand_as(tokens).flatten().contiguous()
        context = set_forward_context(
            drafter._metadata, drafter._vllm_config, num_tokens=tokens.numel(), slot_mapping={}
        )
        with drafter._view.draft(), context:
            hidden = drafter._model(input_ids=tokens.flatten().contiguous(), positions=positions)
            logits = drafter._model.compute_logits(hidden)
        return logits.float().view(*tokens.shape, -1)


class _Rank:
    """Ranks the draft's candidates as the request's own sampler would, noise included (D10)."""

    def __init__(
        self,
        rows: RowProcessor,
        requests: Sequence[DraftRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        depth: int,
        noise: PositionNoise | None,
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
            self._temperature = _column([max(p.temperature, 1e-5) for p in chosen])
            self._top_k = _column([p.top_k if p.top_k > 0 else _NO_TOP_K for p in chosen])
            self._top_p = _column([p.top_p for p in chosen])
            self._min_p = _column([p.min_p for p in chosen])

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
        barred |= torch.arange(ids.shape[-1]) >= top_k
        kept = probs.masked_fill(barred, 0)
        if bool((top_k < _NO_TOP_K).any()):
            kept = kept / kept.sum(-1, keepdim=True)
        barred |= kept.cumsum(-1) - kept >= self._top_p[which]
        if self._noise is not None:
            draws = torch.stack([self._draws[i][level] for i in which.tolist()])
            ranked = (ranked + self._noise.gumbel(draws, ids)).float()
        ranked = ranked.masked_fill(barred, float("-inf"))
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, ranked)


def _column(values: Sequence[float]) -> torch.Tensor:
    """[requests, 1, 1], to meet [requests, m, vocab]."""
    return torch.tensor(values)[:, None, None]
