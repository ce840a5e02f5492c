"""Function-preserving widening: the same model with R times the width and R^2 the bytes.

Every hidden unit, attention head and MLP unit is repeated R times, copy after copy, so all
activations of the wide model are those of the original, R times over:

- A linear of shape [out, in] becomes [R * out, R * in]. Its outputs repeat; over the R copies of
  an input, each weight is split into R random parts that sum to it.
- RMSNorm weights repeat, since a mean of squares is the same over R copies.
- Head size and the ratio of query to KV heads stay, so attention of each copy is the original's.
- Tied embeddings stay tied: rows repeat, hence the logits, a dot product over R copies, come out
  R times too large, and the final norm's weight is divided by R. Splitting the rows at random
  instead would need an untied head of its own; neither matrix is ever quantised, so the repeated
  rows cost no realism.
"""

from __future__ import annotations

import zlib

import torch


def widen_linear(weight: torch.Tensor, factor: int, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The weight of a linear between R-fold repeated inputs and R-fold repeated outputs.

    The parts are drawn as if the weight were the sum of R independent Gaussians of variance
    (row mean square) / R, given their sum. So they spread like the weights of a trained layer
    with R times the inputs, low-bit quantisation does about the same relative damage as to the
    original, and no grid that the original's weights lie on is left. The last part takes up the
    rounding of the others.

    Args:
        weight: [out, in], float32.
        factor: R; 1 only converts to ``dtype``.
        dtype: of the result.
        name: seeds the draws, so the result depends on no order of calls.

    Returns:
        [R * out, R * in] of ``dtype``.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    num_rows, num_columns = weight.shape
    scale = (weight.square().mean(dim=1, keepdim=True) / factor).sqrt()
    wide = torch.empty(factor, num_rows, factor, num_columns, dtype=dtype)
    for row_copy in wide:
        rest = weight.clone()
        for index in range(factor - 1):
            num_left = factor - index
            noise = torch.randn(weight.shape, generator=generator).mul_(scale)
            part = noise.mul_(((num_left - 1) / num_left) ** 0.5).add_(rest, alpha=1 / num_left)
            row_copy[:, index] = part
            rest -= row_copy[:, index]
        row_copy[:, -1] = rest
    return wide.view(factor * num_rows, factor * num_columns)


def widen_norm(weight: torch.Tensor, factor: int, dtype: torch.dtype) -> torch.Tensor:
    """[n] float32 -> [R * n] of ``dtype``, repeated."""
    return weight.to(dtype).repeat(factor)


def widen_final_norm(weight: torch.Tensor, factor: int, dtype: torch.dtype) -> torch.Tensor:
    """[n] float32 -> [R * n] of ``dtype``, repeated and divided by R for the tied head."""
    return widen_norm(weight / factor, factor, dtype)


def widen_embedding(weight: torch.Tensor, factor: int, dtype: torch.dtype) -> torch.Tensor:
    """[vocabulary, n] float32 -> [vocabulary, R * n] of ``dtype``, each row repeated."""
    return weight.to(dtype).repeat(1, factor)
