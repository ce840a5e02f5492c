"""Shadows fitted to the loaded model's own inputs, layer by layer in one streamed pass.

Mixed into a worker by vLLM's ``--worker-extension-cls``, as ``sensitivity`` is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_subspec import envs
from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration.linear import SHADOW_DTYPE, ShadowedLinearMethod
from vllm_subspec.integration.sensitivity import (
    _IN_LAYER,
    SensitivityExtension,
    _forwarding,
    _TargetAttention,
)
from vllm_subspec.shadow import ShadowCache, ShadowLinear, ShadowSettings
from vllm_subspec.shadow.cache import shadow_key, weight_digest
from vllm_subspec.shadow.compensation import InputGram, compensate_linear


class CalibrationExtension(SensitivityExtension):
    """RPCs of a calibrating worker."""

    @torch.inference_mode()
    def subspec_calibrate(self, sequences: Sequence[Sequence[int]], bits: Sequence[int]) -> int:
        """Make, cache and use compensated shadows (``shadow.compensation``) of all that has one.

        One pass of the target over ``sequences``, streamed as in serving. Beside what serving
        needs, memory holds six fp32 matrices [in, in] of one linear, and one layer's shadows.

        Args:
            sequences: tokens that this model read and wrote.
            bits: to make them with. The shadow in use is replaced where it has one of these.

        Returns:
            How many files of the shadow cache were written or replaced.

        Raises:
            UnsupportedError: the weights are not streamed, there is no native kernel, or an input
                is not finite.
            OSError: the cache cannot be written.
        """
        return _Calibration(self.model_runner, bits).run(sequences)


class _Calibration:
    """Quantises each shadowed linear when it meets its inputs, its weight being in a slot."""

    def __init__(self, runner: Any, bits: Sequence[int]) -> None:
        config = runner.subspec_config
        if runner.offloader.streamer is None:
            raise UnsupportedError(
                "calibration reads weights as they stream, since vLLM repacks those that stay: "
                "start this engine with stream = 'disk'; how you serve afterwards is up to you"
            )
        self._runner = runner
        self._settings = [ShadowSettings(b, config.group_size, config.quantizer) for b in bits]
        self._cache = ShadowCache(envs.cache_dir() / "shadows")
        self._num_files = 0
        self._digests: dict[str, str] = {}  # of the layer at work, by a linear's name therein
        self._made: dict[ShadowSettings, dict[str, ShadowLinear]] = {}

    def run(self, sequences: Sequence[Sequence[int]]) -> int:
        """Calibrate everything; the number of files."""
        runner = self._runner
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        layers = self._shadowed_layers()
        lengths = [len(sequence) for sequence in sequences]
        with ExitStack() as undo:
            for attention in get_layers_from_vllm_config(runner.vllm_config, Attention).values():
                attend = partial(_attend, attention.impl, lengths)
                undo.enter_context(_forwarding(attention, attend))
            progress = undo.enter_context(tqdm(total=len(layers) + 1, desc="Calibrated layers"))
            for name, linears in layers.items():
                self._watch(name, linears, progress, undo)
            undo.enter_context(set_forward_context({}, runner.vllm_config, num_tokens=len(tokens)))
            hidden = runner.model(input_ids=tokens, positions=positions)
            self._calibrate_head(hidden)
            progress.update()
        return self._num_files

    def _shadowed_layers(self) -> dict[str, dict[str, nn.Module]]:
        """Decoder layers by name, with their shadowed linears by name therein."""
        layers: dict[str, dict[str, nn.Module]] = {}
        for name, module in self._runner.model.named_modules():
            if isinstance(getattr(module, "quant_method", None), ShadowedLinearMethod):
                found = _IN_LAYER.fullmatch(name)
                assert found is not None, name
                layers.setdefault(found[1], {})[found[2]] = module
        return layers

    def _watch(
        self, name: str, linears: Mapping[str, nn.Module], progress: Any, undo: ExitStack
    ) -> None:
        for child, linear in linears.items():

            def meet(module: nn.Module, args: tuple[Any, ...], child: str = child) -> None:
                weight = module.quant_method.weight
                self._quantize(f"{name}.{child}", child, weight, args[0])
                if self._digests.keys() == linears.keys():
                    self._keep(linears)
                    progress.update()

            undo.callback(linear.register_forward_pre_hook(meet).remove)

    def _calibrate_head(self, hidden: torch.Tensor) -> None:
        head = self._runner.offloader.vocabulary.head
        if head is None or head.quant_method.shadow is None:
            return
        stream = head.quant_method.stream
        # A piece's slot is refilled when the next piece is asked for.
        pieces = [head.weight.data] if stream is None else [piece.clone() for piece in stream()]
        self._quantize("the head", "head", torch.cat(pieces), hidden)
        self._keep({"head": head})

    def _quantize(self, name: str, child: str, weight: torch.Tensor, x: torch.Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        inputs = InputGram.of(rows.T @ rows, name)
        self._digests[child] = weight_digest(weight)
        for settings in self._settings:
            shadow = compensate_linear(weight, inputs, settings, name)
            self._made.setdefault(settings, {})[child] = shadow

    def _keep(self, modules: Mapping[str, nn.Module]) -> None:
        """Store the finished layer's shadows, and use them where their bits are those in use."""
        for settings, shadows in self._made.items():
            key = shadow_key(self._digests, settings, SHADOW_DTYPE, compensated=True)
            self._cache.store(key, shadows)
            self._num_files += 1
            for child, shadow in shadows.items():
                method = modules[child].quant_method
                if method.shadow is not None and method.shadow.settings == settings:
                    method.shadow = shadow
        self._digests, self._made = {}, {}


def _attend(
    impl: Any,
    lengths: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Causal attention within each sequence, without a KV cache."""
    parts = []
    for q, k, v in zip(*(rows.split(list(lengths)) for rows in (query, key, value)), strict=True):
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        visible = ago >= 0
        if impl.sliding_window > 0:
            visible &= ago < impl.sliding_window
        parts.append(_TargetAttention(impl, visible)(q, k, v))
    return torch.cat(parts)
