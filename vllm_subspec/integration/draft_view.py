"""What the target's own modules do in draft view beside their linears: attend to the draft's
scratch, and run vLLM's fused C++ ops where its eager path takes many small ones.

A draft step of a small model is mostly overhead, so each of these counts; values of the draft
never reach the output, so last bits may differ from the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_subspec.integration.linear import View

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_when_drafting(layer: Attention, view: View, attend: Attend) -> None:
    """Let an attention layer call ``attend(query, key, value)`` in draft view.

    Args:
        layer: changed in place.
        view: says which view computes now.
        attend: query [tokens, heads * dim] and so on to [tokens, heads * dim].
    """
    in_target = layer.forward

    def forward(query: torch.Tensor, key: Any, value: Any, *args: Any, **kw: Any) -> torch.Tensor:
        if view.drafting:
            return attend(query, key, value)
        return in_target(query, key, value, *args, **kw)

    layer.forward = forward


def fuse_when_drafting(model: nn.Module, view: View) -> None:
    """Let norms and activations run as one op each in draft view; other classes stay."""
    for module in model.modules():
        if type(module) is RMSNorm and module.pass_weight and not module.variance_size_override:
            fused: Callable[..., Any] = _Norm(module)
        elif type(module) is SiluAndMul:
            fused = _silu_and_mul
        else:
            continue
        module._forward_method = _Either(view, module._forward_method, fused)


class _Either:
    """The target's way or the draft's, by view."""

    def __init__(
        self, view: View, in_target: Callable[..., Any], in_draft: Callable[..., Any]
    ) -> None:
        self._view, self._in_target, self._in_draft = view, in_target, in_draft

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self._in_draft if self._view.drafting else self._in_target
        return chosen(*args, **kwargs)


class _Norm:
    """``RMSNorm`` by vLLM's op (csrc/cpu/layernorm.cpp); ``residual`` is added in place."""

    def __init__(self, module: RMSNorm) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        weight, eps = self._module.weight.data, self._module.variance_epsilon
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, weight, eps)
            return out
        torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
        return x, residual


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out
