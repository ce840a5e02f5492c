"""What speculation remembers of each request between steps, keyed by request id.

Batch rows are looked up anew in every step: requests move, abort and get preempted in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_subspec.draft.tree import Tree
from vllm_subspec.integration.drafter import Drafter, DraftRequest
from vllm_subspec.integration.request_options import RequestOptions
from vllm_subspec.integration.rows import has_thinking_budgets
from vllm_subspec.integration.sampler import Verification
from vllm_subspec.verify.walk import Walk

logger = init_logger("vllm.subspec")

_EPS = 1e-5  # vLLM's border between greedy and sampled (v1/sample/sampler.py)


class Speculation:
    """Trees and private generators of the requests of one runner.

    Args:
        drafter: grows the trees.
        max_model_len: positions a request may reach.
        device: of the logits, and so of the generators.
    """

    def __init__(self, drafter: Drafter, max_model_len: int, device: torch.device) -> None:
        self.drafter = drafter
        self._max_model_len = max_model_len
        self._device = device
        self._trees: dict[str, Tree] = {}
        self._generators: dict[str, torch.Generator] = {}

    def remembered(self) -> set[str]:
        """Ids of the requests of which anything is remembered."""
        return self._trees.keys() | self._generators.keys() | self.drafter.remembered()

    def forget(self, req_id: str) -> None:
        """Drop what is remembered of a request that is over."""
        self._trees.pop(req_id, None)
        self._generators.pop(req_id, None)
        self.drafter.forget(req_id)

    def alone(
        self, scheduled: Iterable[str], requests: Mapping[str, CachedRequestState]
    ) -> str | None:
        """The one request of a step that drafts; ``None`` if none does, or several do.

        Args:
            scheduled: ids of the step.
            requests: the runner's cached states, the step's new requests not among them.
        """
        drafting = [
            req_id
            for req_id in scheduled
            if req_id not in requests
            or RequestOptions.of(requests[req_id].sampling_params.extra_args).speculate
        ]
        return drafting[0] if len(drafting) == 1 else None

    def verification(
        self,
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        scheduled: Mapping[str, Sequence[int]],
        discarded: Sequence[bool],
    ) -> Verification:
        """What the coming pass verifies, by batch row.

        Args:
            batch: the runner's persistent batch.
            requests: its cached request states.
            scheduled: drafts that the scheduler kept of each request's tree.
            discarded: rows whose draw nobody sees.
        """
        states = [requests[req_id] for req_id in batch.req_ids]
        draftless = has_thinking_budgets(batch.thinking_budget_state_holder)
        return Verification(
            trees=[
                self._scheduled(state, scheduled.get(state.req_id, ()), draftless)
                for state in states
            ],
            params=[state.sampling_params for state in states],
            outputs=[state.output_token_ids for state in states],
            generators=[self._generator(state) for state in states],
            discarded=discarded,
        )

    def _scheduled(self, state: CachedRequestState, drafts: Sequence[int], draftless: bool) -> Tree:
        """The head of the request's tree that was scheduled; empty for vLLM's own placeholders."""
        grown = self._trees.get(state.req_id)
        if grown is None or not len(grown):
            return Tree.empty()
        if draftless:
            self.drafter.counters.count_fallback("thinking_budget")
            return Tree.empty()
        tree = grown.truncate(len(drafts))
        if not drafts or tree.tokens.tolist() != list(drafts):
            if state.sampling_params.structured_outputs is None:  # else counted as it was drafted
                self.drafter.counters.count_fallback("unscheduled")
            return Tree.empty()
        return tree

    def _generator(self, state: CachedRequestState) -> torch.Generator | None:
        """What a sampled request draws from: its own seed's generator, or a private one."""
        if state.sampling_params.temperature < _EPS:
            return None
        if state.generator is not None:
            return state.generator
        if state.req_id not in self._generators:
            seed = int(torch.randint(0, 2**62, (1,)))
            generator = torch.Generator(self._device).manual_seed(seed)
            self._generators[state.req_id] = generator
        return self._generators[state.req_id]

    def draft(
        self,
        batch: InputBatch,
        requests: Mapping[str, CachedRequestState],
        metadata: SamplingMetadata,
        sampled: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Grow a tree for each request that goes on; its tokens in level order, by batch row.

        Args:
            batch: the runner's persistent batch.
            requests: its cached request states.
            metadata: of the batch.
            sampled: tokens each row has just committed, already part of its output; none for an
                unfinished prompt.
        """
        drafts: list[list[int]] = [[] for _ in batch.req_ids]
        states = [requests[req_id] for req_id in batch.req_ids]
        for req_id in batch.req_ids:
            self._trees.pop(req_id, None)
        wanted = [
            request
            for row, tokens in enumerate(sampled)
            if tokens and (request := self._request(batch, row, states[row], tokens)) is not None
        ]
        if has_thinking_budgets(batch.thinking_budget_state_holder):
            for _ in wanted:
                self.drafter.counters.count_fallback("thinking_budget")
            return drafts
        if not wanted:
            return drafts
        params = [state.sampling_params for state in states]
        trees = self.drafter.draft(wanted, metadata, params)
        for request, tree in zip(wanted, trees, strict=True):
            row = request.batch_row
            if params[row].structured_outputs is not None and len(tree):
                logger.info_once(
                    "SubSpec: requests with a grammar draft a chain, along which the scheduler "
                    "checks them"
                )
                self.drafter.counters.count_fallback("grammar")
                tree = tree.best_path()
            self._trees[batch.req_ids[row]] = tree
            drafts[row] = tree.tokens.tolist()
        return drafts

    def _request(
        self, batch: InputBatch, row: int, state: CachedRequestState, committed: Sequence[int]
    ) -> DraftRequest | None:
        """What to draft for a request; ``None`` if it wants no draft, is over, or will be with its
        next token."""
        params, output = state.sampling_params, state.output_token_ids
        num_tokens = int(batch.num_tokens_no_spec[row])
        max_depth = min(self._max_model_len - num_tokens, params.max_tokens - len(output)) - 1
        ended = output[-1] in stop_tokens(params) and len(output) >= params.min_tokens
        if max_depth < 1 or ended:
            return None
        options = RequestOptions.of(params.extra_args)
        if not options.speculate:
            self.drafter.counters.count_fallback("opted_out")
            return None
        tables = [table.block_table.gpu[row] for table in batch.block_table.block_tables]
        return DraftRequest(
            req_id=state.req_id,
            batch_row=row,
            committed=committed,
            num_context=num_tokens - 1,
            max_depth=max_depth,
            depth_cap=options.depth,
            tokens=batch.token_ids_cpu[row],
            output=output,
            generator=self._generator(state),
            block_tables=tables,
        )


def stop_tokens(params: SamplingParams) -> set[int | None]:
    """Tokens that end a request (vLLM v1/core/sched/utils.py, check_stop)."""
    return {params.eos_token_id, *(params.stop_token_ids or ())}


def num_reaching_output(verification: Verification, walk: Walk) -> list[int]:
    """How many of each row's committed tokens come before its end: vLLM drops what follows."""
    counts = []
    for row, length in enumerate(walk.lengths.tolist()):
        params, before = verification.params[row], len(verification.outputs[row])
        stops = stop_tokens(params)
        ends = (
            count
            for count, token in enumerate(walk.tokens[row, :length].tolist(), start=1)
            if token in stops and before + count >= params.min_tokens
        )
        counts.append(next(ends, length))
    return counts
