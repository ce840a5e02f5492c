"""Which scratch slots each node of a draft tree's next level attends to, in packed words."""

from __future__ import annotations

import torch

from subspec_kernels.grow_mask import reference
from subspec_kernels.grow_mask.reference import WORD_BITS, pack_mask, unpack_mask

__all__ = ["WORD_BITS", "grow_mask", "pack_mask", "unpack_mask"]


def grow_mask(words: torch.Tensor, parents: torch.Tensor, first_slot: int) -> torch.Tensor:
    """Triton on CUDA, else plain torch; see ``reference.grow_mask``."""
    if words.is_cuda:
        from subspec_kernels.grow_mask import triton

        return triton.grow_mask(words, parents, first_slot)
    return reference.grow_mask(words, parents, first_slot)
