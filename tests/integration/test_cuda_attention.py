"""Trees and drafts over vLLM's GPU caches: on CPU tensors, against a softmax over plain lists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from subspec_kernels import tree_attention
from subspec_kernels.grow_mask import pack_mask
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_subspec.draft.scratch import DraftScratch
from vllm_subspec.draft.tree import Tree
from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration import attention
from vllm_subspec.integration.attention import DraftContext, TreeRows, draft_attention
from vllm_subspec.integration.cuda_attention import (
    PackedTreeRows,
    SubSpecFlashAttentionBackend,
    SubSpecFlashAttentionImpl,
    SubSpecTritonAttentionBackend,
    SubSpecTritonAttentionImpl,
    override_cuda_attention,
    with_trees,
)

pytestmark = pytest.mark.engine

BLOCK, NUM_BLOCKS, DIM = 16, 9, 32
OWN = 7.0  # what vLLM's own attention says in these tests
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BACKENDS = {
    "triton": (SubSpecTritonAttentionImpl, TritonAttentionImpl),
    "flash": (SubSpecFlashAttentionImpl, FlashAttentionImpl),
    "cpu": (attention.SubSpecCPUAttentionImpl, CPUAttentionBackendImpl),
}


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native op, where another test loaded it, reads a CPU's cache layout only."""
    monkeypatch.setattr(tree_attention, "is_loaded", lambda: False)


