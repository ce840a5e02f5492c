"""The noise of vLLM's samplers, had before the target runs (design D4 and D10).

Both samplers take the argmax of log-probability plus Gumbel noise. What they draw from the
request's generator per token differs: on CPU one integer, which a hash turns into the noise of
every token id; elsewhere (the native sampler) one exponential vector q, Gumbel being -log q.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

_SEED_BOUND = 2**31


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64: torch has no 64-bit unsigned arithmetic."""
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _logical_right_shift(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _splitmix64(values: Tensor) -> Tensor:
    for shift, factor in zip((30, 27), _MIX, strict=True):
        values = (values ^ _logical_right_shift(values, shift)).mul_(factor)
    return values ^ _logical_right_shift(values, 31)


def gumbel_noise(seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise of ``torch.ops._C.fused_gumbel_argmax``, a SplitMix64 hash.

    Args:
        seeds: int64 [...], the integers drawn for the positions.
        token_ids: int64 [..., c], or any shape that broadcasts against ``seeds[..., None]``.

    Returns:
        float64 [..., c].
    """
    stream = _splitmix64(_splitmix64(seeds)[..., None] + (token_ids + 1) * _GAMMA)
    uniform = _logical_right_shift(stream, 11).double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@contextmanager
def rewound(generator: Generator) -> Iterator[None]:
    """Give the generator back its state afterwards: what is drawn inside is only looked at."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


def draw_integers(generator: Generator, count: int) -> Tensor:
    """The next ``count`` integers of vLLM's CPU sampler, int64 [count]; moves the generator.

    Equal to as many single draws on a CPU generator, the only one that this sampler uses.
    """
    assert generator.device.type == "cpu", generator.device
    return torch.randint(0, _SEED_BOUND, (count,), generator=generator, dtype=torch.int64)


def peek_integers(generator: Generator, count: int) -> Tensor:
    """:func:`draw_integers` without moving the generator."""
    with rewound(generator):
        return draw_integers(generator, count)


def draw_exponentials(
    generator: Generator, vocab_size: int, count: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The next ``count`` vectors q of vLLM's native sampler; moves the generator.

    The sampler takes the argmax of ``probs / q``.

    Returns:
        ``dtype`` [count, vocab_size] on the generator's device.
    """
    q = torch.empty(count, vocab_size, dtype=dtype, device=generator.device)
    for row in q:  # one call a token, as there: on CUDA the values depend on the call's size
        row.exponential_(generator=generator)
    return q


def peek_exponentials(
    generator: Generator, vocab_size: int, count: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """:func:`draw_exponentials` without moving the generator."""
    with rewound(generator):
        return draw_exponentials(generator, vocab_size, count, dtype)
