"""The choice of a level: plain torch against float64, and Triton against plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.sharpened_topk import Candidates, reference, sharpened_topk

INF = math.inf
# Sums of exponentials differ in their order; tokens and parents are exact.
SCORES = dict(rtol=1e-5, atol=2e-5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Where a block or row is barred, the lowest float times the sharpness is -inf, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _new_tensors_are_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def by_triton(*arguments: object) -> Candidates:
    from subspec_kernels.sharpened_topk import triton

    found: Candidates = triton.sharpened_topk(*arguments)
    return found


def make(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, coarse in half precision and so full of ties, and scores of the rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator)
    scores = -3 * torch.rand(shape[:2], generator=generator)
    return logits.to(device, dtype), scores.to(device)


def check(*arguments: object) -> Candidates:
    expected, found = reference.sharpened_topk(*arguments), by_triton(*arguments)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.parents, expected.parents)
    torch.testing.assert_close(found.scores, expected.scores, **SCORES)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((2, 1, 5000), 4),
        ((2, 6, 2500), 6),
        ((1, 1, 1), 1),
        ((3, 1, 6000), 1),
        ((2, 5, 2049), 3),
        ((1, 2, 3), 4),
        ((0, 2, 7), 2),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_triton_equals_plain_torch(
    shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(*make(shape, dtype, device), width, 0.2)


def test_the_widest_level_takes_few_and_large_blocks(device: torch.device) -> None:
    """17 x 17 candidates, 32 x 32 with their padding, leave room for 16 blocks of 4096 tokens."""
    found = check(*make((1, 17, 33_000), torch.bfloat16, device), 17, 1.0)
    assert len(found.parents.unique()) > 4


def test_a_large_vocabulary(device: torch.device) -> None:
    found = check(*make((1, 1, 262_144), torch.float32, device), 2, 0.2)
    logits, scores = make((1, 1, 262_144), torch.float32, device)
    logits[0, 0, -1] = 40.0
    assert check(logits, scores, 2, 0.2).tokens[0].tolist() == [262_143, found.tokens[0, 0]]


def test_ties_go_to_the_lower_parent_then_the_lower_token(device: torch.device) -> None:
    logits = torch.zeros(1, 3, 4500, device=device)
    logits[..., ::2] = -0.0  # equal to 0.0, whatever its bits
    scores = torch.zeros(1, 3, device=device)
    found = check(logits, scores, 5, 0.2)
    assert found.tokens.tolist() == [[0, 1, 2, 3, 4]]
    assert found.parents.tolist() == [[0] * 5]
    logits[..., [7, 4000]] = 1.0  # in different blocks
    logits[:, 1, 7] = logits[:, 1, 8] = 1.0
    scores[:, 1] = -1e-3
    found = check(logits, scores, 5, 0.2)
    assert found.tokens.tolist() == [[7, 4000, 7, 4000, 7]]
    assert found.parents.tolist() == [[0, 0, 2, 2, 1]]


def test_values_whose_scores_round_to_one_stay_in_order(device: torch.device) -> None:
    """Far below the peak a last bit of the logits is lost in the score."""
    logits = torch.full((1, 2, 3000), -INF, device=device)
    logits[0, 0, [5, 2900, 6]] = torch.tensor([0.0, -1e-7, -2e-7], device=device)
    logits[0, 1, 0] = 0.0
    scores = torch.tensor([[-64.0, -900.0]], device=device)
    found = check(logits, scores, 3, 1.0)
    assert found.scores.unique().numel() == 1
    assert found.tokens.tolist() == [[5, 2900, 6]]


def test_barred_tokens_and_dead_rows_fill_no_place(device: torch.device) -> None:
    logits, scores = make((4, 3, 4500), torch.bfloat16, device)
    logits[0, :, 5:] = -INF  # 15 candidates in one block
    logits[1] = -INF
    logits[2, 1:] = -INF
    logits[2, 0, :4400] = -INF
    logits[2, 0, 4404:] = -INF  # 4 candidates, in the last block
    scores[3] = torch.tensor([-INF, -1.0, -INF])
    found = check(logits, scores, 16, 0.2)
    alive = found.scores > -INF
    assert alive.sum(1).tolist() == [15, 0, 4, 16]
    assert not found.scores.isnan().any()
    assert not found.tokens[~alive].any()
    assert not found.parents[~alive].any()
    assert found.parents[3].unique().tolist() == [1]


def test_masked_as_finite_minimum(device: torch.device) -> None:
    """Some processors bar tokens with the lowest number of the dtype: its score is -inf or low."""
    for dtype in DTYPES:
        logits, scores = make((1, 2, 300), dtype, device)
        logits[:, 0, 3:] = torch.finfo(dtype).min
        logits[:, 1] = torch.finfo(dtype).min
        check(logits, scores, 8, 1.0)


def test_noise_is_added_to_the_logits(device: torch.device) -> None:
    """One row a request, expanded: the nodes of a level share their position."""
    logits, scores = make((2, 3, 2500), torch.float32, device)
    generator = torch.Generator().manual_seed(1)
    row = torch.empty(2, 1, 2500).exponential_(generator=generator).log().neg().to(device)
    row[1] = 0  # a greedy request
    noise = row.expand(-1, 3, -1)
    found = check(logits, scores, 4, 0.2, noise)
    plain = reference.sharpened_topk(logits + noise, scores, 4, 0.2)
    assert all(map(torch.equal, reference.sharpened_topk(logits, scores, 4, 0.2, noise), plain))
    greedy = check(logits, scores, 4, 0.2)
    assert torch.equal(found.tokens[1], greedy.tokens[1])
    assert not torch.equal(found.tokens[0], greedy.tokens[0])


def test_any_strides(device: torch.device) -> None:
    """As a column of a larger tensor, tokens not innermost, scores a view."""
    logits, scores = make((2, 3, 2500), torch.bfloat16, device)
    strided = torch.full((2500, 3, 2, 2), math.nan, dtype=torch.bfloat16, device=device)
    strided[..., 0] = logits.permute(2, 1, 0)
    wide = torch.full((3, 4), math.nan, device=device)
    wide[:, 1:3] = scores.T
    found = check(strided[..., 0].permute(2, 1, 0), wide[:, 1:3].T, 4, 0.5)
    assert torch.equal(found.tokens, check(logits, scores, 4, 0.5).tokens)


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 30.0])
def test_any_temperature(temperature: float, device: torch.device) -> None:
    logits, scores = make((1, 2, 2500), torch.bfloat16, device)
    check(logits, scores, 2, temperature)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 200),
    width=st.integers(1, 32),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    barred=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_plain_torch_equals_a_sort_of_all_candidates(
    rows: int, vocab: int, width: int, temperature: float, barred: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, rows, vocab, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < barred] = -INF
    parents = -torch.rand(2, rows, generator=generator)
    found = sharpened_topk(logits, parents, width, temperature)
    log_probs = (logits.double() / temperature).log_softmax(-1).nan_to_num(-INF, neginf=-INF)
    scores = (log_probs + parents[..., None]).flatten(1)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    best, order = best[:, :width], order[:, :width]
    order = order.masked_fill(best == -INF, 0)
    held = best.shape[1]
    assert torch.equal(found.tokens[:, :held], order % vocab)
    assert torch.equal(found.parents[:, :held], order // vocab)
    torch.testing.assert_close(found.scores[:, :held].double(), best, **SCORES)
    assert (found.scores[:, held:] == -INF).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    vocab=st.integers(1, 700),
    count=st.integers(1, 32),
    grain=st.sampled_from([0.01, 0.5, 2.0]),
    barred=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_best_of_rows_equals_a_stable_sort(
    vocab: int, count: int, grain: float, barred: float, seed: int
) -> None:
    """Coarse values make ties common, which only a search with a fixed order settles."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(2, 3, vocab, generator=generator) / grain).round() * grain
    values[torch.rand(values.shape, generator=generator) < barred] = -math.inf
    best, ids = reference._best_of_rows(values, count)
    ordered = values.sort(dim=-1, descending=True, stable=True)
    held = min(vocab, count)
    assert torch.equal(best[..., :held], ordered.values[..., :held])
    assert torch.equal(ids[..., :held], ordered.indices[..., :held])
    assert (best[..., held:] == -math.inf).all()
    assert best.shape == ids.shape == (2, 3, count)