@pytest.fixture(autouse=True)
def _own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own attention, as far as it runs here: every row becomes ``OWN``."""

    def forward(self: Any, layer: Any, *args: Any) -> torch.Tensor:
        output: torch.Tensor = args[5]
        return output.fill_(OWN)

    for _, base in BACKENDS.values():
        monkeypatch.setattr(base, "forward", forward)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32

    def impl(self, backend: str, **changes: Any) -> Any:
        arguments = dict(
            num_heads=self.heads,
            head_size=DIM,
            scale=0.3,
            num_kv_heads=self.kv_heads,
            alibi_slopes=None,
            sliding_window=self.window,
            kv_cache_dtype="auto",
            logits_soft_cap=self.soft_cap,
        )
        return BACKENDS[backend][0](**arguments | changes)

    def cache(self, layout: KVCacheLayout) -> torch.Tensor:
        """The second of two layers' caches, as vLLM lays them out; full of NaN."""
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=self.kv_heads, head_size=DIM, dtype=self.dtype
        )
        strides = compute_layout_strides(spec, NUM_BLOCKS, 2, layout)
        size = 2 * NUM_BLOCKS * spec.page_size_bytes
        raw = torch.full((size // self.dtype.itemsize,), math.nan, dtype=self.dtype)
        place = KVCacheTensor(size, ["a", "b"], layer_stride=strides[0], block_stride=strides[1])
        _, cache = create_kv_cache_views(raw.view(torch.int8), spec, NUM_BLOCKS, layout, place)
        assert cache.shape == (NUM_BLOCKS, self.kv_heads, BLOCK, 2 * DIM)
        return cache

    def attend(self, query: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """One query [heads, dim] over keys and values [kv_heads, dim] that it sees."""
        out = torch.empty(self.heads, DIM, dtype=torch.float64)
        for head in range(self.heads):
            of = head * self.kv_heads // self.heads
            keys = torch.stack([key[of] for key, _ in seen]).double()
            values = torch.stack([value[of] for _, value in seen]).double()
            scores = keys @ query[head].double() * 0.3
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            out[head] = torch.softmax(scores, 0) @ values
        return out.to(self.dtype)


def store(
    backend: str, cache: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor, values: Any
) -> None:
    """Positions' keys and values [n, kv_heads, dim] in a request's blocks, number by number."""
    for position in range(len(keys)):
        block, offset = int(blocks[position // BLOCK]), position % BLOCK
        for head in range(keys.shape[1]):
            page = cache[block, head]
            if backend == "cpu":  # keys by dimension, then values by position
                flat = page.view(-1)
                flat[offset : BLOCK * DIM : BLOCK] = keys[position, head]
                start = BLOCK * DIM + offset * DIM
                flat[start : start + DIM] = values[position, head]
            else:
                page[offset] = torch.cat([keys[position, head], values[position, head]])


def random_tree(count: int, seed: int) -> Tree:
    """Nodes of random parents, in level order."""
    generator = torch.Generator().manual_seed(seed)
    above = [int(torch.randint(-1, i, (), generator=generator)) if i else -1 for i in range(count)]
    levels: list[int] = []
    for parent in above:
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    order = sorted(range(count), key=lambda node: levels[node])
    parents = [order.index(above[node]) if above[node] >= 0 else -1 for node in order]
    tree = Tree(
        torch.arange(count),
        torch.tensor(parents),
        torch.tensor([levels[node] for node in order]),
        -torch.tensor([float(levels[node]) for node in order]),
    )
    tree.check_integrity()
    return tree


def path(tree: Tree, row: int) -> list[int]:
    """Rows from the root, 0, down to ``row``."""
    rows = [row]
    while rows[0]:
        rows.insert(0, int(tree.parents[rows[0] - 1]) + 1)
    return rows


def metadata_for(backend: str, tables: torch.Tensor, num_tokens: int) -> Any:
    """vLLM's own, in what tree attention reads of it."""
    nothing = torch.empty(0)
    common = dict(
        num_actual_tokens=num_tokens,
        max_query_len=1,
        query_start_loc=nothing,
        max_seq_len=1,
        seq_lens=nothing,
        block_table=tables,
        slot_mapping=nothing,
    )
    if backend == "flash":
        return FlashAttentionMetadata(**common)
    if backend == "triton":
        return TritonAttentionMetadata(
            **common,
            seq_threshold_3D=1,
            num_par_softmax_segments=1,
            softmax_segm_output=nothing,
            softmax_segm_max=nothing,
            softmax_segm_expsum=nothing,
            causal=True,
        )
    fields = dict.fromkeys(CPUAttentionMetadata.__dataclass_fields__)
    return CPUAttentionMetadata(**fields | {"block_table": tables})


def marked(backend: str, metadata: Any, trees: list[TreeRows]) -> Any:
    if backend == "cpu":
        return attention.TreeAttentionMetadata(**vars(metadata), trees=trees)
    return with_trees({"layer": metadata}, trees)["layer"]


LAYOUTS = [
    *((backend, layout) for backend in ("triton", "flash") for layout in KVCacheLayout),
    ("cpu", KVCacheLayout.LBHNC),
]
SHAPES = {
    "grouped": Case(),
    "window": Case(heads=3, kv_heads=3, window=6),
    "window-in-nodes": Case(heads=6, kv_heads=2, window=2),
    "soft-cap": Case(heads=4, kv_heads=1, soft_cap=1.5),
    "window-soft-cap-bf16": Case(window=20, soft_cap=2.0, dtype=torch.bfloat16),
    "fp16": Case(dtype=torch.float16),
}
CASES = [
    *((backend, layout, "grouped") for backend, layout in LAYOUTS),
    *((backend, KVCacheLayout.LBNHC, name) for backend in ("triton", "flash") for name in SHAPES),
    *(("cpu", KVCacheLayout.LBHNC, name) for name in SHAPES),
]


@pytest.mark.parametrize(
    ("backend", "layout", "name"),
    dict.fromkeys(CASES),
    ids=lambda value: getattr(value, "name", value),
)
def test_nodes_see_their_context_and_their_ancestors(
    backend: str, layout: KVCacheLayout, name: str
) -> None:
    case = SHAPES[name]
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    # Request 1 decodes without a tree; the others' trees fill two mask words, and a part of one.
    requests = {0: (37, random_tree(70, 1)), 2: (16, random_tree(9, 2)), 3: (0, random_tree(4, 3))}
    starts = {0: 0, 2: 72, 3: 82}
    num_tokens = 90  # with padding at the end
    tables = torch.tensor([[3, 7, 1], [8, 8, 8], [5, 8, 8], [8, 8, 8]], dtype=torch.int32)
    impl, cache = case.impl(backend), case.cache(layout)
    query = normal(num_tokens, case.heads, DIM)
    both = normal(num_tokens, 2, case.kv_heads, DIM)  # as a fused projection leaves them
    key, value = both[:, 0], both[:, 1]
    trees, expected = [], torch.full_like(query, OWN)
    for row, (num_context, tree) in requests.items():
        keys, values = normal(2, num_context, case.kv_heads, DIM)
        store(backend, cache, tables[row], keys, values)
        depths = torch.cat([torch.zeros(1, dtype=torch.int64), tree.levels])
        start = starts[row]
        trees.append(
            TreeRows(
                start, row, torch.tensor([num_context]).int(), tree.ancestor_mask(), depths.int()
            )
        )
        for node in range(len(tree) + 1):
            seen = list(zip(keys, values, strict=True))
            seen += [(key[start + r], value[start + r]) for r in path(tree, node)]
            seen = seen[-case.window :] if case.window else seen  # positions follow each other
            expected[start + node] = case.attend(query[start + node], seen)
    metadata = marked(backend, metadata_for(backend, tables, num_tokens), trees)
    output = torch.full_like(query, math.nan)
    returned = impl.forward(None, query, key, value, cache, metadata, output)
    assert returned is output
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    in_trees = torch.zeros(num_tokens, dtype=torch.bool)
    for row, (_, tree) in requests.items():
        in_trees[starts[row] : starts[row] + len(tree) + 1] = True
    assert bool((output[~in_trees] == OWN).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_trees_vllm_is_alone(backend: str) -> None:
    impl = Case().impl(backend)
    output = torch.full((3, 4, DIM), math.nan)
    for metadata in (None, metadata_for(backend, torch.zeros(1, 1).int(), 3)):
        impl.forward(None, *[torch.empty(3, 4, DIM)] * 3, None, metadata, output.fill_(math.nan))
        assert bool((output == OWN).all())


@pytest.mark.parametrize("backend", ["triton", "flash"])
@pytest.mark.parametrize("window", [None, 3, 25])
def test_drafts_see_their_context_and_their_ancestors(backend: str, window: int | None) -> None:
    case = Case(window=window, soft_cap=2.0)
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    cache, lengths = case.cache(KVCacheLayout.LBNHC), (21, 16)
    tables = torch.tensor([[4, 2], [6, 8]], dtype=torch.int32)
    contexts = []
    for row, length in enumerate(lengths):
        keys, values = normal(2, length, case.kv_heads, DIM)
        store(backend, cache, tables[row], keys, values)
        contexts.append(list(zip(keys, values, strict=True)))
    layer = SimpleNamespace(impl=case.impl(backend), kv_cache=cache)
    context = DraftContext([torch.empty(0), tables], torch.tensor(lengths, dtype=torch.int32))
    scratch = DraftScratch(torch.float32, torch.device("cpu"))
    scratch.begin([(1, 8), (case.kv_heads, DIM)], 2, 1 + 2 * 3)
    paths = [[list(seen)] for seen in contexts]  # what the parents see, by request and row
    mask = torch.zeros(2, 1, 0, dtype=torch.bool)
    for level, parents in enumerate(([0], [0, 0], [1, 0], [0, 0])):
        m = len(parents)
        of_parents = mask[:, parents] if level else mask
        mask = torch.cat([of_parents, torch.eye(m, dtype=torch.bool).expand(2, -1, -1)], 2)
        scratch.advance(level, pack_mask(mask))
        query, key, value = (normal(2 * m, n * DIM) for n in (case.heads, 2, 2))
        found = draft_attention(layer, layer.kv_cache, query, key, value, context, 1, scratch, 1)
        for request in range(2):
            above = paths[request]
            paths[request] = []
            for node, parent in enumerate(parents):
                row = request * m + node
                own = (key[row].view(-1, DIM), value[row].view(-1, DIM))
                paths[request].append([*above[parent], own])
                seen = paths[request][-1][-window:] if window else paths[request][-1]
                expected = case.attend(query[row].view(-1, DIM), seen)
                torch.testing.assert_close(found[row].view(-1, DIM), expected, atol=2e-6, rtol=2e-6)


def test_masks_are_packed_once_a_window() -> None:
    tree = random_tree(70, 4)
    depths = torch.cat([torch.zeros(1, dtype=torch.int64), tree.levels]).int()
    rows = TreeRows(3, 1, torch.tensor([5]).int(), tree.ancestor_mask(), depths)
    packed = PackedTreeRows.of(rows, torch.device("cpu"))
    assert (packed.start, packed.batch_row) == (3, 1)
    for window in (-1, 0, 2):
        words = packed.mask_within(window)
        assert words is packed.mask_within(window)
        assert (words.dtype, words.shape) == (torch.int64, (71, 2))
        for row in range(71):
            near = [r for r in path(tree, row) if window < 1 or depths[row] - depths[r] < window]
            bits = sum(int(word) % 2**64 << 64 * w for w, word in enumerate(words[row]))
            assert bits == sum(1 << r for r in near)


def test_layers_share_marked_metadata_as_before() -> None:
    tables = torch.zeros(1, 1, dtype=torch.int32)
    full, sliding = metadata_for("flash", tables, 2), metadata_for("triton", tables, 2)
    rows = TreeRows(0, 0, *[torch.zeros(1, dtype=torch.int32)] * 3)
    found = with_trees({"a": full, "b": sliding, "c": full}, [rows])
    assert found["a"] is found["c"]
    assert found["a"].trees is found["b"].trees
    for layer, own in (("a", full), ("b", sliding)):
        assert isinstance(found[layer], type(own))
        kept = {name: value for name, value in vars(found[layer]).items() if name != "trees"}
        assert kept.keys() == vars(own).keys()
        assert all(value is getattr(own, name) for name, value in kept.items())


@pytest.mark.parametrize("backend", [SubSpecTritonAttentionBackend, SubSpecFlashAttentionBackend])
def test_attention_stays_out_of_full_graphs(backend: Any) -> None:
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    assert builder.__mro__[2] is backend.__mro__[1].get_builder_cls()
    assert backend.get_name() in AttentionBackendEnum.__members__


@pytest.fixture
def _as_before() -> Iterator[None]:
    yield
    override_cuda_attention(False)


@pytest.mark.usefixtures("_as_before")
def test_backends_are_overridden_and_given_back() -> None:
    ours = {
        AttentionBackendEnum.TRITON_ATTN: SubSpecTritonAttentionBackend,
        AttentionBackendEnum.FLASH_ATTN: SubSpecFlashAttentionBackend,
    }
    override_cuda_attention(True)
    for backend, own in ours.items():
        assert backend.get_class() is own
        assert issubclass(own.get_impl_cls(), attention.TreeAttentionImpl)
    override_cuda_attention(False)
    for backend, own in ours.items():
        assert backend.get_class() is own.__mro__[1]


@pytest.mark.parametrize("backend", ["triton", "flash"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"alibi_slopes": [0.1] * 4}, "ALiBi"),
        ({"kv_cache_dtype": "bfloat16"}, "a KV cache of bfloat16 (use --kv-cache-dtype auto)"),
        ({"kv_sharing_target_layer_name": "a"}, "KV sharing between layers"),
    ],
    ids=["alibi", "cache-dtype", "sharing"],
)
def test_layers_without_tree_attention_are_refused(
    backend: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Case().impl(backend, **changes)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sinks": torch.zeros(4)}, "attention sinks"),
        ({"chunk_lookback": 1}, "chunked local attention"),
        ({"kv_cache_dtype": "fp8"}, "an fp8 KV cache (use --kv-cache-dtype auto)"),
    ],
    ids=["sinks", "chunks", "fp8"],
)
def test_what_only_triton_has_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match="SubSpec does not draft through") as refused:
        Case().impl("triton", **changes)
    assert named in str(refused.value)
