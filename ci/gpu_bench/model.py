"""A decoder-only model of random weights: most layers streamed from pinned RAM, drafted by shadows.

It has the sizes and the operations of a real one; what it says is senseless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from subspec_kernels.kv_compact import CacheViews
from subspec_kernels.lowbit_linear import lowbit_linear
from subspec_kernels.tree_attention import tree_attention
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from gpu_bench.device import Device, Mark
from gpu_bench.inputs import PAGE, ModelShape, group_of, lowbit_weight
from vllm_subspec.stream import HostStore, LayerStreamer, SpillLayout, TensorSpec
from vllm_subspec.timeline import Timeline

Multiply = Callable[[str, Tensor], Tensor]
"""A layer's linear of that name."""
_SHADOWS = 2  # in turns: with one alone, a small model's would stay in the GPU's cache
_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Plan:
    """What is resident, and how the tree grows.

    Args:
        residents: the last layers, kept whole; the others are streamed.
        slots: layers on the GPU at once, of those streamed.
        host_layers: layers that pinned RAM holds; they are streamed again and again. Any number
            that is above ``slots``, so that no slot happens to hold what comes next.
        bits: of the shadows.
        width, depth: of the tree.
        context: positions in the cache.
        tau: tokens that each pass is made to commit.
    """

    residents: int
    slots: int
    host_layers: int
    bits: int
    width: int
    depth: int
    context: int
    tau: int

    def __post_init__(self) -> None:
        if self.host_layers <= self.slots:
            raise ValueError(
                f"{self.host_layers} layers in pinned RAM would stay in {self.slots} slots: hold "
                f"at least {self.slots + 1}"
            )
        if not 1 <= self.tau <= self.depth + 1:
            raise ValueError(
                f"tau {self.tau} is out of reach: a tree of depth {self.depth} gives 1 to "
                f"{self.depth + 1} tokens"
            )


