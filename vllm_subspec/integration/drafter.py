"""Drafting on the target's own module tree in draft view (design D1, D2, D10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import (
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
)
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_subspec.config import AUTO_DEPTH, AUTO_WIDTH, SubSpecConfig
from vllm_subspec.draft.growth import Growth
from vllm_subspec.draft.pacing import Pacing
from vllm_subspec.draft.pausing import Pausable
from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.draft.tuning import NOTHING, Cut, DepthTuner, deepest
from vllm_subspec.integration.device import Device
from vllm_subspec.integration.draft_forward import DraftForward
from vllm_subspec.integration.linear import View
from vllm_subspec.integration.ranking import DraftRanking
from vllm_subspec.integration.rows import RowProcessor
from vllm_subspec.integration.statistics import DraftCounters
from vllm_subspec.timeline import Timeline
from vllm_subspec.verify.position_noise import PositionNoise

logger = init_logger("vllm.subspec")


@dataclass(frozen=True)
class DraftPolicy:
    """How trees are grown; it may change between passes, since no output depends on it.

    Attributes:
        shape: of the trees.
        draft_temperature: sharpening T_d.
        noise_coupling: whether sampled requests draft with the target's own noise (D10).
        post_speculation: whether a tree grows on while the target's weights stream.
        most_depth: how deep live tuning may go from ``shape.depth``, and it may step aside;
            ``None`` keeps that depth, always.
        adaptive_depth: whether each tree that is tuned stops where it promises too little.
    """

    shape: TreeShape
    draft_temperature: float
    noise_coupling: bool
    post_speculation: bool
    most_depth: int | None
    adaptive_depth: bool

    @property
    def most_levels(self) -> int:
        """Levels of a growth at most: with post-speculation, an extension grows beside the tree."""
        depth = self.most_depth or self.shape.depth
        return 2 * depth if self.post_speculation else depth

    @property
    def max_nodes(self) -> int:
        """Nodes that a tree hands to verification at most."""
        return self.shape.max_nodes or self.shape.node_count

    @classmethod
    def of(cls, config: SubSpecConfig, ranks: int, planned: TreeShape | None = None) -> DraftPolicy:
        """The policy that the settings ask for; what they leave open is as planned, then tuned.

        Ranks that share each layer must take every step together, and what is decided by a rank's
        own clock would part them: neither post-speculation nor tuning is for them.
        """
        width = config.width or (planned.width if planned else AUTO_WIDTH)
        depth = config.depth or (planned.depth if planned else AUTO_DEPTH)
        most_nodes = config.node_count
        if planned is not None and (config.width is None or config.depth is None):
            most_nodes = min(most_nodes, planned.node_count)
        return cls(
            TreeShape(width, depth, most_nodes),
            config.draft_temperature,
            config.noise_coupling,
            config.post_speculation and ranks == 1,
            None if config.depth or ranks > 1 else deepest(depth),
            config.adaptive_depth,
        )


@dataclass(frozen=True)
class DraftRequest:
    """A request to draft for, between two target passes.

    Attributes:
        req_id: its id.
        batch_row: its row in vLLM's persistent batch.
        committed: tokens that the last pass committed, the root being the last of them.
        num_context: positions before the root, all in the cache.
        max_depth: levels that may still be committed, >= 1.
        depth_cap: levels to verify at most, by the request's own option; ``None``: no cap.
        tokens: int32 [>= num_context], the context's token ids first.
        output: tokens committed so far, the root included.
        generator: what a sampled request draws from, at the root's draw; ``None`` if greedy.
        block_tables: int32 [blocks] per KV cache group, the request's blocks in order.
    """

    req_id: str
    batch_row: int
    committed: Sequence[int]
    num_context: int
    max_depth: int
    depth_cap: int | None
    tokens: np.ndarray
    output: list[int]
    generator: torch.Generator | None
    block_tables: Sequence[torch.Tensor]

    @property
    def tree_depth(self) -> int:
        """Levels that its tree may have."""
        return self.max_depth if self.depth_cap is None else min(self.max_depth, self.depth_cap)


@dataclass
class _Growing:
    """A growth, and the requests it is for, as they were at its roots."""

    growth: Growth
    requests: Sequence[DraftRequest]
    max_levels: int

    def may_go_on(self) -> bool:
        return self.growth.depth < self.max_levels and not self.growth.is_exhausted


class Drafter:
    """Grows a tree for each request with the shadow, context read from vLLM's blocks.

    While one request is alone, its tree grows on below its best leaves during the target's pass
    (post-speculation, arXiv 2509.18344), in the waits for streamed weights; what lies below the
    accepted path is the next tree's beginning. A step that is under way when the weights come
    pauses between two layers.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        vllm_config: VllmConfig,
        view: View,
        rows: RowProcessor,
        noise: PositionNoise,
        timeline: Timeline,
        waited_s: Callable[[], float],
        device: Device,
        share_kv: bool,
    ) -> None:
        self._waited_s = waited_s
        self._device = device
        self.forward = DraftForward(vllm_config, view, device, share_kv)
        self._pacings: dict[DraftPolicy, Pacing] = {}
        self.set_policy(policy)
        self._timeline = timeline
        self._view = view
        self._rows = rows
        self._noise = noise
        self._growing: _Growing | None = None
        self._in_pass = False
        self._paused: Pausable | None = None  # a step that began in a pass
        self.counters = DraftCounters()

    def set_policy(self, policy: DraftPolicy) -> None:
        """Draft by ``policy`` from now on."""
        self.policy = policy
        if policy not in self._pacings:  # what was learnt under a policy is good when it returns
            self._pacings[policy] = _pacing(policy, self._idle_s)
        self.pacing = self._pacings[policy]

    def draft(
        self,
        requests: Sequence[DraftRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
    ) -> list[Tree]:
        """One tree per request, none deeper than the request may still commit.

        All are empty where drafting does not pay at the time.

        Args:
            requests: at least one.
            metadata: of the whole batch.
            params: of the whole batch, by batch row.
        """
        start = time.monotonic()
        committed = {r.req_id: r.committed for r in requests if r.depth_cap is None}
        self.pacing.end_pass(committed, self.counters.overlapped_draft_steps)
        is_new = any(len(request.output) == len(request.committed) for request in requests)
        cut = self.pacing.next_cut(len(requests), is_new)
        if cut == NOTHING:
            return self._leave_undrafted(requests)
        depth = min(cut.depth, max(request.tree_depth for request in requests))
        growing = self._go_on(requests, cut, depth) or self._begin(requests, depth)
        growth = growing.growth
        rank = self._rank(requests, metadata, params, growing.max_levels)
        growth.rank = None if rank.is_plain else rank
        self._growing = growing
        began, steps = time.monotonic(), 0
        while growth.depth < depth and growing.may_go_on():
            if not self._pays(cut, growth, requests):
                self.counters.stopped_drafts += 1
                break
            growth.step()
            steps += 1
        self._device.finish()
        end = time.monotonic()
        self.counters.draft_steps += steps
        self.counters.draft_seconds += end - start
        self._timeline.record("draft", start, end)
        self._end_draft(requests, steps, end - began)
        return [
            tree.limit_depth(request.tree_depth).prune(cut.nodes)
            for tree, request in zip(growth.trees(), requests, strict=True)
        ]

    def _pays(self, cut: Cut, growth: Growth, requests: Sequence[DraftRequest]) -> bool:
        """Whether another level is likely enough, in the trees that may have one; the first is."""
        if not cut.price or not growth.depth:
            return True
        doubts = zip(growth.doubts(), requests, strict=True)
        open_doubts = [doubt for doubt, request in doubts if request.tree_depth > growth.depth]
        return self.pacing.pays(cut, growth.depth, open_doubts)

    def growth(
        self,
        requests: Sequence[DraftRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        depth: int,
    ) -> Growth:
        """A growth apart from any pass, with room for ``depth`` levels; good until the next one.

        The arguments are those of ``draft``; the policy must not ask for post-speculation.
        """
        assert not self.policy.post_speculation
        growth = self._begin(requests, depth).growth
        rank = self._rank(requests, metadata, params, depth)
        growth.rank = None if rank.is_plain else rank
        return growth

    def _leave_undrafted(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        self._drop_step()
        self._growing = None
        for _ in requests:
            self.counters.count_fallback("stepped_aside")
        self._end_draft(requests, 0, 0.0)
        return [Tree.empty() for _ in requests]

    def _end_draft(self, requests: Sequence[DraftRequest], steps: int, seconds: float) -> None:
        req_ids = [request.req_id for request in requests]
        self.pacing.end_draft(req_ids, steps, seconds, self.counters.overlapped_draft_steps)

    def _idle_s(self) -> float:
        return self._waited_s() + self.counters.overlapped_draft_seconds

    def remembered(self) -> set[str]:
        """Ids of the requests that a growth, or an own context, is kept for."""
        growing = self._growing.requests if self._growing is not None else ()
        return self.forward.remembered() | {request.req_id for request in growing}

    def forget(self, req_id: str) -> None:
        """A request is over: what was grown for it is of no use."""
        self.forward.forget(req_id)
        if self._growing and any(r.req_id == req_id for r in self._growing.requests):
            self._drop_step()
            self._growing = None

    @contextmanager
    def target_pass(self, req_id: str | None) -> Iterator[None]:
        """A pass of the target that verifies the tree of one request, alone, or any other pass
        (``None``). In the former ``extend`` may work."""
        growing = self._growing
        self._in_pass = (
            self.policy.post_speculation
            and growing is not None
            and [request.req_id for request in growing.requests] == [req_id]
        )
        try:
            yield
        finally:
            self._in_pass = False

    def extend(self, weights_are_there: Callable[[], bool]) -> bool:
        """Grow on while the target waits for weights; False where there is no use.

        Args:
            weights_are_there: whether the wait is over.
        """
        growing = self._growing
        if not self._in_pass or growing is None:
            return False
        if self._paused is None:
            if not growing.may_go_on():
                return False
            self._paused = Pausable(growing.growth.step)
        start = time.monotonic()
        self._resume_step(weights_are_there)
        self._device.finish()  # or steps would queue up before the target
        end = time.monotonic()
        self.counters.overlapped_draft_seconds += end - start
        self._timeline.record("draft", start, end)
        return True

    def step_aside(self) -> None:
        """Between two layers of a draft step: let the target go on once its weights are there."""
        step = self._paused
        if step is not None and step.is_pause_due():
            with self._view.target(), override_forward_context(None):
                step.pause()

    def _resume_step(self, weights_are_there: Callable[[], bool] | None = None) -> None:
        """Go on with the step that began in a pass; without an argument, to its end."""
        assert self._paused is not None
        is_done = True
        try:
            with _own_forward_context():
                is_done = self._paused.resume(weights_are_there)
        finally:
            if is_done:  # or it raised
                self._paused = None
        self.counters.overlapped_draft_steps += is_done

    def _drop_step(self) -> None:
        if self._paused is not None:
            with _own_forward_context():
                self._paused.drop()
            self._paused = None

    def _go_on(self, requests: Sequence[DraftRequest], cut: Cut, depth: int) -> _Growing | None:
        """The last growth, below the path that was accepted since; None where it left the tree."""
        growing = self._growing
        if growing is None or not self.policy.post_speculation or len(requests) != 1:
            return None
        (new,), old = requests, growing.requests[0]
        if len(growing.requests) != 1 or growing.growth.width != self.policy.shape.width:
            return None
        moved = new.num_context - old.num_context
        if new.req_id != old.req_id or moved != len(new.committed):
            return None
        if not growing.growth.holds(new.committed):
            return None
        if self._paused is not None:
            self._resume_step()
        growth = growing.growth
        rerooting = growth.follow(new.committed)
        falls_short = growth.is_exhausted and growth.depth < depth
        if rerooting is None or (falls_short and self._pays(cut, growth, requests)):
            return None
        self.forward.go_on(requests, rerooting, growth.width)
        self.counters.followed_drafts += 1
        return replace(growing, requests=requests, max_levels=self._max_levels(requests))

    def _begin(self, requests: Sequence[DraftRequest], depth: int) -> _Growing:
        self._drop_step()
        self.counters.started_drafts += 1
        policy = self.policy
        if policy.post_speculation and len(requests) == 1:
            depth = policy.most_levels
        self.forward.begin(requests, 1 + policy.shape.width * depth)
        roots = torch.tensor(
            [request.committed[-1] for request in requests], device=self._device.torch_device
        )
        growth = Growth(self.forward, roots, policy.shape.width, policy.draft_temperature)
        return _Growing(growth, requests, self._max_levels(requests))

    def _max_levels(self, requests: Sequence[DraftRequest]) -> int:
        """Levels that have room in the scratch and may still be committed."""
        room = (self.forward.num_slots - 1) // self.policy.shape.width
        return min(room, max(request.max_depth for request in requests))

    def _rank(
        self,
        requests: Sequence[DraftRequest],
        metadata: SamplingMetadata,
        params: Sequence[SamplingParams],
        levels: int,
    ) -> DraftRanking:
        noise = self._noise if self.policy.noise_coupling else None
        place = self._device.torch_device
        return DraftRanking(self._rows, requests, metadata, params, levels, noise, place)


def _pacing(policy: DraftPolicy, idle_s: Callable[[], float]) -> Pacing:
    shape, most_depth = policy.shape, policy.most_depth
    tuner = None
    if most_depth is not None:
        tuner = DepthTuner(
            shape.depth,
            most_depth,
            shape.width,
            policy.max_nodes,
            on_change=partial(logger.info, "SubSpec %s"),
            adaptive=policy.adaptive_depth,
        )
    return Pacing(Cut(shape.depth, policy.max_nodes), tuner, idle_s)


@contextmanager
def _own_forward_context() -> Iterator[None]:
    """vLLM's global forward context is again what it is now, whatever the block leaves there."""
    current = get_forward_context() if is_forward_context_available() else None
    with override_forward_context(current):
        yield
