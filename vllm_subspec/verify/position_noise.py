"""One interface to the noise of a request's next positions, whichever sampler draws it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from vllm_subspec.verify.noise import (
    draw_exponentials,
    draw_integers,
    gumbel_noise,
    peek_exponentials,
    peek_integers,
)


class PositionNoise(ABC):
    """What a sampler would draw from a request's generator, position by position.

    The noise is fixed before the target runs: verification chooses by it (design D4) and the
    draft ranks by it (design D10).
    """

    @abstractmethod
    def peek(self, generator: Generator, count: int) -> Tensor:
        """The draws of the next ``count`` positions, [count, ...]; the generator does not move."""

    @abstractmethod
    def advance(self, generator: Generator, count: int) -> None:
        """Move the generator past ``count`` committed tokens."""

    @abstractmethod
    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """The token that each row's draw picks, int64 [n].

        Args:
            logits: float32 [n, vocab], processed; may be changed in place.
            draws: [n, ...], rows of what `peek` gave.
        """

    @abstractmethod
    def gumbel(self, draws: Tensor, token_ids: Tensor) -> Tensor:
        """Gumbel noise of given tokens, float [requests, m, c].

        Args:
            draws: [requests, ...], one position per request.
            token_ids: int64 [requests, m, c].
        """


class HashedNoise(PositionNoise):
    """vLLM's CPU sampler: one integer per token, hashed with each token id.

    Args:
        argmax: logits [n, vocab], seeds [n] -> tokens [n]: the sampler's own operation.
    """

    def __init__(self, argmax: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._argmax = argmax

    def peek(self, generator: Generator, count: int) -> Tensor:
        return peek_integers(generator, count)

    def advance(self, generator: Generator, count: int) -> None:
        draw_integers(generator, count)

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        return self._argmax(logits, draws)

    def gumbel(self, draws: Tensor, token_ids: Tensor) -> Tensor:
        return gumbel_noise(draws[:, None], token_ids)


class ExponentialNoise(PositionNoise):
    """vLLM's native sampler (CUDA, or fp64 noise): one exponential vector per token.

    Args:
        vocab_size: length of a vector.
        dtype: of the noise; float64 where ``use_fp64_gumbel`` is set.
        argmax: probabilities [n, vocab], exponentials [n, vocab] -> tokens [n]: the sampler's
            own operation; both may be changed in place.
    """

    def __init__(
        self, vocab_size: int, dtype: torch.dtype, argmax: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._argmax = argmax

    def peek(self, generator: Generator, count: int) -> Tensor:
        return peek_exponentials(generator, self._vocab_size, count, self._dtype)

    def advance(self, generator: Generator, count: int) -> None:
        draw_exponentials(generator, self._vocab_size, count, self._dtype)

    def choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        return self._argmax(logits.softmax(dim=-1, dtype=torch.float32), draws)

    def gumbel(self, draws: Tensor, token_ids: Tensor) -> Tensor:
        spread = draws[:, None].expand(-1, token_ids.shape[1], -1)
        return -spread.gather(-1, token_ids).log()
