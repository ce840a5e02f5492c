"""The next level of a draft tree: sharpened log-probabilities and the best candidates."""

from __future__ import annotations

import torch

from subspec_kernels.sharpened_topk import reference
from subspec_kernels.sharpened_topk.reference import MAX_WIDTH, Candidates

__all__ = ["MAX_WIDTH", "Candidates", "sharpened_topk"]


def sharpened_topk(
    logits: torch.Tensor,
    parent_scores: torch.Tensor,
    width: int,
    temperature: float,
    noise: torch.Tensor | None = None,
) -> Candidates:
    """Triton on CUDA, else plain torch; see ``reference.sharpened_topk``."""
    if logits.is_cuda:
        from subspec_kernels.sharpened_topk import triton

        return triton.sharpened_topk(logits, parent_scores, width, temperature, noise)
    return reference.sharpened_topk(logits, parent_scores, width, temperature, noise)
