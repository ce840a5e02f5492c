"""Tree attention in Triton against the plain torch reference, which has a test of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from subspec_kernels import native, tree_attention
from subspec_kernels.grow_mask import pack_mask, unpack_mask
from subspec_kernels.kv_cache import paged_views
from subspec_kernels.tree_attention import reference

from vllm_subspec import envs
from vllm_subspec.files import private_directory

NAN = float("nan")
# Both sum in fp32; Triton rounds the softmax's weights to the dtype, and both round the output.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
SPLITS = pytest.mark.parametrize("splits", [1, 5])


@pytest.fixture(autouse=True)
def _new_tensors_are_filled() -> Iterator[None]:
    """With NaN: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A CPU counts as a GPU of 8 processors, and its bf16 products are those of numbers.

    The interpreter keeps bf16 as the uint16 of its bits, and multiplies these in ``tl.dot``.
    """
    if device.type == "cuda":
        return
    from subspec_kernels.tree_attention import triton as ours
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    dot = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(ours, "_processors", lambda _: 8)


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
    soft_cap: float = 0.0
    window: int = 0

    def on(self, device: torch.device) -> Arguments:
        return Arguments(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self))


LAYOUTS: dict[str, Callable[[int, int, int, int, torch.dtype], tuple[torch.Tensor, ...]]] = {
    "flash": lambda blocks, block, heads, dim, dtype: torch.full(
        (2, blocks, block, heads, dim), NAN, dtype=dtype
    ).unbind(0),
    "triton": lambda blocks, block, heads, dim, dtype: torch.full(
        (blocks, 2, block, heads, dim), NAN, dtype=dtype
    ).unbind(1),
    "cpu": lambda blocks, block, heads, dim, dtype: paged_views(
        torch.full((blocks, heads, block, 2 * dim), NAN, dtype=dtype)
    ),
}


@dataclass(frozen=True)
class Case:
    contexts: tuple[int, ...] = (20,)
    m: int = 3
    num_nodes: int = 7
    kv_heads: int = 2
    group: int = 2
    dim: int = 64
    block: int = 16
    dtype: torch.dtype = torch.float32
    soft_cap: float = 0.0
    window: int = 0
    layout: str = "flash"

    def arguments(self) -> Arguments:
        """Random ones. What no query may look at holds NaN; no tensor of floats is dense."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        requests, heads = len(self.contexts), self.kv_heads * self.group
        used = [-(-length // self.block) for length in self.contexts]
        num_blocks = sum(used) + 2
        caches = LAYOUTS[self.layout](num_blocks, self.block, self.kv_heads, self.dim, self.dtype)
        levels = torch.randint(5, (requests, self.m), generator=generator).int()
        # A scheduler's table holds remains of other requests around a request's blocks.
        table = torch.full((requests, max(used) + 1), 1 << 30, dtype=torch.int32)
        free = torch.randperm(num_blocks, generator=generator).int()
        for row, length in enumerate(self.contexts):
            ids, free = free[: used[row]], free[used[row] :]
            first = length + int(levels[row].min()) - self.window + 1 if self.window > 0 else 0
            first = min(max(first, 0), length)
            table[row, first // self.block : used[row]] = ids[first // self.block :]
            positions = torch.arange(first, length)
            for cache in caches:
                rows = normal(length, self.kv_heads, self.dim)[first:]
                cache[ids[positions // self.block].long(), positions % self.block] = rows
        mask = torch.rand((requests, self.m, self.num_nodes), generator=generator) < 0.4
        one = torch.randint(self.num_nodes, (requests, self.m, 1), generator=generator)
        mask = mask.scatter(2, one, True)
        nodes = normal(2, requests, self.kv_heads, self.num_nodes + 3, self.dim)
        nodes[:, :, :, self.num_nodes :] = NAN
        hidden = ~mask.any(1)[:, None, :, None]
        node_keys, node_values = nodes[:, :, :, : self.num_nodes].masked_fill(hidden, NAN)
        return Arguments(
            normal(requests, self.m, heads + 2, self.dim)[:, :, 1:-1],
            *caches,
            table,
            torch.tensor(self.contexts, dtype=torch.int32),
            node_keys,
            node_values,
            pack_mask(mask),
            levels,
            self.dim**-0.5,
            self.soft_cap,
            self.window,
        )


def by_triton(arguments: Arguments, device: torch.device) -> torch.Tensor:
    from subspec_kernels.tree_attention import triton

    return triton.tree_attention(*arguments.on(device)).cpu()


def close(out: torch.Tensor, to: torch.Tensor) -> None:
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out, to, rtol=tolerance, atol=tolerance)


def check(case: Case, device: torch.device) -> None:
    arguments = case.arguments()
    out = by_triton(arguments, device)
    assert out.dtype == case.dtype
    assert out.is_contiguous()
    assert bool(out.isfinite().all())
    close(out, reference.tree_attention(*arguments))


def split_into(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from subspec_kernels.tree_attention import triton

    monkeypatch.setattr(triton, "_num_splits", lambda *_: splits)


@DTYPES
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(Case((37, 0), m=5, num_nodes=13, group=3, dim=dim, dtype=dtype), device)


@DTYPES
@pytest.mark.parametrize("block", [1, 16, 48])
def test_context_lengths(block: int, dtype: torch.dtype, device: torch.device) -> None:
    contexts = (0, 1, 15, 16, 17, 64, 65, 300)
    check(Case(contexts, m=2, kv_heads=1, block=block, dtype=dtype), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts(layout: str, device: torch.device) -> None:
    case = Case((37, 5), kv_heads=3, layout=layout)
    check(case, device)
    flash = Case((37, 5), kv_heads=3).arguments()
    assert torch.equal(by_triton(case.arguments(), device), by_triton(flash, device))


@pytest.mark.parametrize("window", [-1, 1, 5, 21, 1000])
def test_windows(window: int, device: torch.device) -> None:
    check(Case((100, 7, 0, 16), m=4, window=window), device)


@DTYPES
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(soft_cap: float, dtype: torch.dtype, device: torch.device) -> None:
    check(Case((37,), m=5, num_nodes=70, soft_cap=soft_cap, dtype=dtype), device)


@SPLITS
@DTYPES
@pytest.mark.parametrize("window", [0, 400])
def test_long_contexts_are_split(
    window: int,
    dtype: torch.dtype,
    splits: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_into(splits, monkeypatch)
    check(Case((700, 0, 321), m=2, kv_heads=1, window=window, dtype=dtype), device)


def test_there_may_be_more_splits_than_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(32, monkeypatch)
    check(Case((0, 65, 1000), m=1, kv_heads=1), device)


@DTYPES
def test_a_whole_tree_of_512_nodes(dtype: torch.dtype, device: torch.device) -> None:
    """Each node sees its ancestors alone, over every bit of eight words."""
    case = Case((70,), 512, 512, kv_heads=1, group=1, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    mask = torch.eye(512, dtype=torch.bool)
    levels = torch.zeros(512, dtype=torch.int32)
    for node in range(1, 512):
        parent = int(torch.randint(max(0, node - 20), node, (), generator=generator))
        mask[node] |= mask[parent]
        levels[node] = levels[parent] + 1
    nodes = torch.randn(2, 1, 1, 512, case.dim, generator=generator).to(dtype)
    arguments = case.arguments()._replace(
        node_keys=nodes[0],
        node_values=nodes[1],
        mask=pack_mask(mask[None]),
        levels=levels[None],
    )
    close(by_triton(arguments, device), reference.tree_attention(*arguments))


@pytest.mark.parametrize("num_nodes", [1, 63, 64, 65, 128, 129])
def test_the_last_bit_of_a_mask(num_nodes: int, device: torch.device) -> None:
    """A query that sees one node gets its value; bit 63 is the sign."""
    arguments = Case((0,), 1, num_nodes).arguments()
    mask = torch.zeros(1, 1, num_nodes, dtype=torch.bool)
    mask[..., -1] = True
    for tensor in (arguments.node_keys, arguments.node_values):
        tensor[:, :, :-1], tensor[:, :, -1] = NAN, 1.0
    out = by_triton(arguments._replace(mask=pack_mask(mask)), device)
    assert torch.equal(out, torch.ones_like(out))


@SPLITS
@pytest.mark.parametrize("window", [0, 9])
def test_queries_with_an_empty_mask_get_zeros(
    window: int, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are padding: their level counts for nothing, and a request may hold nothing else."""
    split_into(splits, monkeypatch)
    native.load(private_directory(envs.cache_dir() / "kernels"))
    arguments = Case((300, 30, 0), m=5, window=window, layout="cpu").arguments()
    arguments.block_table.remainder_(len(arguments.key_cache))  # the native op checks all of it
    clean = by_triton(arguments, device)
    empty = torch.zeros(3, 5, dtype=torch.bool)
    empty[0, 1] = empty[1] = empty[2, 4] = True
    arguments.mask[empty] = 0
    arguments.levels[empty] = -(1 << 20)  # looks back over everything
    bools = unpack_mask(arguments.mask, 7)
    hidden = ~bools.any(1)[:, None, :, None]
    for tensor in (arguments.node_keys, arguments.node_values):
        tensor.masked_fill_(hidden, NAN)
    for out in (
        by_triton(arguments, device),
        reference.tree_attention(*arguments),
        torch.ops.subspec.tree_attention(*arguments._replace(mask=bools)),
    ):
        assert torch.equal(out[empty], torch.zeros_like(out[empty]))
        close(out[~empty], clean[~empty])


@pytest.mark.parametrize("attend", [by_triton, lambda a, _: reference.tree_attention(*a)])
def test_a_mask_of_bools_is_the_same(attend: Any, device: torch.device) -> None:
    arguments = Case((30,), 5, 70).arguments()
    bools = arguments._replace(mask=unpack_mask(arguments.mask, 70))
    assert torch.equal(attend(bools, device), attend(arguments, device))


@pytest.mark.parametrize("scale", [100.0, 1e-6])
def test_extreme_scores(scale: float, device: torch.device) -> None:
    arguments = Case((90,), 6, 40).arguments()._replace(scale=scale)
    right = reference.tree_attention(*arguments)
    torch.testing.assert_close(by_triton(arguments, device), right, rtol=1e-3, atol=1e-3)


@SPLITS
@pytest.mark.parametrize("what", ["node_keys", "node_values"])
def test_nan_that_a_query_sees_is_not_hidden(
    what: str, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_into(splits, monkeypatch)
    arguments = Case((300, 300), 1, 3).arguments()
    arguments.mask[:] = 7
    for tensor in (arguments.node_keys, arguments.node_values):
        tensor.nan_to_num_(1.0)
    getattr(arguments, what)[0, :, 1] = NAN
    out = by_triton(arguments, device)
    assert bool(out[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_the_number_of_splits_follows_from_shapes() -> None:
    from subspec_kernels.tree_attention.triton import _num_splits

    assert _num_splits(programs=8, longest=8192, processors=132) == 32
    assert _num_splits(programs=16, longest=8192, processors=132) == 17
    assert _num_splits(programs=8, longest=600, processors=132) == 2
    assert _num_splits(programs=8, longest=0, processors=132) == 1
    assert _num_splits(programs=4096, longest=131072, processors=132) == 1


def test_cuda_is_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from subspec_kernels.tree_attention import triton

    monkeypatch.setattr(triton, "tree_attention", lambda *args: args)
    query = SimpleNamespace(is_cuda=True)
    served: Any = tree_attention.tree_attention(query, *"abcdefgh", 0.5, 1.0, 2)  # type: ignore[arg-type]
    assert served == (query, *"abcdefgh", 0.5, 1.0, 2)


def test_words_reach_the_native_op_too() -> None:
    native.load(private_directory(envs.cache_dir() / "kernels"))
    arguments = Case((40,), 3, 70, layout="cpu").arguments()
    close(tree_attention.tree_attention(*arguments), reference.tree_attention(*arguments))


def odd(name: str, change: Callable[[Any], Any], why: str) -> Any:
    return pytest.param(name, change, why, id=f"{name}: {why}")


@pytest.mark.parametrize("attend", [by_triton, lambda a, _: reference.tree_attention(*a)])
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        odd("query", lambda t: t[0], "must have 4 dimensions"),
        odd("key_cache", lambda t: t[0], "must have 4 dimensions"),
        odd("node_keys", lambda t: t[0], "must have 4 dimensions"),
        odd("block_table", lambda t: t[0], "must have 2 dimensions"),
        odd("query", lambda t: t[:, :0], "holds no queries"),
        odd("query", lambda t: t[:, :, :3], "3 query heads do not share 2"),
        odd("query", lambda t: t.double(), "cast it to bfloat16, float16 or float32"),
        odd("query", lambda t: t.half(), "key_cache is torch.float32; cast it to torch.float16"),
        odd("key_cache", lambda t: t[..., 1:], r"key_cache .* must be \[4, 16, 2, 64\]"),
        odd("value_cache", lambda t: t[:, 1:], r"value_cache .* must be \[4, 16, 2, 64\]"),
        odd("block_table", lambda t: t[1:], "block_table"),
        odd("block_table", lambda t: t.long(), "block_table is torch.int64; cast"),
        odd("context_lens", lambda t: t[None], "context_lens"),
        odd("node_keys", lambda t: t[:, :1], "node_keys"),
        odd("node_values", lambda t: t[:, :, 1:], "node_values"),
        odd("node_values", lambda t: t.half(), "node_values is torch.float16; cast"),
        odd("mask", lambda t: t[..., :0], r"mask \[1, 3, 0\] must be \[1, 3, 1\]"),
        odd("mask", lambda t: t.bool(), r"mask \[1, 3, 1\] must be \[1, 3, 7\]"),
        odd("levels", lambda t: t[:, 1:], "levels"),
        odd("levels", lambda t: t.long(), "levels is torch.int64; cast"),
        odd("levels", lambda t: t.repeat(1, 2)[:, ::2], "levels has strides"),
        odd("block_table", lambda t: t.repeat(1, 2)[:, ::2], "block_table has strides"),
    ],
)
def test_wrong_arguments_are_refused(
    name: str, change: Callable[[Any], Any], why: str, attend: Any, device: torch.device
) -> None:
    arguments = Case().arguments()
    with pytest.raises(ValueError, match=why):
        attend(arguments._replace(**{name: change(getattr(arguments, name))}), device)


def test_heads_above_256_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="head size 320 is above 256"):
        by_triton(Case(dim=320).arguments(), device)


POINTERS = ("out", "sum", "query", "key", "value", "table", "context")
POINTERS += ("node_key", "node_value", "mask", "level")


def attend_kernel(dtype: str, dim: int, rows: int, **constants: Any) -> dict[str, Any]:
    """As it is launched over vLLM's FlashAttention cache; only strides that vary are arguments."""
    kinds = {"table": "i32", "context": "i32", "mask": "i64", "level": "i32"}
    if constants["SPLIT"]:
        kinds |= {"out": "fp32", "sum": "fp32"}
    signature = {f"{name}_ptr": f"*{kinds.get(name, dtype)}" for name in POINTERS}
    sizes = ("requests", "m", "num_nodes", "num_splits")
    varying = ("mask_request", "mask_query", "mask_word", "table_request")
    signature |= dict.fromkeys((*varying, *sizes), "i32") | {"scale": "fp32"}
    cache = {"block": 16 * 8 * dim, "position": 8 * dim, "head": dim, "dim": 1}
    nodes = {"request": 8 * 512 * dim, "head": 512 * dim, "node": dim, "dim": 1}
    query = {"request": 32 * 32 * dim, "node": 32 * dim, "head": dim, "dim": 1}
    strides = {"query": query, "key": cache, "value": cache, "node_key": nodes, "node_value": nodes}
    constexprs = {
        f"{name}_{axis}": stride for name, axes in strides.items() for axis, stride in axes.items()
    }
    width = max(16, 1 << (dim - 1).bit_length())
    constexprs |= constants | {"GROUP": 4, "DIM": dim, "PAGE": 16, "ROWS": rows, "WIDTH": width}
    return {
        "kernel": "subspec_kernels.tree_attention.triton:_attend_kernel",
        "signature": signature,
        "constexprs": constexprs,
    }


def test_the_kernels_compile(compile_kernels: Callable[[list[dict[str, Any]]], Any]) -> None:
    """For GPUs that are not here; and no key or value is loaded element by element."""
    plain = {"SOFT_CAP": 0.0, "WINDOW": 0, "SPLIT": True, "COLUMNS": 64}
    capped = {"SOFT_CAP": 30.0, "WINDOW": 4096, "SPLIT": False, "COLUMNS": 32}
    merge = {
        "kernel": "subspec_kernels.tree_attention.triton:_merge_kernel",
        "signature": {
            "out_ptr": "*bf16",
            "part_ptr": "*fp32",
            "sum_ptr": "*fp32",
            "num_splits": "i32",
        },
        "constexprs": {"SPLITS": 32, "DIM": 80, "WIDTH": 128},
    }
    kernels = [
        attend_kernel("bf16", 80, 16, **plain),
        attend_kernel("fp16", 256, 64, **capped),
        merge,
    ]
    for compiled in compile_kernels(kernels):
        assert "ld.global.b16" not in compiled["ptx"], compiled["capability"]
