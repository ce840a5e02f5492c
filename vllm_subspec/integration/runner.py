"""The runner: vLLM's step with trees in it. Every touch of the V1 runner is in this file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.offloader import set_offloader
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError, UnsupportedError
from vllm_subspec.integration.arguments import CONFIG_KEY
from vllm_subspec.integration.attention import TreeRows
from vllm_subspec.integration.compaction import Compactor
from vllm_subspec.integration.device import device_for
from vllm_subspec.integration.drafter import Drafter, DraftPolicy
from vllm_subspec.integration.metrics import carrying
from vllm_subspec.integration.offloader import SubSpecOffloader
from vllm_subspec.integration.placing import ranks_of
from vllm_subspec.integration.sampler import TreeRejectionSampler, Verification
from vllm_subspec.integration.speculation import Speculation, num_reaching_output
from vllm_subspec.integration.statistics import DraftCounters, SpeculationCounters, WorkClock
from vllm_subspec.statistics import Report, growth
from vllm_subspec.verify.walk import Walk

logger = init_logger("vllm.subspec")

_MOST_CAPTURED = 8  # each number of requests has graphs of its own, and scratch that stays


class SubSpecRunnerMixin:
    """Shadows, streaming, drafting and tree verification on vLLM's V1 model runner.

    Speculation state is keyed by request id, never by batch row: requests move, abort and get
    preempted between steps.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.fast_tier = device_for(device)
        self.fast_tier.override_attention(True)
        super().__init__(vllm_config, device)
        self.subspec_config = SubSpecConfig(**vllm_config.additional_config[CONFIG_KEY])
        self._ranks = ranks_of(vllm_config)
        self.offloader = SubSpecOffloader(self.subspec_config, vllm_config, self.fast_tier)
        set_offloader(self.offloader)
        self.counters = SpeculationCounters()
        self._clock = WorkClock()
        self._process = psutil.Process()
        self._sent: Report | None = None  # what the stat loggers know
        self.speculation: Speculation | None = None
        self._tree_rows: list[TreeRows] = []
        if self.subspec_config.speculate:
            self.rejection_sampler = TreeRejectionSampler(self.sampler, vllm_config, device)
            drafter = Drafter(
                DraftPolicy.of(self.subspec_config, self._ranks),
                vllm_config,
                self.offloader.view,
                self.rejection_sampler.rows,
                self.rejection_sampler.noise,
                self.offloader.timeline,
                self.offloader.waited_s,
                self.fast_tier,
                self.subspec_config.share_kv,
            )
            self.speculation = Speculation(drafter, self.max_model_len, device)
            self.offloader.while_waiting = drafter.extend
            self.offloader.between_draft_layers = drafter.step_aside

    # -- loading ---------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as on_failure:
            on_failure.callback(self.offloader.close)  # leaves no half-written spill behind
            with self.offloader.vocabulary.watching():
                super().load_model(*args, **kwargs)
            self.offloader.post_init()
            on_failure.pop_all()
        if self.speculation is not None:
            if self._ranks > 1:
                logger.info(
                    "SubSpec: %d ranks draft in step with each other: no post-speculation, and a "
                    "fixed depth",
                    self._ranks,
                )
            planned = self.offloader.placement.tree
            policy = DraftPolicy.of(self.subspec_config, self._ranks, planned)
            drafter = self.speculation.drafter
            drafter.set_policy(policy)
            drafter.forward.bind(
                self.model, get_layers_from_vllm_config(self.vllm_config, Attention)
            )
            drafter.forward.reserve(self._captured_requests, self._captured_slots)
        logger.info(self._describe())

    def _describe(self) -> str:
        offloader = self.offloader
        parts = [f"SubSpec: {offloader.placement_line()}"]
        if self.speculation is not None:
            policy = self.speculation.drafter.policy
            bits = sorted({b for b in offloader.placement.bits if b is not None})
            parts.append(
                f"drafts trees of {policy.shape.width} x {policy.shape.depth} (at most "
                f"{policy.max_nodes} nodes) with shadows of {'/'.join(map(str, bits))} bits, "
                f"{offloader.shadow_bytes / 1e6:.0f} MB"
            )
        return "; ".join(parts)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM's caches; then trees and drafts are led to them.

        Raises:
            UnsupportedError: blocks that the attention kernel splits, or a backend without trees.
        """
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        groups = {
            name: gid
            for gid, group in enumerate(self.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        for gid, attn_groups in enumerate(self.attn_groups):
            block = self.input_batch.block_table[gid].block_size
            if any(g.kernel_block_size not in (None, block) for g in attn_groups):
                raise UnsupportedError(
                    f"KV cache blocks of {block} tokens are split for the attention kernel; "
                    f"choose --block-size as a multiple of 32"
                )
        if self.speculation is not None:
            self._compactor = Compactor(layers, groups)
            self.speculation.drafter.forward.attend_in_groups(groups)

    @property
    def _captured_requests(self) -> int:
        """Requests of a growth whose steps run by graph, at most."""
        return min(_MOST_CAPTURED, self.scheduler_config.max_num_seqs)

    @property
    def _captured_slots(self) -> int:
        policy = self.speculation.drafter.policy
        return 1 + policy.shape.width * policy.most_levels

    def capture_drafts(self) -> None:
        """Before the first request, on a device that has graphs."""
        if self.speculation is None or self._ranks > 1:  # a graph of ranks' exchanges is untried
            return
        drafter = self.speculation.drafter
        num_graphs = drafter.forward.capture(
            self._captured_requests,
            drafter.policy.shape.width,
            self._captured_slots,
            [table.block_table.gpu[0] for table in self.input_batch.block_table.block_tables],
        )
        if num_graphs:
            logger.info("SubSpec: %d graphs of draft steps", num_graphs)

    def shutdown(self) -> None:
        self.offloader.close()
        set_offloader(None)
        self.fast_tier.override_attention(False)
        super().shutdown()

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's own, up to its rejection sampler: ours verifies what a step has prepared."""
        speculative_config, self.speculative_config = self.speculative_config, None
        try:
            return super()._dummy_sampler_run(hidden_states)
        finally:
            self.speculative_config = speculative_config

    # -- one step --------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_start = time.perf_counter()
        goes_on = bool(scheduler_output.scheduled_cached_reqs.req_ids)
        self._clock.begin_step(self._step_start, goes_on)
        if self.speculation is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        verified = scheduler_output.scheduled_spec_decode_tokens
        alone = self.speculation.alone(scheduler_output.num_scheduled_tokens, self.requests)
        with self.speculation.drafter.target_pass(alone if alone in verified else None):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> ModelRunnerOutput:
        """vLLM's step from the logits on, drafting included; the output brings our statistics."""
        output = super().sample_tokens(*args, **kwargs)
        self._clock.end_step(time.perf_counter())
        report = self.subspec_statistics()
        grown = report if self._sent is None else growth(self._sent, report)
        self._sent = report
        # A copy: an empty output is one constant of vLLM's.
        return replace(output, ec_connector_output=carrying(grown))

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        """vLLM's inputs; then trees are looked up and their nodes get RoPE positions by depth.

        Slots were derived from positions by index before this, as they must be (design D3).
        """
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._tree_rows = []
        if self.speculation is not None:
            scheduled = scheduler_output.scheduled_spec_decode_tokens
            self._verification = self.speculation.verification(
                self.input_batch,
                self.requests,
                scheduled,
                self.discard_request_mask.np[: self.input_batch.num_reqs].tolist(),
            )
            self._place_trees(scheduled)
            trees = dict(zip(self.input_batch.req_ids, self._verification.trees, strict=True))
            num_tokens = scheduler_output.num_scheduled_tokens
            self.speculation.drafter.pacing.begin_pass(num_tokens, trees)
        return inputs

    def _place_trees(self, scheduled: dict[str, list[int]]) -> None:
        """Find each root among the batch's tokens, and give the nodes below it their positions."""
        self._root_tokens = []
        for row, req_id in enumerate(self.input_batch.req_ids):
            end = int(self.query_start_loc.np[row + 1])
            start = end - len(scheduled.get(req_id, ())) - 1
            self._root_tokens.append(start)
            tree = self._verification.trees[row]
            if tree.is_chain:
                continue
            depths = torch.cat([tree.levels.new_zeros(1), tree.levels]).to(self.device)
            num_context = self.positions[start : start + 1].clone()
            self.positions[start : start + len(depths)] = num_context + depths
            mask = tree.ancestor_mask().to(self.device)
            self._tree_rows.append(TreeRows(start, row, num_context.int(), mask, depths.int()))

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self._tree_rows:
            metadata = self.fast_tier.with_trees(metadata, self._tree_rows)
        return metadata, common

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        if self.speculation is None:
            with self._resting_generators():
                return super()._sample(logits, spec_decode_metadata)
        verification = self._verification
        self.rejection_sampler.verification = verification
        output = super()._sample(logits, spec_decode_metadata)
        walk = self.rejection_sampler.walk
        self._compact(walk)
        self._count(verification, walk)
        return output

    @contextmanager
    def _resting_generators(self) -> Iterator[None]:
        """Leave generators where they are for rows whose draw is thrown away (vLLM's sampler
        moves them and then rewinds by ``set_offset``, which CPU generators lack)."""
        states = {row: gen.get_state() for row, gen in self._discarded_generators().items()}
        yield
        for row, state in states.items():
            self.input_batch.generators[row].set_state(state)

    def _discarded_generators(self) -> dict[int, torch.Generator]:
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        generators = self.input_batch.generators
        return {int(row): generators[row] for row in discarded if row in generators}

    def _compact(self, walk: Walk) -> None:
        """Move accepted keys and values to contiguous slots, before anybody can look at them."""
        if self._tree_rows:
            tables = self.input_batch.block_table.block_tables
            slots = [table.slot_mapping.gpu for table in tables]
            self._compactor.compact(walk, self._root_tokens, slots)

    def _count(self, verification: Verification, walk: Walk) -> None:
        rows = slice(self.input_batch.num_reqs)
        prompts = self.input_batch.num_prompt_tokens[rows]
        decoding = self.input_batch.num_computed_tokens_cpu[rows] >= prompts
        for row, committed in enumerate(num_reaching_output(verification, walk)):
            if decoding[row] and not verification.discarded[row]:
                self.counters.count_pass(verification.trees[row], committed)
        if decoding.all():
            self.counters.decode_steps += 1
            self.counters.target_seconds += time.perf_counter() - self._step_start

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's bookkeeping, without its rewinding of generators that never moved."""
        hidden = self._discarded_generators()
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    # -- drafting --------------------------------------------------------------------------------

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: each request's depth is limited on its own."""
        return self.speculation is not None or super()._input_fits_in_drafter(common_attn_metadata)

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Grow a tree per request that goes on; returns its tokens in level order, by row."""
        if self.speculation is None:  # one of vLLM's own methods
            return super().propose_draft_token_ids(
                scheduler_output, sampled_token_ids, *args, **kwargs
            )
        batch = self.input_batch
        return self.speculation.draft(
            batch, self.requests, batch.sampling_metadata, sampled_token_ids
        )

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        if self.speculation is not None:
            self.speculation.forget(req_id)

    def set_draft_policy(self, **changes: Any) -> None:
        """Change tree options between passes; outputs stay the same, only speed changes.

        Raises:
            ConfigError: an option is wrong, or the tree would hold more nodes than the engine
                was started for.
        """
        config = SubSpecConfig(**self.subspec_config.to_options() | changes)
        policy = DraftPolicy.of(config, self._ranks, self.offloader.placement.tree)
        if policy.shape.node_count > self.num_spec_tokens:
            raise ConfigError(
                f"a tree of {policy.shape.node_count} nodes: this engine was started for at most "
                f"{self.num_spec_tokens}; start it with a larger one"
            )
        self.speculation.drafter.set_policy(policy)

    def record_timeline(self, seconds: float | None) -> list[tuple[str, float, float]]:
        """See ``SubSpecWorkerMixin.subspec_timeline``."""
        timeline = self.offloader.timeline
        if seconds is not None:
            self._timeline_seconds = seconds
            timeline.start()
            return []
        timeline.stop()
        return [tuple(span) for span in timeline.spans(self._timeline_seconds)]

    def subspec_statistics(self) -> dict[str, Any]:
        """Counters and stream statistics since start."""
        draft = DraftCounters() if self.speculation is None else self.speculation.drafter.counters
        report = self.counters.report(
            draft, self.offloader.statistics(), self.offloader.streamed_bytes_per_pass
        )
        remembered = set() if self.speculation is None else self.speculation.remembered()
        return report | {
            "engine_steps": self._clock.engine_steps,
            "busy_seconds": self._clock.busy_seconds,
            "remembered_requests": len(remembered),
            "worker_memory_bytes": self._process.memory_info().rss,
            **self.offloader.sizes,
        }


class SubSpecCPUModelRunner(SubSpecRunnerMixin, CPUModelRunner):
    """vLLM's CPU runner with SubSpec."""


class SubSpecGPUModelRunner(SubSpecRunnerMixin, GPUModelRunner):
    """vLLM's GPU runner with SubSpec."""
