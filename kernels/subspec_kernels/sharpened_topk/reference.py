"""Plain torch choice of a draft tree's next level.

A call reads the logits about four times (maxima, difference, exponential, sum) and writes one
float32 tensor of their size; it is bound by memory. The Triton kernel reads them once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_WIDTH = 32


class Candidates(NamedTuple):
    """The best candidates of each request, [requests, width] each, best first.

    Attributes:
        tokens: int64.
        parents: int64, which node of the level above each belongs to.
        scores: float32, sums of sharpened log-probabilities. Where fewer than ``width``
            candidates are above -inf, the places left over hold -inf, token 0, parent 0.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor


def sharpened_topk(
    logits: Tensor,
    parent_scores: Tensor,
    width: int,
    temperature: float,
    noise: Tensor | None = None,
) -> Candidates:
    """The ``width`` best of ``m * vocab`` candidates below a level (arXiv 2509.18344, section 3).

    ``score = parent_score + log_softmax((logits + noise) / temperature)``, computed in float32.
    Equal scores go to the lower parent. Below one parent candidates rank by ``logits + noise``,
    equal ones by the lower token: so equal candidates go by their index in ``m * vocab``.

    Args:
        logits: [requests, m, vocab], any float dtype and strides, each at most 2^31 - 1 tokens;
            of the ``m`` nodes of the level, 1..32. -inf bars a token; +inf and NaN are not
            allowed. Where a request samples, they are its processed logits over its own
            temperature.
        parent_scores: float32 [requests, m], the nodes' own scores; -inf bars all below.
        width: nodes to keep, 1..32.
        temperature: > 0, divides logits and noise; below 1 it sharpens.
        noise: float32 [requests, m, vocab], any strides, finite: Gumbel noise of the position
            that the candidates are for, 0 for greedy requests (design D10). All nodes of a level
            share a position, so it may be an expanded view of one row a request.

    Raises:
        ValueError: a shape, a dtype, the width or the temperature is not as above.
    """
    check_arguments(logits, parent_scores, width, temperature, noise)
    values = logits.float()
    if noise is not None:
        values = values + noise
    log_probs, tokens = _best_log_probs(values, width, temperature)
    tokens, parents, scores = _best_of_level(log_probs + parent_scores[..., None], tokens, width)
    # Of equal scores parent 0 comes first, and it has candidates for all places: a dead one is its.
    return Candidates(tokens.masked_fill(scores == -math.inf, 0), parents, scores)


def check_arguments(
    logits: Tensor, parent_scores: Tensor, width: int, temperature: float, noise: Tensor | None
) -> None:
    """Raise what ``sharpened_topk`` promises."""
    shape = tuple(logits.shape)
    if len(shape) != 3 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} {list(shape)}: give floats [requests, m, vocab]"
        )
    if not 1 <= shape[1] <= MAX_WIDTH or shape[2] < 1:
        raise ValueError(
            f"logits {list(shape)} are of {shape[1]} nodes and {shape[2]} tokens: give 1 to "
            f"{MAX_WIDTH} nodes and at least one token"
        )
    if parent_scores.shape != shape[:2] or parent_scores.dtype != torch.float32:
        raise ValueError(
            f"parent scores are {parent_scores.dtype} {list(parent_scores.shape)}: give float32 "
            f"{list(shape[:2])}, one for each row of the logits"
        )
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"width {width} is out of range: keep 1 to {MAX_WIDTH} nodes a level")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature {temperature} cannot divide logits: choose a finite value above 0"
        )
    if noise is not None and (noise.shape != shape or noise.dtype != torch.float32):
        raise ValueError(
            f"noise is {noise.dtype} {list(noise.shape)}: give float32 {list(shape)} as the "
            "logits, expanded where rows share it"
        )


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
        best = torch.nn.functional.pad(best, (0, missing), value=-math.inf)
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


def _best_of_level(scores: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``width`` best of [B, m, width] candidates: tokens, parents, scores [B, width]."""
    if scores.shape[1] == 1:  # one parent: its candidates are the level, already in order
        return tokens[:, 0], torch.zeros_like(tokens[:, 0]), scores[:, 0]
    best, order = scores.flatten(1).sort(dim=-1, descending=True, stable=True)
    order = order[:, :width]
    return tokens.flatten(1).gather(1, order), order // width, best[:, :width]
