"""The whole method on one small model, with torch alone: ``python -m vllm_subspec.loop``.

A draft tree grows on the target's own low-bit shadow, one target pass verifies all its nodes,
the target's draws pick the path, and the path's keys and values move together. The tokens are
those of plain decoding, greedy and sampled; only the number of target passes falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from subspec_kernels.grow_mask import unpack_mask
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from vllm_subspec.draft.growth import grow
from vllm_subspec.draft.tree import Tree, TreeShape
from vllm_subspec.verify.compaction import compaction_moves, move_rows
from vllm_subspec.verify.noise import draw_integers, gumbel_noise, peek_integers
from vllm_subspec.verify.walk import Walk, walk_trees

Cache = list[Tensor]  # of each layer: keys and values, [2, kv_heads, slots, head_dim]


class Model:
    """A decoder-only transformer (RMSNorm, RoPE, grouped-query attention, SwiGLU), at random.

    float64: rounding must not tell plain's one-row passes from verification's in a near-tie.
    """

    def __init__(self, seed: int = 0, vocab: int = 96, hidden: int = 64, layers: int = 4) -> None:
        self.kv_heads, self.head_dim = 2, 16
        generator = torch.Generator().manual_seed(seed)

        def linear(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64) / sqrt(size[1])

        kv, mlp = self.kv_heads * self.head_dim, 2 * hidden
        shapes = dict(q=(hidden, hidden), k=(kv, hidden), v=(kv, hidden), o=(hidden, hidden))
        shapes |= dict(gate=(mlp, hidden), up=(mlp, hidden), down=(hidden, mlp))
        self.embedding = linear(vocab, hidden) * sqrt(hidden)
        self.head = linear(vocab, hidden) * 3  # peaked enough to be worth predicting
        self.target = [{n: linear(*shape) for n, shape in shapes.items()} for _ in range(layers)]
        self.shadow = [{n: to_4_bits(w) for n, w in layer.items()} for layer in self.target]

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache, draft: bool = False
    ) -> Tensor:
        """Logits [m, vocab] of m rows whose KV is appended to ``cache``; draft: by the shadow.

        ``tokens`` and ``positions`` are int64 [m]; ``mask``, bool [m, s], says what each row
        attends to among the last s slots (the rows' own included); all see the slots before.
        """
        context = cache[0].shape[2] + len(tokens) - mask.shape[1]
        mask = torch.cat([mask.new_ones(len(mask), context), mask], 1)
        x = self.embedding[tokens]
        for index, weights in enumerate(self.shadow if draft else self.target):
            h = rms_norm(x, x.shape[-1:])
            q, k, v = (self.split_heads(h @ weights[name].T) for name in "qkv")
            q, k = rotate(q, positions), rotate(k, positions)
            cache[index] = torch.cat([cache[index], torch.stack([k, v])], 2)
            keys, values = cache[index]
            attended = scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
            x = x + attended.transpose(0, 1).flatten(1) @ weights["o"].T
            h = rms_norm(x, x.shape[-1:])
            x = x + (silu(h @ weights["gate"].T) * (h @ weights["up"].T)) @ weights["down"].T
        return rms_norm(x, x.shape[-1:]) @ self.head.T

    def split_heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim).transpose(0, 1)

    def prefill(self, prompt: list[int]) -> Cache:
        """A cache that holds the prompt but its last token, which is the first root."""
        none = torch.empty(2, self.kv_heads, 0, self.head_dim, dtype=torch.float64)
        cache = [none for _ in self.target]
        rows = torch.arange(len(prompt) - 1)
        self.forward(torch.tensor(prompt)[rows], rows, rows[:, None] >= rows, cache)
        return cache


def to_4_bits(weight: Tensor, group: int = 16) -> Tensor:
    """What the shadow computes with: round to nearest, one scale per group of inputs."""
    groups = weight.view(len(weight), -1, group)
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return ((groups / scale).round() * scale).flatten(1)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of [heads, m, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (torch.arange(half, dtype=torch.float64) / half)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Sampler:
    """Draws argmax(logits / temperature + the position's noise); temperature 0 is greedy."""

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        self.temperature, self.generator = temperature, torch.Generator().manual_seed(seed)

    def scores(self, logits: Tensor, levels: Tensor) -> Tensor:
        """[m, vocab] of rows that are ``levels`` (int64 [m]) below the root."""
        if self.temperature == 0:
            return logits
        integers = peek_integers(self.generator, int(levels.max()) + 1)[levels]
        return logits / self.temperature + gumbel_noise(integers, torch.arange(logits.shape[-1]))

    def draw(self, logits: Tensor, levels: Tensor) -> Tensor:
        """The token that each row would commit, int64 [m]."""
        return self.scores(logits, levels).argmax(-1)

    def commit(self, count: int) -> None:
        """Tokens were committed: their noise is spent."""
        draw_integers(self.generator, count)


@dataclass(frozen=True)
class Generated:
    """New tokens, and the target passes that they took after the prefill."""

    tokens: list[int]
    passes: int

    @property
    def tau(self) -> float:
        """Acceptance length: committed tokens per target pass."""
        return len(self.tokens) / self.passes


def generate_plain(model: Model, prompt: list[int], count: int, sampler: Sampler) -> Generated:
    """One target pass a token."""
    cache, tokens = model.prefill(prompt), list(prompt)
    root, itself = torch.tensor([0]), torch.tensor([[True]])
    for context in range(len(prompt) - 1, len(prompt) - 1 + count):
        logits = model.forward(torch.tensor(tokens[-1:]), root + context, itself, cache)
        tokens.append(int(sampler.draw(logits, root)))
        sampler.commit(1)
    return Generated(tokens[len(prompt) :], count)


def generate_subspec(
    model: Model, prompt: list[int], count: int, sampler: Sampler, shape: TreeShape
) -> Generated:
    """The same tokens in fewer passes: draft, verify, walk, compact, and again."""
    cache, tokens, passes = model.prefill(prompt), list(prompt), 0
    while len(tokens) < len(prompt) + count:
        context = len(tokens) - 1
        tree = draft(model, tokens[-1], cache, sampler, shape)
        levels = torch.cat([torch.tensor([0]), tree.levels])
        rows = torch.cat([torch.tensor(tokens[-1:]), tree.tokens])
        logits = model.forward(rows, context + levels, tree.ancestor_mask(), cache)
        walk = walk_trees([tree], sampler.draw(logits, levels))
        compact(cache, context, walk)
        committed = walk.tokens[0, : walk.lengths].tolist()
        sampler.commit(len(committed))
        tokens += committed
        passes += 1
    return Generated(tokens[len(prompt) : len(prompt) + count], passes)


def draft(model: Model, root: int, cache: Cache, sampler: Sampler, shape: TreeShape) -> Tree:
    """Grow a tree on the shadow. Its KV goes to a scratch: ``cache`` stays as it is."""
    scratch, context = list(cache), cache[0].shape[2]

    def forward(tokens: Tensor, level: int, words: Tensor) -> Tensor:
        mask = unpack_mask(words[0], 1 + level * tokens.shape[1])
        positions = torch.full_like(tokens[0], context + level)
        return model.forward(tokens[0], positions, mask, scratch, draft=True)[None]

    def rank(logits: Tensor, level: int, history: Tensor) -> Tensor:
        return sampler.scores(logits[0], torch.full((logits.shape[1],), level))[None]

    return grow(forward, torch.tensor([root]), shape, rank=rank)[0]


def compact(cache: Cache, context: int, walk: Walk) -> None:
    """Bring the visited rows' KV together behind the context, and drop the rest."""
    moves = compaction_moves(walk.rows)
    for layer, kv in enumerate(cache):
        move_rows(kv.movedim(2, 0), context + moves.src, context + moves.dst)
        cache[layer] = kv[:, :, : context + int(walk.lengths)]


def demo(count: int = 200) -> None:
    """Print acceptance lengths, greedy and sampled, and whether the tokens are plain's."""
    model, prompt = Model(), [1, 2, 3]
    for temperature in (0.0, 1.0):
        plain = generate_plain(model, prompt, count, Sampler(temperature))
        for shape in (TreeShape(1, 12), TreeShape(4, 12), TreeShape(6, 24)):
            drafted = generate_subspec(model, prompt, count, Sampler(temperature), shape)
            setting = f"temperature {temperature}, tree {shape.width}x{shape.depth}"
            same = drafted.tokens == plain.tokens
            print(f"{setting}: tau {drafted.tau:.2f}, same tokens as plain decoding: {same}")


if __name__ == "__main__":
    demo()