LOGITS, PARENTS = torch.zeros(2, 3, 50), torch.zeros(2, 3)
WRONG = {
    "logits are torch.int64": (LOGITS.long(), PARENTS, 2, 0.2, None),
    r"logits are .* give floats \[requests, m, vocab\]": (LOGITS[0], PARENTS, 2, 0.2, None),
    "33 nodes": (torch.zeros(2, 33, 5), torch.zeros(2, 33), 2, 0.2, None),
    "0 tokens": (LOGITS[..., :0], PARENTS, 2, 0.2, None),
    r"parent scores are torch.float32 \[2, 2\]": (LOGITS, PARENTS[:, :2], 2, 0.2, None),
    "parent scores are torch.float64": (LOGITS, PARENTS.double(), 2, 0.2, None),
    "width 33 is out of range": (LOGITS, PARENTS, 33, 0.2, None),
    "width 0 is out of range": (LOGITS, PARENTS, 0, 0.2, None),
    "temperature 0.0 cannot": (LOGITS, PARENTS, 2, 0.0, None),
    "temperature nan cannot": (LOGITS, PARENTS, 2, math.nan, None),
    r"noise is torch.float32 \[2, 1, 50\]": (LOGITS, PARENTS, 2, 0.2, LOGITS[:, :1]),
    "noise is torch.bfloat16": (LOGITS, PARENTS, 2, 0.2, LOGITS.bfloat16()),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_alike(message: str) -> None:
    for function in (sharpened_topk, by_triton):
        with pytest.raises(ValueError, match=message):
            function(*WRONG[message])


KERNEL = "subspec_kernels.sharpened_topk.triton"


def test_both_kernels_compile(compile_kernels) -> None:
    strides = {
        f"{name}_{axis}_stride": "i64" if axis == "request" else "i32"
        for name in ("logits", "noise")
        for axis in ("request", "row", "token")
    }
    blocks = [
        dict(
            kernel=f"{KERNEL}:best_of_blocks",
            signature=dict(logits=kind, noise="*fp32", keys_out="*i64", totals_out="*fp32")
            | dict(rows="i32", vocab="i32", sharpness="fp32", **strides),
            constexprs=dict(WIDTH=width, HAS_NOISE=has_noise, BLOCK=block),
            num_warps=min(16, block // 512),
        )
        for kind, width, has_noise, block in [
            ("*bf16", 6, False, 2048),
            ("*fp16", 1, True, 2048),
            ("*fp32", 32, True, 16384),
        ]
    ]
    pointers = dict(keys_in="*i64", totals_in="*fp32", parent_scores="*fp32")
    outputs = dict(tokens_out="*i64", parents_out="*i64", scores_out="*fp32")
    scalars = dict(rows="i32", blocks="i32", sharpness="fp32")
    levels = [
        dict(
            kernel=f"{KERNEL}:best_of_level",
            signature=pointers
            | outputs
            | scalars
            | dict(scores_request_stride="i32", scores_row_stride="i32"),
            constexprs=dict(WIDTH=width, ROWS=rows, BLOCKS=blocks, COLUMNS=columns),
            num_warps=min(16, max(4, rows * columns // 1024)),
        )
        for width, rows, blocks, columns in [(6, 8, 128, 512), (1, 1, 1, 1), (32, 32, 16, 512)]
    ]
    # A launch makes constants of arguments that are 1.
    blocks[1]["constexprs"] |= dict(rows=1, logits_token_stride=1, noise_token_stride=1)
    levels[1]["constexprs"] |= dict(rows=1, blocks=1, scores_row_stride=1)
    compiled = compile_kernels(blocks + levels)
    assert len(compiled) == 2 * 6
    assert all(".entry best_of_" in kernel["ptx"] for kernel in compiled)
