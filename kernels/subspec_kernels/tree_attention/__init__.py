"""Attention of tree nodes over their context and their ancestors."""

from subspec_kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
