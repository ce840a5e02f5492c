"""Growth: a draft model extends a batch of trees level by level (arXiv 2509.18344, section 3)."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.errors import ConfigError

DEAD = -math.inf  # score of a place in a level that no candidate could fill


class DraftForward(Protocol):
    """Runs the draft model on one level of every request's tree."""

    def __call__(self, tokens: Tensor, level: int, mask: Tensor) -> Tensor:
        """Return the draft's logits, float [B, m, V].

        The callee keeps keys and values in scratch slots: slot 0 is the root's, slot
        1 + (l - 1) * width + j that of node j of level l. It attends to the request's context
        and, among the slots, to what ``mask`` allows.

        Args:
            tokens: int64 [B, m]; level 0 holds the roots (m = 1), later levels m = width nodes.
            level: how far below the root the tokens are; their position is the root's + level.
            mask: bool [B, m, s], s = slots filled, this level's own included (the last m).
                True at the node itself and at its ancestors, root included.
        """


class DraftRank(Protocol):
    """Turns draft logits into what the request's own sampler would compare.

    Here go temperature, top-k, top-p, penalties and the target's noise of the position: then
    the draft proposes what the target is going to draw, not merely what is likely.
    """

    def __call__(self, logits: Tensor, level: int, history: Tensor) -> Tensor:
        """Return float [B, m, V]; -inf bars a token. ``logits`` may be changed in place.

        Args:
            logits: float [B, m, V], the draft forward's result.
            level: level of the nodes that gave the logits; the candidates sit one below.
            history: int64 [B, m, level], tokens from level 1 down to the node itself.
        """


def grow(
    forward: DraftForward,
    roots: Tensor,
    shape: TreeShape,
    draft_temperature: float = 0.2,
    rank: DraftRank | None = None,
) -> list[Tree]:
    """Grow one tree of ``shape`` per request, with ``shape.depth`` forwards for the whole batch.

    Each level divides the values by ``draft_temperature`` (sharpening), takes the log-softmax
    over the whole vocabulary, adds the parent's score, and keeps the ``width`` best candidates
    as the next level; ties go to the lower parent, then to the lower token id.

    Args:
        forward: the draft model.
        roots: int64 [B], last committed tokens.
        shape: of every tree.
        draft_temperature: > 0; below 1 it makes trees deeper and narrower.
        rank: maps logits to values; None ranks the logits themselves.

    Returns:
        B trees, on the CPU, since the scheduler takes lists; nothing waits for the device
        before the last level. Only barred candidates make a tree smaller than the shape.

    Raises:
        ConfigError: ``draft_temperature`` is not a positive finite number.
    """
    _check_temperature(draft_temperature)
    batch, width = roots.shape[0], shape.width
    tokens, scores = roots[:, None], torch.zeros(batch, 1, device=roots.device)
    parents = torch.zeros_like(tokens)  # rows of the level above; the root's own is never seen
    mask = torch.ones(batch, 1, 0, dtype=torch.bool, device=roots.device)
    path = roots.new_empty(batch, 1, 0)
    grown: list[tuple[Tensor, Tensor, Tensor]] = []
    for level in range(shape.depth):
        mask = torch.cat([_of_parents(mask, parents), _own_slots(tokens)], -1)
        path = torch.cat([_of_parents(path, parents), tokens[..., None]], -1)
        values = forward(tokens, level, mask)
        if rank is not None:
            values = rank(values, level, path[..., 1:])
        log_probs, candidates = _best_log_probs(values.float(), width, draft_temperature)
        tokens, parents, scores = _next_level(log_probs + scores[..., None], candidates, width)
        grown.append((tokens, parents + max((level - 1) * width, -1), scores))
    return _trees(grown, shape)


def _check_temperature(value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(
            f"draft temperature {value} cannot divide logits: choose a finite value above 0, "
            "such as 0.2"
        )


def _of_parents(state: Tensor, parents: Tensor) -> Tensor:
    """[B, m, s] by parent row -> [B, width, s] by node."""
    width, length = parents.shape[1], state.shape[2]
    if state.shape[1] == 1:  # below the root and in a chain there is one parent only
        return state.expand(-1, width, -1)
    return state.gather(1, parents[..., None].expand(-1, -1, length))


def _own_slots(tokens: Tensor) -> Tensor:
    batch, count = tokens.shape
    return torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)


def _best_log_probs(values: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-softmax of ``values / temperature`` at each row's ``width`` best tokens, and those."""
    best, ids = _best_of_rows(values, width)
    # A row of -inf alone belongs to a dead node; clamps keep its children at -inf, not NaN.
    peak = best[..., :1].clamp(min=torch.finfo(values.dtype).min)
    # exp runs many times slower where its result is denormal; below e-80 nothing counts.
    exponents = (values - peak).div_(temperature).clamp_(min=-80)
    total = exponents.exp_().sum(-1, keepdim=True)
    return (best - peak).div_(temperature) - total.log_(), ids


def _best_of_rows(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's ``count`` best values, descending, ties to the lower index, and their indices.

    A vocabulary smaller than ``count`` is filled up with -inf at index 0. Unlike torch.topk
    this settles ties, and it is faster.
    """
    values, ids = _shortlist(values, count)
    best, order = values.sort(dim=-1, descending=True, stable=True)
    best, ids = best[..., :count], ids.gather(-1, order[..., :count])
    missing = count - best.shape[-1]
    if missing:
        best = torch.nn.functional.pad(best, (0, missing), value=DEAD)
        ids = torch.nn.functional.pad(ids, (0, missing))
    return best, ids


def _shortlist(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A few of each row's values that hold its ``count`` best, in index order, and their indices.

    The best are in the ``count`` blocks with the highest maxima: any block left out has that
    many values before it that are higher, or as high at a lower index.
    """
    vocab, device = values.shape[-1], values.device
    block = math.isqrt(max(1, vocab // count))  # about as many maxima to sort as values
    blocks = vocab // block
    if blocks <= 2 * count:
        return values, torch.arange(vocab, device=device).expand(values.shape)
    maxima = values[..., : blocks * block].view(*values.shape[:-1], blocks, block).amax(-1)
    chosen = maxima.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    starts = chosen.sort(dim=-1).values[..., None] * block
    ids = (starts + torch.arange(block, device=device)).flatten(-2)
    tail = torch.arange(blocks * block, vocab, device=device)
    ids = torch.cat([ids, tail.expand(*ids.shape[:-1], -1)], -1)
    return values.gather(-1, ids), ids


def _next_level(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``width`` best of [B, m, width] candidates: tokens, parent rows, scores [B, width]."""
    if scores.shape[1] == 1:  # one parent: its candidates are the level, already in order
        return tokens[:, 0], torch.zeros_like(tokens[:, 0]), scores[:, 0]
    best, order = scores.flatten(1).sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return tokens.flatten(1).gather(1, order), order // width, best[:, :width]


def _trees(grown: list[tuple[Tensor, Tensor, Tensor]], shape: TreeShape) -> list[Tree]:
    """Drop dead places, then prune. Static parents become indices among the nodes that stay."""
    tokens, parents, scores = (torch.cat(parts, 1).cpu() for parts in zip(*grown, strict=True))
    levels = torch.arange(1, shape.depth + 1).repeat_interleave(shape.width)
    return [
        Tree(token, parent, levels, score).select(score > DEAD).prune(shape.node_count)
        for token, parent, score in zip(tokens, parents, scores, strict=True)
    ]