class SyntheticModel:
    """Draft and target passes over one request.

    The layers share weights (of the streamed ones ``host_layers`` are distinct, of the residents
    one, of the shadows two), which are too large for a GPU's cache: so they take the memory of a
    few layers, and the time of all.

    Attributes:
        caches: keys and values of all layers.
        block_table: int32 [1, blocks].
        streamer: of the streamed layers; closed by ``close``.
    """

    def __init__(self, device: Device, shape: ModelShape, plan: Plan, timeline: Timeline) -> None:
        self.shape, self.plan, self._device = shape, plan, device
        self.streamed = shape.layers - plan.residents
        self._place = device.torch_device
        self._allocate_caches()
        self._head = self._random(shape.vocab, shape.hidden)
        sizes = shape.linears
        self._resident = {name: self._random(*size) for name, size in sizes.items()}
        self._group = group_of(plan.bits)
        self._shadows = [
            {name: self._shadow(size) for name, size in sizes.items()} for _ in range(_SHADOWS)
        ]
        self._head_shadow = self._shadow((-(-shape.vocab // 16) * 16, shape.hidden))
        specs = [TensorSpec(name, size, _DTYPE) for name, size in sizes.items()]
        layout = SpillLayout.of([specs] * plan.host_layers)
        store = HostStore(layout, device.copies())
        for layer in range(plan.host_layers):
            store.put(layer, self._resident)
        self.streamer = LayerStreamer(store, layout, plan.slots, timeline=timeline)
        self._visits = 0
        self.marks: list[tuple[Mark, Mark]] = []

    def close(self) -> None:
        """Free the stream."""
        self.streamer.close()

    def draft(self, tokens: Tensor, level: int, words: Tensor) -> Tensor:
        """A level's logits: ``vllm_subspec.draft.growth.DraftForward``, all shapes static."""
        count = tokens.shape[1]
        filled = 1 + level * count
        positions = self._context.long() + level + self._zeros[:count]
        x = embedding(tokens[0], self._head)
        for layer in range(self.shape.layers):
            multiply = self._by_shadow(layer) if layer < self.streamed else self._by_resident
            query, key, value = self._heads(multiply, x, positions)
            keys, values = self._scratch[layer].unbind(0)
            keys[0, :, filled - count : filled] = key.transpose(0, 1)
            values[0, :, filled - count : filled] = value.transpose(0, 1)
            nodes = keys[:, :, :filled], values[:, :, :filled]
            levels = self._zeros[None, :count].int() + level
            x = self._rest(multiply, x, self._attend(layer, query, nodes, words, levels))
        logits = lowbit_linear(_norm(x), *self._head_shadow, self.plan.bits, self._group)
        return logits[None, :, : self.shape.vocab]

    def target(self, tokens: Tensor, levels: Tensor, words: Tensor, slots: Tensor) -> Tensor:
        """The most likely token after each row, int64 [n]; their keys and values go to ``slots``.

        Args:
            tokens: int64 [n], the root and its nodes.
            levels: int64 [n], below the root.
            words: int64 [1, n, w], what each row attends to among the rows.
            slots: int64 [n], of the cache.
        """
        positions = self._context.long() + levels
        x = embedding(tokens, self._head)
        self.marks.clear()
        for layer in range(self.shape.layers):
            with self._target_layer(layer) as multiply:
                query, key, value = self._heads(multiply, x, positions)
                for cache, rows in zip(self._cache[layer], (key, value), strict=True):
                    cache.view(-1, *rows.shape[1:])[slots] = rows
                nodes = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
                attended = self._attend(layer, query, nodes, words, levels[None].int())
                x = self._rest(multiply, x, attended)
        return linear(_norm(x), self._head).argmax(-1)

    @contextmanager
    def _target_layer(self, layer: int) -> Iterator[Multiply]:
        """The layer's linears, waited for where they are streamed, with the compute marked."""
        if layer >= self.streamed:
            weights = self._resident
        else:
            unit = self._visits % self.plan.host_layers
            weights = self.streamer.acquire(unit)
        start = self._device.mark()
        yield lambda name, x: linear(x, weights[name])
        self.marks.append((start, self._device.mark()))
        if layer < self.streamed:
            self.streamer.release(unit)
            self._visits += 1

    def _by_resident(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self._resident[name])

    def _by_shadow(self, layer: int) -> Multiply:
        shadow = self._shadows[layer % _SHADOWS]
        return lambda name, x: lowbit_linear(x, *shadow[name], self.plan.bits, self._group)

    def _heads(
        self, multiply: Multiply, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [n, heads, dim], the first two rotated to their positions."""
        shape = self.shape
        heads = multiply("qkv", _norm(x)).view(len(x), -1, shape.head_dim)
        counts = [shape.heads, shape.kv_heads, shape.kv_heads]
        query, key, value = torch.split(heads, counts, dim=1)
        cos, sin = (table[positions][:, None] for table in self._rotations)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _attend(
        self, layer: int, query: Tensor, nodes: tuple[Tensor, Tensor], words: Tensor, levels: Tensor
    ) -> Tensor:
        keys, values = self._cache[layer].unbind(0)
        tables = self.block_table, self._context
        scale = self.shape.head_dim**-0.5
        out = tree_attention(query[None], keys, values, *tables, *nodes, words, levels, scale)
        return out[0].flatten(1)

    def _rest(self, multiply: Multiply, x: Tensor, attended: Tensor) -> Tensor:
        x = x + multiply("o", attended)
        gate, up = multiply("gate_up", _norm(x)).chunk(2, -1)
        return x + multiply("down", silu(gate) * up)

    def _allocate_caches(self) -> None:
        """Context of random keys and values, room for a tree behind it, and the draft's scratch."""
        shape, plan = self.shape, self.plan
        nodes = 1 + plan.width * plan.depth
        blocks = -(-(plan.context + nodes) // PAGE)
        size = (shape.layers, 2, blocks, PAGE, shape.kv_heads, shape.head_dim)
        self._cache = torch.randn(size, device=self._place, dtype=_DTYPE)
        self.caches = CacheViews(list(self._cache.flatten(0, 1)))
        self.block_table = torch.randperm(blocks, device=self._place).int()[None]
        self._context = torch.tensor([plan.context], dtype=torch.int32, device=self._place)
        scratch = (shape.layers, 2, 1, shape.kv_heads, nodes, shape.head_dim)
        self._scratch = torch.zeros(scratch, device=self._place, dtype=_DTYPE)
        self._zeros = torch.zeros(nodes, dtype=torch.int64, device=self._place)
        half = shape.head_dim // 2
        steps = 1e6 ** (-torch.arange(half, device=self._place) / half)
        angles = torch.arange(plan.context + nodes, device=self._place)[:, None] * steps
        self._rotations = angles.cos().to(_DTYPE), angles.sin().to(_DTYPE)

    def _random(self, out: int, inputs: int) -> Tensor:
        return torch.randn(out, inputs, device=self._place, dtype=_DTYPE) / sqrt(inputs)

    def _shadow(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return lowbit_weight(size, self.plan.bits, self._group, self._place)


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [n, heads, dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
