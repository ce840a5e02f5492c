# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Two-stage choice of a draft tree's next level, in two launches.

Stage 1 has a program for each row and block of the vocabulary: it reads the block's logits (and
noise) once, and writes the block's sum of exponentials and its ``width`` best tokens. Stage 2 has
a program for each request: it merges those few into log-probabilities and picks the level.
Bound: the memory read of the logits and the noise; at a draft step's size (6 rows of 152k tokens
in bf16 are 1.8 MB) the latency of ``width`` reductions a stage counts for as much.

A candidate travels as one int64 key, its value above its token: keys are distinct, and the
largest is the highest value at the lowest token, so that one reduction finds it.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from subspec_kernels.sharpened_topk.reference import Candidates, check_arguments

_MIN_BLOCK = 2048
_MAX_CANDIDATES = 16384  # of a stage 2 program: 32 a thread, about what registers hold
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32's; in place of -inf where it is subtracted
_TAKEN = tl.constexpr(-(2**63))  # below every key


def sharpened_topk(
    logits: torch.Tensor,
    parent_scores: torch.Tensor,
    width: int,
    temperature: float,
    noise: torch.Tensor | None = None,
) -> Candidates:
    """See ``reference.sharpened_topk``; the arguments are on one device.

    Workspace: ``blocks * width`` int64 and ``blocks`` float32 a row of logits, where ``blocks`` is
    at most ``vocab / 2048`` rounded up.
    """
    check_arguments(logits, parent_scores, width, temperature, noise)
    requests, rows, vocab = logits.shape
    padded_rows, padded_width = triton.next_power_of_2(rows), triton.next_power_of_2(width)
    most_blocks = _MAX_CANDIDATES // (padded_rows * padded_width)
    block = max(_MIN_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, most_blocks)))
    blocks = triton.cdiv(vocab, block)
    keys = logits.new_empty(requests, rows, blocks, width, dtype=torch.int64)
    totals = logits.new_empty(requests, rows, blocks, dtype=torch.float32)
    tokens, parents = logits.new_empty(2, requests, width, dtype=torch.int64)
    scores = logits.new_empty(requests, width, dtype=torch.float32)
    sharpness = min(1.0 / temperature, 1e38)  # finite in float32: 0 times it is 0
    best_of_blocks[(requests * rows, blocks)](
        logits,
        noise if noise is not None else logits,
        keys,
        totals,
        rows,
        vocab,
        sharpness,
        *logits.stride(),
        *(noise.stride() if noise is not None else (0, 0, 0)),
        WIDTH=width,
        HAS_NOISE=noise is not None,
        BLOCK=block,
        num_warps=min(16, block // 512),
    )
    columns = triton.next_power_of_2(blocks * width)
    best_of_level[(requests,)](
        keys,
        totals,
        parent_scores,
        tokens,
        parents,
        scores,
        rows,
        blocks,
        sharpness,
        *parent_scores.stride(),
        WIDTH=width,
        ROWS=padded_rows,
        BLOCKS=triton.next_power_of_2(blocks),
        COLUMNS=columns,
        num_warps=min(16, max(4, padded_rows * columns // 1024)),
    )
    return Candidates(tokens, parents, scores)


@triton.jit
def _key(values, tokens):
    """int64 keys that order by value, then by lower token; values are not NaN."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def _value(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _token(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@triton.jit
def best_of_blocks(
    logits,
    noise,
    keys_out,
    totals_out,
    rows,
    vocab,
    sharpness,
    logits_request_stride,
    logits_row_stride,
    logits_token_stride,
    noise_request_stride,
    noise_row_stride,
    noise_token_stride,
    WIDTH: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of one block of one row: the sum of exponentials below its peak, the best tokens' keys."""
    request_row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    request, row = request_row // rows, request_row % rows
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    offsets = tokens.to(tl.int64)
    logits += request * logits_request_stride + row * logits_row_stride
    values = tl.load(logits + offsets * logits_token_stride, mask=inside, other=-float("inf"))
    values = values.to(tl.float32)
    if HAS_NOISE:
        noise += request * noise_request_stride + row * noise_row_stride
        values += tl.load(noise + offsets * noise_token_stride, mask=inside, other=0.0)
    peak = tl.maximum(tl.max(values, axis=0), _LOWEST)
    total = tl.sum(tl.exp((values - peak) * sharpness), axis=0)
    tl.store(totals_out + request_row * blocks + block, total)
    keys = _key(values, tokens)
    keys_out += (request_row * blocks + block) * WIDTH
    for place in range(WIDTH):
        best = tl.max(keys, axis=0)
        tl.store(keys_out + place, best)
        keys = tl.where(keys == best, _TAKEN, keys)


@triton.jit
def best_of_level(
    keys_in,
    totals_in,
    parent_scores,
    tokens_out,
    parents_out,
    scores_out,
    rows,
    blocks,
    sharpness,
    scores_request_stride,
    scores_row_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of one request: log-probabilities of the blocks' best tokens, and the level among them."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    block = tl.arange(0, BLOCKS)[None, :]
    keys_in += request * rows * blocks * WIDTH
    totals_in += request * rows * blocks
    inside = (row < rows) & (block < blocks)
    # The first key of a block is its peak.
    peaks = tl.load(keys_in + (row * blocks + block) * WIDTH, mask=inside, other=_TAKEN)
    peaks = tl.where(inside, tl.maximum(_value(peaks), _LOWEST), _LOWEST)
    totals = tl.load(totals_in + row * blocks + block, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=1)
    total = tl.sum(totals * tl.exp((peaks - peak[:, None]) * sharpness), axis=1)
    # A living row's total is at least 1, its peak's part; a dead row's is 0.
    log_total = tl.log(tl.maximum(total, 1.0))

    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < blocks * WIDTH)
    keys = tl.load(keys_in + row * blocks * WIDTH + column, mask=inside, other=_TAKEN)
    values = tl.where(inside, _value(keys), -float("inf"))
    scores = (values - peak[:, None]) * sharpness - log_total[:, None]
    parents = tl.load(
        parent_scores + request * scores_request_stride + row * scores_row_stride,
        mask=row < rows,
        other=-float("inf"),
    )
    # The highest score at the lowest row; there, the highest key: values may differ where their
    # scores, being rounded, do not.
    ranks = _key(scores + parents, row + tl.zeros([ROWS, COLUMNS], tl.int32))
    for place in range(WIDTH):
        rank = tl.max(tl.max(ranks, axis=1), axis=0)
        key = tl.max(tl.max(tl.where(ranks == rank, keys, _TAKEN), axis=1), axis=0)
        score = _value(rank)
        # Of equal scores row 0 comes first, with keys for all places: a dead one's parent is 0.
        token = tl.where(score > -float("inf"), _token(key), 0)
        tl.store(tokens_out + request * WIDTH + place, token)
        tl.store(parents_out + request * WIDTH + place, _token(rank))
        tl.store(scores_out + request * WIDTH + place, score)
        ranks = tl.where((ranks == rank) & (keys == key), _TAKEN, ranks)
