"""Tree attention against one loop over queries and keys, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels.tree_attention import tree_attention

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    requests, m, heads, dim = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(requests, m, heads, dim, dtype=torch.float64)
    q, k, v = query.double(), keys.double(), values.double()
    for r in range(requests):
        for i in range(m):
            seen = [s for s in range(keys.shape[2]) if mask[r, i, s]]
            for h in range(heads):
                scores = [float(q[r, i, h] @ k[r, h // group, s]) * scale for s in seen]
                if soft_cap:
                    scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    out[r, i, h] += weight / sum(weights) * v[r, h // group, s]
    return out


def random_mask(generator: torch.Generator, requests: int, m: int, slots: int) -> torch.Tensor:
    """Any mask in which each row sees at least one slot."""
    mask = torch.rand(requests, m, slots, generator=generator) < 0.6
    one = torch.randint(slots, (requests, m, 1), generator=generator)
    return mask.scatter(2, one, True)


def check(
    requests: int,
    m: int,
    kv_heads: int,
    group: int,
    dim: int,
    slots: int,
    dtype: torch.dtype,
    soft_cap: float,
    seed: int = 0,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = normal(requests, m, kv_heads * group, dim)
    keys, values = (normal(requests, kv_heads, slots, dim) for _ in range(2))
    mask = random_mask(generator, requests, m, slots)
    before = [tensor.clone() for tensor in (query, keys, values, mask)]
    scale = dim**-0.5
    out = tree_attention(query, keys, values, mask, scale, soft_cap)
    assert out.dtype == dtype
    assert out.shape == query.shape
    expected = reference(query, keys, values, mask, scale, soft_cap)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for tensor, kept in zip((query, keys, values, mask), before, strict=True):
        assert torch.equal(tensor, kept), "an input was written"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("dim", [32, 80, 96, 128, 256])
def test_head_sizes(dim: int, soft_cap: float, dtype: torch.dtype) -> None:
    check(2, 5, 2, 3, dim, 13, dtype, soft_cap)


@settings(deadline=None, max_examples=40)
@given(
    requests=st.integers(1, 3),
    m=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([32, 48, 64]),
    slots=st.integers(1, 17),
    soft_cap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_any_shape(
    requests: int,
    m: int,
    kv_heads: int,
    group: int,
    dim: int,
    slots: int,
    soft_cap: float,
    seed: int,
) -> None:
    check(requests, m, kv_heads, group, dim, slots, torch.float32, soft_cap, seed)


def test_a_root_without_context_sees_itself_alone() -> None:
    query, keys, values = torch.randn(3, 1, 1, 4, 32, generator=torch.Generator().manual_seed(1))
    keys, values = keys[:, :, :2], values[:, :, :2]
    query, keys, values = query[:, :1], keys[:, :, :1], values[:, :, :1]
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    out = tree_attention(query, keys, values, mask, 0.5)
    torch.testing.assert_close(out, values.expand_as(query))


@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "soft cap"])
def test_masked_slots_may_hold_anything_finite(soft_cap: float) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 3, 4, 32, generator=generator)
    keys, values = torch.randn(2, 2, 2, 9, 32, generator=generator).unbind(0)
    mask = random_mask(generator, 2, 3, 9)
    mask[:, :, 4] = False
    mask[:, :, 0] = True
    out = tree_attention(query, keys, values, mask, 0.2, soft_cap)
    keys[:, :, 4], values[:, :, 4] = 1e4, -1e4
    assert torch.equal(tree_attention(query, keys, values, mask, 0.2, soft_cap), out)


def test_a_view_of_a_longer_buffer_is_read_as_it_lies() -> None:
    generator = torch.Generator().manual_seed(3)
    buffer = torch.full((2, 2, 2, 20, 32), float("nan"))
    buffer[..., :11, :] = torch.randn(2, 2, 2, 11, 32, generator=generator)
    keys, values = (half[:, :, :11] for half in buffer)
    query = torch.randn(2, 4, 6, 32, generator=generator)
    mask = random_mask(generator, 2, 4, 11)
    out = tree_attention(query, keys, values, mask, 0.3)
    expected = reference(query, keys, values, mask, 0.3, 0.0)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_tree_is_a_batch_of_its_paths() -> None:
    """Each node attends like the last token of the sequence that leads to it."""
    generator = torch.Generator().manual_seed(4)
    parents, context = [-1, -1, 0, 0, 1, 3], 5
    count = len(parents)
    query = torch.randn(1, count, 4, 64, generator=generator)
    keys, values = torch.randn(2, 1, 2, context + count, 64, generator=generator).unbind(0)
    mask = torch.zeros(1, count, context + count, dtype=torch.bool)
    mask[..., :context] = True
    for node in range(count):
        ancestor = node
        while ancestor >= 0:
            mask[0, node, context + ancestor] = True
            ancestor = parents[ancestor]
    out = tree_attention(query, keys, values, mask, 0.125)
    for node in range(count):
        path = mask[0, node].nonzero().flatten()
        alone = tree_attention(
            query[:, node : node + 1],
            keys[:, :, path],
            values[:, :, path],
            torch.ones(1, 1, len(path), dtype=torch.bool),
            0.125,
        )
        torch.testing.assert_close(out[:, node : node + 1], alone, rtol=1e-5, atol=1e-5)
