"""Verification's sampler: draw the target at tree nodes, follow the draws (design D4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import sample_with_exponential_noise
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_subspec.draft.tree import Tree
from vllm_subspec.integration.rows import RowProcessor, has_thinking_budgets
from vllm_subspec.verify.position_noise import ExponentialNoise, HashedNoise, PositionNoise
from vllm_subspec.verify.walk import Walk, walk_trees


@dataclass(frozen=True)
class Verification:
    """What one pass verifies, one entry per batch row.

    Attributes:
        trees: the drafted trees as scheduled; empty where nothing was drafted.
        params: the requests' sampling parameters.
        outputs: tokens each request has committed so far.
        generators: the generator each sampled request draws from; ``None`` for greedy ones.
        discarded: rows whose draw nobody sees (an unfinished prompt): their generators rest.
    """

    trees: Sequence[Tree]
    params: Sequence[SamplingParams]
    outputs: Sequence[list[int]]
    generators: Sequence[torch.Generator | None]
    discarded: Sequence[bool]


class TreeRejectionSampler(RejectionSampler):
    """Rejection sampling against one-hot proposals, for trees of any shape.

    At each visited node x is drawn from the target's processed distribution; the child that
    holds x is entered, or x ends the pass. The draw of a position is the one that the request's
    own generator would have given without speculation, and the generator moves by the committed
    tokens only, so seeded requests yield the same tokens as without speculation.
    """

    def __init__(self, sampler: Sampler, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(sampler, vllm_config.speculative_config, device)
        self.noise = _position_noise(sampler, vllm_config, device)
        self.rows = RowProcessor(sampler, vllm_config, device)
        self.verification: Verification | None = None
        self.walk: Walk | None = None

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Draw, walk, and return the committed tokens [batch, longest path + 1], padded with -1.

        ``self.verification`` must describe the batch; the walk is left in ``self.walk``.
        """
        verification, self.verification = self.verification, None
        assert verification is not None, "the runner sets the verification before each step"
        draw = _Draw(self, verification, metadata.num_draft_tokens, logits, sampling_metadata)
        self.walk = draw.follow()
        tokens = self.walk.tokens[:, : int(self.walk.lengths.max())]
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32),
            logprobs_tensors=draw.logprobs(self.walk, tokens),
        )


