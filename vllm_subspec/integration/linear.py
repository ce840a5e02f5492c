"""One module tree, two views (design D1): a linear that computes as target or as shadow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.shadow import ShadowLinear

SHADOW_DTYPE = torch.bfloat16
"""Activations of shadows by torch's own kernels, which are fast in bf16 only."""


class View:
    """Which view of the module tree computes now; shared by every wrapped linear and hook."""

    def __init__(self) -> None:
        self.drafting = False

    @contextmanager
    def draft(self) -> Iterator[None]:
        """Compute with shadows inside the block; stream hooks stay still."""
        self.drafting = True
        try:
            yield
        finally:
            self.drafting = False

    @contextmanager
    def target(self) -> Iterator[None]:
        """Compute with the target's weights inside the block: a draft stepped aside."""
        self.drafting = False
        try:
            yield
        finally:
            self.drafting = True


class ShadowedLinearMethod(LinearMethodBase):
    """Wraps a plain linear's method: target weights in target view, the shadow in draft view.

    ``weight`` is the streamed weight while its layer is on the fast tier; ``None`` means that the
    wrapped method holds the weight itself (a layer that is not streamed).

    Args:
        inner: the plain linear's own method.
        view: which view computes now.
        streamed: whether the weight comes from the slow tier.
        finish: takes the loaded weights of the linear's layer, unless that was done.
    """

    def __init__(
        self, inner: LinearMethodBase, view: View, streamed: bool, finish: Callable[[], None]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.view = view
        self.streamed = streamed
        self.finish = finish
        self.weight: torch.Tensor | None = None
        self.shadow: ShadowLinear | None = None

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.inner.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Finish the layer, then repack a weight that stays, which may remove the plain one.

        A streamed weight lies in its spill as it is.
        """
        self.finish()
        if not self.streamed:
            self.inner.process_weights_after_loading(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.view.drafting and self.shadow is not None:
            return self.shadow(x, bias)
        if self.streamed:
            if self.weight is None:
                raise RuntimeError("a streamed linear was called while its layer is not acquired")
            return F.linear(x, self.weight, bias)
        return self.inner.apply(layer, x, bias)


def plain_linears(layer: torch.nn.Module, name: str) -> dict[str, LinearBase]:
    """The layer's linears by relative name.

    Raises:
        UnsupportedError: one of them is quantised, or the layer holds weights that are no linears.
    """
    linears = {
        child: module for child, module in layer.named_modules() if isinstance(module, LinearBase)
    }
    for child, module in linears.items():
        if type(module.quant_method) is not UnquantizedLinearMethod:
            raise UnsupportedError(
                f"{name}.{child} is quantised ({type(module.quant_method).__name__}): SubSpec "
                f"makes its own low-bit shadow of an unquantised target. Serve the BF16, FP16 or "
                f"FP32 checkpoint, or turn SubSpec off."
            )
    inside = {id(p) for module in linears.values() for p in module.parameters()}
    for parameter_name, parameter in layer.named_parameters():
        if id(parameter) not in inside and parameter.dim() > 1:
            raise UnsupportedError(
                f"{name}.{parameter_name} {tuple(parameter.shape)} is no plain linear (mixture of "
                f"experts and the like): SubSpec streams and shadows plain linears only."
            )
    return linears
