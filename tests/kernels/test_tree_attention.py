"""Tree attention, native and in plain torch, against a float64 loop over what each query sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels import native, tree_attention
from subspec_kernels.kv_cache import cache_halves, gather_slots, paged_views
from subspec_kernels.tree_attention import reference
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_subspec import envs
from vllm_subspec.files import private_directory

NAN = float("nan")
DIMS = (16, 64, 80, 128, 256)
# Both sum in fp32 and round once, to half a unit in the last place.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    native.load(private_directory(envs.cache_dir() / "kernels"))


@pytest.fixture(autouse=True)
def _threads_are_restored() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


class Arguments(NamedTuple):
    """Those of the op, in order."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    node_keys: torch.Tensor
    node_values: torch.Tensor
    mask: torch.Tensor
    levels: torch.Tensor
    scale: float
    soft_cap: float
    window: int


def by_native(arguments: Arguments) -> torch.Tensor:
    out: torch.Tensor = torch.ops.subspec.tree_attention(*arguments)
    return out


def by_torch(arguments: Arguments) -> torch.Tensor:
    return reference.tree_attention(*arguments)


BOTH = pytest.mark.parametrize("attend", [by_native, by_torch])
Attend = Callable[[Arguments], torch.Tensor]


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...] = (20,)
    m: int = 3
    num_nodes: int = 7
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    block: int = 16
    dtype: torch.dtype = torch.float32
    soft_cap: float = 0.0
    window: int = 0
    seed: int = 0

    def arguments(self) -> Arguments:
        return self.cache_and_arguments()[1]

    def cache_and_arguments(self) -> tuple[torch.Tensor, Arguments]:
        """Random ones. Whatever no query may look at holds NaN, and no tensor is dense."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        requests, heads = len(self.contexts), self.kv_heads * self.group
        used = [-(-length // self.block) for length in self.contexts]
        cache = torch.full((sum(used) + 2, self.kv_heads, self.block, 2 * self.dim), NAN)
        cache = cache.to(self.dtype)
        # A scheduler's table holds remains of other requests behind a request's blocks.
        table = torch.full((requests, max(used) + 1), 1 << 30, dtype=torch.int32)
        free = torch.randperm(len(cache), generator=generator).int()
        keys, values = cache_halves(cache)
        for row, length in enumerate(self.contexts):
            table[row, : used[row]], free = free[: used[row]], free[used[row] :]
            for position in range(length):
                where, offset = table[row, position // self.block], position % self.block
                keys[where, :, :, offset] = normal(self.kv_heads, self.dim)
                values[where, :, offset] = normal(self.kv_heads, self.dim)

        shape = (requests, self.m, self.num_nodes)
        mask = torch.rand(shape, generator=generator) < 0.4
        one = torch.randint(self.num_nodes, (requests, self.m, 1), generator=generator)
        mask = torch.cat([mask.scatter(2, one, True), mask], 2)[:, :, : self.num_nodes]
        nodes = torch.full((2, requests, self.kv_heads, self.num_nodes + 3, self.dim), NAN)
        nodes = nodes.to(self.dtype)
        nodes[:, :, :, : self.num_nodes] = normal(*nodes[:, :, :, : self.num_nodes].shape)
        node_keys, node_values = nodes[:, :, :, : self.num_nodes]
        hidden = ~mask.any(1)[:, None, :, None]
        node_keys.masked_fill_(hidden, NAN)
        node_values.masked_fill_(hidden, NAN)
        return cache, Arguments(
            normal(requests, self.m, heads + 2, self.dim)[:, :, 1:-1],
            *paged_views(cache),
            table,
            torch.tensor(self.contexts, dtype=torch.int32),
            node_keys,
            node_values,
            mask,
            torch.randint(5, (requests, self.m), generator=generator).int(),
            self.dim**-0.5,
            self.soft_cap,
            self.window,
        )


def expected(arguments: Arguments) -> torch.Tensor:
    """Query by query and head by head, in float64, over what it sees and nothing else."""
    a = arguments
    out = torch.full(a.query.shape, NAN, dtype=torch.float64)
    _, block, kv_heads, _ = a.key_cache.shape
    group = a.query.shape[2] // kv_heads
    for r, i, h in torch.cartesian_prod(*(torch.arange(n) for n in a.query.shape[:3])).tolist():
        length, kv = int(a.context_lens[r]), h // group
        first = length + int(a.levels[r, i]) - a.window + 1 if a.window > 0 else 0
        seen = range(max(first, 0), length)
        blocks = [int(a.block_table[r, position // block]) for position in seen]
        offsets = [position % block for position in seen]
        nodes = a.mask[r, i].nonzero().flatten()
        keys = torch.cat([a.key_cache[blocks, offsets, kv], a.node_keys[r, kv, nodes]])
        values = torch.cat([a.value_cache[blocks, offsets, kv], a.node_values[r, kv, nodes]])
        scores = (keys.double() @ a.query[r, i, h].double() * a.scale).tolist()
        if a.soft_cap:
            scores = [a.soft_cap * math.tanh(score / a.soft_cap) for score in scores]
        weights = [math.exp(score - max(scores)) for score in scores]
        weighed = [w * value for w, value in zip(weights, values.double(), strict=True)]
        out[r, i, h] = torch.stack(weighed).sum(0) / sum(weights)
    return out


def close(out: torch.Tensor, to: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(out.double(), to.double(), rtol=tolerance, atol=tolerance)


def check(case: Case) -> None:
    """Both against the loop; and they only read."""
    arguments = case.arguments()
    kept = [x.clone() for x in arguments if isinstance(x, torch.Tensor)]
    right = expected(arguments)
    for attend in (by_native, by_torch):
        out = attend(arguments)
        assert out.dtype == case.dtype
        close(out, right, TOLERANCES[case.dtype])
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    for tensor, before in zip(tensors, kept, strict=True):
        assert torch.equal(tensor.nan_to_num(7), before.nan_to_num(7)), "an input was written"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "soft cap"])
@pytest.mark.parametrize("dim", DIMS)
def test_head_sizes(dim: int, soft_cap: float, dtype: torch.dtype) -> None:
    check(Case((37, 0), m=5, num_nodes=13, group=3, dim=dim, dtype=dtype, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 128, 300])
def test_context_lengths(length: int, block: int, dtype: torch.dtype) -> None:
    check(Case((length,), block=block, dtype=dtype, kv_heads=1, group=4))


@pytest.mark.parametrize("group", range(1, 9))
def test_query_groups(group: int) -> None:
    check(Case((40, 3), group=group))


@pytest.mark.parametrize("m", [1, 2, 31, 32, 33, 65])
def test_numbers_of_queries_and_nodes(m: int) -> None:
    check(Case((50,), m=m, num_nodes=m))
    check(Case((50,), m=1, num_nodes=m))


@pytest.mark.parametrize("window", [-1, 1, 2, 5, 16, 21, 1000])
@pytest.mark.parametrize("block", [16, 32])
def test_windows(block: int, window: int) -> None:
    check(Case((100, 7, 0, 16), block=block, window=window, m=4))


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [0, 700])
def test_long_contexts_are_split_over_threads(window: int, kv_heads: int, threads: int) -> None:
    torch.set_num_threads(threads)
    check(Case((1300, 0, 513), m=2, kv_heads=kv_heads, block=128, window=window))
    check(Case((1300,), m=2, kv_heads=kv_heads, block=32, window=window))


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        Case,
        contexts=st.lists(st.integers(0, 70), min_size=1, max_size=3).map(tuple),
        m=st.integers(1, 9),
        num_nodes=st.integers(1, 40),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        dim=st.sampled_from([16, 48, 80]),
        block=st.sampled_from([16, 32]),
        dtype=st.sampled_from(list(TOLERANCES)),
        soft_cap=st.sampled_from([0.0, 0.5, 30.0]),
        window=st.sampled_from([0, 1, 3, 30]),
        seed=st.integers(0, 2**16),
    )
)
def test_any_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_native_equals_plain_torch_on_a_whole_tree(dtype: torch.dtype) -> None:
    arguments = Case((1300, 200), 65, 65, 3, 3, 64, 128, dtype).arguments()
    close(by_native(arguments), by_torch(arguments), 2 * TOLERANCES[dtype])


@BOTH
@pytest.mark.parametrize("scale", [100.0, 1e-6])
def test_extreme_scores(attend: Attend, scale: float) -> None:
    arguments = Case((90,), m=6, num_nodes=40, dim=64).arguments()._replace(scale=scale)
    close(attend(arguments), expected(arguments), 1e-4)


@BOTH
def test_a_root_without_context_sees_itself_alone(attend: Attend) -> None:
    arguments = Case((0,), m=1, num_nodes=1, group=3).arguments()
    values = arguments.node_values[:, :, 0].repeat_interleave(3, 1)[:, None]
    close(attend(arguments), values, 1e-6)


@pytest.mark.parametrize("what", ["node_keys", "node_values"])
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0], ids=["plain", "soft cap"])
def test_what_one_query_sees_is_nothing_to_the_others(
    soft_cap: float, value: float, what: str
) -> None:
    """NaN of one node, as of an overflow in fp16, stays on its branch; and it is not hidden."""
    arguments = Case((50, 3), m=9, num_nodes=35, group=3, soft_cap=soft_cap).arguments()
    arguments.mask[0, :, 33] = False
    arguments.mask[0, 4, 33] = True
    for tensor in (arguments.node_keys, arguments.node_values):
        tensor[0, :, 33] = 1.0
    clean = by_native(arguments)
    getattr(arguments, what)[0, :, 33] = value
    out = by_native(arguments)
    others = torch.arange(9) != 4
    assert torch.equal(out[0, others], clean[0, others])
    assert torch.equal(out[1], clean[1])
    if what == "node_values" or math.isnan(value):
        assert not bool(out[0, 4].isfinite().any())


@BOTH
def test_blocks_behind_every_window_are_not_read(attend: Attend) -> None:
    """vLLM frees those, and other requests write there."""
    case = Case((100, 70, 5), m=4, window=20)
    arguments = case.arguments()
    for row, length in enumerate(case.contexts):
        first = length + int(arguments.levels[row].min()) - case.window + 1
        for position in range(max(first, 0)):
            where, offset = arguments.block_table[row, position // 16], position % 16
            arguments.key_cache[where, offset] = arguments.value_cache[where, offset] = NAN
    close(attend(arguments), expected(arguments), 1e-5)


@BOTH
@pytest.mark.parametrize("window", [0, 6])
def test_a_tree_is_a_batch_of_its_paths(attend: Attend, window: int) -> None:
    """Each node attends like the last token of the sequence that leads to it."""
    parents, context = [-1, 0, 0, 1, 1, 2, 5], 21
    case = Case((context,), len(parents), len(parents), dim=64, window=window)
    arguments = case.arguments()
    generator = torch.Generator().manual_seed(1)
    shape = (2, *arguments.node_keys.shape)
    node_keys, node_values = torch.randn(shape, generator=generator)
    paths = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], node])
    levels = torch.tensor([len(path) - 1 for path in paths]).int()
    mask = torch.tensor([[n in path for n in range(len(parents))] for path in paths])
    if window:
        mask &= levels > levels[:, None] - window
    tree = arguments._replace(
        node_keys=node_keys, node_values=node_values, mask=mask[None], levels=levels[None]
    )
    out = attend(tree)
    keys, values = arguments.key_cache, arguments.value_cache
    unused = next(b for b in range(len(keys)) if b not in arguments.block_table[0, :2].tolist())
    arguments.block_table[0, 2] = unused
    for node, path in enumerate(paths):
        for offset, above in enumerate(path[:-1], context):
            where = arguments.block_table[0, offset // 16]
            keys[where, offset % 16] = node_keys[0, :, above]
            values[where, offset % 16] = node_values[0, :, above]
        alone = tree._replace(
            query=tree.query[:, node : node + 1],
            context_lens=torch.tensor([context + len(path) - 1]).int(),
            node_keys=node_keys[:, :, node : node + 1],
            node_values=node_values[:, :, node : node + 1],
            mask=torch.ones(1, 1, 1, dtype=torch.bool),
            levels=torch.zeros(1, 1, dtype=torch.int32),
        )
        close(out[:, node : node + 1], attend(alone), 1e-5)


@BOTH
def test_nodes_that_verification_gathers_from_the_cache(attend: Attend) -> None:
    """They are strided as ``gather_slots`` leaves them."""
    case = Case((45,), 5, 5, kv_heads=3, dim=64)
    arguments = case.arguments()
    cache, whole = replace(case, contexts=(80,), seed=7).cache_and_arguments()
    slots = whole.block_table[0, 2].long() * 16 + 13 + torch.arange(3)
    slots = torch.cat([slots, whole.block_table[0, 4].long() * 16 + torch.arange(2)])
    keys, values = gather_slots(cache, slots)
    gathered = arguments._replace(
        key_cache=whole.key_cache,
        value_cache=whole.value_cache,
        block_table=whole.block_table,
        node_keys=keys.transpose(0, 1)[None],
        node_values=values.transpose(0, 1)[None],
    )
    close(attend(gathered), expected(gathered), 1e-5)


def test_one_key_head_may_have_any_stride() -> None:
    cache, arguments = Case((40,), kv_heads=1).cache_and_arguments()
    blocks, _, block, width = cache.shape
    keys, values = paged_views(cache.as_strided(cache.shape, (block * width, 3, width, 1)))
    odd = arguments._replace(key_cache=keys, value_cache=values)
    assert torch.equal(by_native(odd), by_native(arguments))
    assert blocks > 1


def test_the_native_op_serves_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    served, even = Case(dim=32).arguments(), Case(dim=24).arguments()
    assert torch.equal(tree_attention.tree_attention(*served), by_native(served))
    monkeypatch.setattr(reference, "tree_attention", lambda *args: "plain torch")
    assert isinstance(tree_attention.tree_attention(*served), torch.Tensor)
    assert tree_attention.tree_attention(*even) == "plain torch"
    monkeypatch.setattr(tree_attention, "is_loaded", lambda: False)
    assert tree_attention.tree_attention(*served) == "plain torch"


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made under it; views of ``arguments`` are not."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        tensors = (x for x in arguments if isinstance(x, torch.Tensor))
        self._given = {x.untyped_storage().data_ptr() for x in tensors}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage.data_ptr() not in self._given:
                self.num_bytes = max(self.num_bytes, storage.nbytes())
        return out


@pytest.mark.parametrize("window", [0, 1500])
@pytest.mark.parametrize("block", [16, 128])
def test_plain_torch_copies_no_whole_context(block: int, window: int) -> None:
    """What it makes is as large for 2000 positions as for one chunk."""
    sizes = []
    for length in (reference.CHUNK, 4 * reference.CHUNK):
        arguments = Case((length,), dim=64, block=block, window=window).arguments()
        with Largest(arguments) as largest:
            by_torch(arguments)
        sizes.append(largest.num_bytes)
    assert sizes[0] == sizes[1] == 2 * reference.CHUNK * 64 * 4


def test_plain_torch_takes_any_head_size() -> None:
    arguments = Case(dim=24).arguments()
    close(by_torch(arguments), expected(arguments), 1e-5)


def odd(name: str, change: Callable[[Any], Any], why: str) -> Any:
    return pytest.param(name, change, why, id=f"{name}: {why}")


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        odd("query", lambda t: t[0], "wrong ranks"),
        odd("key_cache", lambda t: t[0], "wrong ranks"),
        odd("value_cache", lambda t: t[0], "wrong ranks"),
        odd("node_keys", lambda t: t[0], "wrong ranks"),
        odd("block_table", lambda t: t[0], "wrong ranks"),
        odd("query", lambda t: t[:, :0], "no queries"),
        odd("query", lambda t: t[:0], "no queries"),
        odd("query", lambda t: t[..., :8], "no multiple of 16"),
        odd("query", lambda t: t[:, :, :3], "3 heads do not share 2"),
        odd("query", lambda t: t.repeat(1, 1, 1, 2), "does not fit"),
        odd("query", lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), "heads must be"),
        odd("query", lambda t: t.bfloat16(), "one dtype"),
        odd("key_cache", lambda t: t.repeat(1, 1, 1, 2), "does not fit"),
        odd("value_cache", lambda t: t[..., :16, :8], "does not fit"),
        odd("key_cache", lambda t: t.contiguous(), "dense"),
        odd("value_cache", lambda t: t.contiguous(), "dense"),
        odd("value_cache", lambda t: t.bfloat16(), "one dtype"),
        odd("block_table", lambda t: -t, "block -"),
        odd("block_table", lambda t: t + 999, "outside the cache's 6"),
        odd("block_table", lambda t: t[:1], "one row a request"),
        odd("block_table", lambda t: t.long(), "tables are int32"),
        odd("block_table", lambda t: t[:, :1].contiguous(), "context length 20 does not fit"),
        odd("block_table", lambda t: t.repeat(1, 2)[:, ::2], "contiguous"),
        odd("context_lens", lambda t: t[:1], "one row a request"),
        odd("context_lens", lambda t: -t, "context length -20 does not fit"),
        odd("context_lens", lambda t: t + 99, "context length 119 does not fit"),
        odd("context_lens", lambda t: t.long(), "tables are int32"),
        odd("node_keys", lambda t: t[:1], "node keys and values"),
        odd("node_keys", lambda t: t[:, :1], "node keys and values"),
        odd("node_keys", lambda t: t[:, :, 1:], "node keys and values"),
        odd("node_values", lambda t: t[:, :, 1:], "node keys and values"),
        odd("node_values", lambda t: t.half(), "one dtype"),
        odd("mask", lambda t: t[..., 1:], "the mask must be"),
        odd("mask", lambda t: t[:, 1:], "the mask must be"),
        odd("mask", lambda t: t[0], "the mask must be"),
        odd("mask", lambda t: t.int(), "the mask is bool"),
        odd("levels", lambda t: t[:, 1:].contiguous(), "levels must be"),
        odd("levels", lambda t: t.long(), "tables are int32"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Callable[[Any], Any], why: str) -> None:
    arguments = Case((20, 18)).arguments()
    with pytest.raises(RuntimeError, match=why):
        by_native(arguments._replace(**{name: change(getattr(arguments, name))}))