class _Draw:
    """One pass: rows of all requests in one list, row 0 of each being its root.

    The scheduler may have scheduled placeholders for a request without a tree, so a request's
    logits start at ``logit_starts``, while its rows start at ``starts``.
    """

    def __init__(
        self,
        owner: TreeRejectionSampler,
        verification: Verification,
        num_draft_tokens: Sequence[int],
        logits: torch.Tensor,
        metadata: SamplingMetadata,
    ) -> None:
        self.owner = owner
        self.verification = verification
        self.logits = logits
        self.metadata = metadata
        self.starts = _starts([len(tree) for tree in verification.trees])
        self.logit_starts = _starts(num_draft_tokens)
        # The walk is the host's, wherever the logits are: vLLM takes its tokens as lists.
        self.drawn = torch.full((self.starts[-1],), -1, dtype=torch.int64)
        self.draws = [
            None if generator is None else owner.noise.peek(generator, tree.depth + 1)
            for generator, tree in zip(verification.generators, verification.trees, strict=True)
        ]
        self.processed: dict[int, torch.Tensor] = {}

    def follow(self) -> Walk:
        """Draw along the paths until no request finds its draw among the children.

        A row's draw costs what a token costs without speculation (top-p sorts the vocabulary),
        so on a CPU only visited rows are drawn, one level a round; greedy rows that nothing
        alters are one argmax, so all of them are taken at once.
        """
        trees = self.verification.trees
        if self._plain_greedy():
            best = self.owner.sampler.greedy_sample(self.logits.float()).cpu()
            for tree, start, logit_start in zip(
                trees, self.starts, self.logit_starts, strict=False
            ):
                count = len(tree) + 1
                self.drawn[start : start + count] = best[logit_start : logit_start + count]
            return walk_trees(trees, self.drawn)
        while True:
            walk = walk_trees(trees, self.drawn)
            last = walk.rows.gather(1, walk.lengths[:, None] - 1).squeeze(1)
            pending = [
                (request, row)
                for request, row in enumerate(last.tolist())
                if self.drawn[self.starts[request] + row] < 0
            ]
            if not pending:
                self._advance(walk)
                return walk
            paths = [walk.tokens[r, : int(walk.lengths[r]) - 1].tolist() for r, _ in pending]
            self._draw_rows(pending, paths)

    def _plain_greedy(self) -> bool:
        metadata = self.metadata
        return (
            metadata.all_greedy
            and metadata.no_penalties
            and not metadata.bad_words_token_ids
            and metadata.allowed_token_ids_mask is None
            and not any(p.min_tokens or p.logit_bias for p in self.verification.params)
            and not has_thinking_budgets(metadata.thinking_budget_state_holder)
            and not self._keeps_processed()
        )

    def _keeps_processed(self) -> bool:
        owner = self.owner
        return self._num_logprobs() is not None and owner.is_processed_logprobs_mode

    def _num_logprobs(self) -> int | None:
        """Most logprobs that any request wants beside its token's own; ``None`` if none does."""
        given = self.metadata.logprob_token_ids or {}
        counts = [len(token_ids) for token_ids in given.values()]
        if self.metadata.max_num_logprobs is not None:
            counts.append(self.metadata.max_num_logprobs)
        return max(counts, default=None)

    def _draw_rows(self, pending: list[tuple[int, int]], paths: list[list[int]]) -> None:
        rows = [self.logit_starts[request] + row for request, row in pending]
        requests = [request for request, _ in pending]
        histories = [
            [*self.verification.outputs[request], *path]
            for request, path in zip(requests, paths, strict=True)
        ]
        logits, greedy = self.owner.rows.process(
            self.logits[rows].to(torch.float32),
            self.metadata,
            self.verification.params,
            requests,
            histories,
        )
        tokens = self.owner.sampler.greedy_sample(logits)
        sampled = (~greedy).nonzero().flatten()
        if len(sampled):
            draws = [self.draws[requests[i]][len(paths[i])] for i in sampled.tolist()]
            tokens[sampled] = self.owner.noise.choose(logits[sampled], torch.stack(draws))
        drawn = tokens.cpu().to(torch.int64)
        self.drawn[[self.starts[request] + row for request, row in pending]] = drawn
        if self._keeps_processed():
            self.processed.update(zip(rows, logits, strict=True))

    def _advance(self, walk: Walk) -> None:
        """Move each generator by what its request committed, as token by token would have."""
        verification = self.verification
        for generator, count, discarded in zip(
            verification.generators, walk.lengths.tolist(), verification.discarded, strict=True
        ):
            if generator is not None and not discarded:
                self.owner.noise.advance(generator, count)

    def logprobs(self, walk: Walk, tokens: torch.Tensor) -> LogprobsTensors | None:
        """Logprobs of exactly the committed tokens, [batch * longest path, ...]."""
        wanted = self._num_logprobs()
        if wanted is None:
            return None
        starts = torch.tensor(self.logit_starts[:-1])
        rows = walk.rows[:, : tokens.shape[1]].clamp(min=0) + starts[:, None]
        rows, tokens = rows.flatten(), tokens.to(self.logits.device)
        if self._keeps_processed():
            blank = self.logits.new_zeros(self.logits.shape[-1], dtype=torch.float32)
            values = torch.stack([self.processed.get(row, blank) for row in rows.tolist()])
        else:
            values = self.logits[rows.to(self.logits.device)].to(torch.float32)
        if not self.owner.is_logits_logprobs_mode:
            values = self.owner.sampler.compute_logprobs(values)
        chosen = tokens.clamp(min=0).flatten()
        tensors = self.owner.sampler.gather_logprobs(values, wanted, chosen)
        for request, token_ids in (self.metadata.logprob_token_ids or {}).items():
            own = slice(request * tokens.shape[1], (request + 1) * tokens.shape[1])
            given = torch.tensor(token_ids, dtype=torch.int64, device=tokens.device)
            tensors.logprob_token_ids[own, 1 : 1 + len(given)] = given.to(torch.int32)
            tensors.logprobs[own, 1 : 1 + len(given)] = values[own, given]
        return tensors


def _position_noise(
    sampler: Sampler, vllm_config: VllmConfig, device: torch.device
) -> PositionNoise:
    """The noise of the sampler that vLLM runs here (v1/sample/ops/topk_topp_sampler.py)."""
    if device.type == "cpu" and not sampler.use_fp64_gumbel:
        return HashedNoise(torch.ops._C.fused_gumbel_argmax)
    dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
    vocab_size = vllm_config.model_config.get_vocab_size()
    return ExponentialNoise(vocab_size, dtype, sample_with_exponential_noise)


def _starts(num_draft_tokens: Sequence[int]) -> list[int]:
    """First row of each request, and the number of rows at the end; a root precedes its drafts."""
    return [0, *accumulate(count + 1 for count in num_draft_tokens)]
