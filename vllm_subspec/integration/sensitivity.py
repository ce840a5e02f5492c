"""What each layer's shadow alone does to the next token, measured on the loaded model.

Mixed into a worker by vLLM's ``--worker-extension-cls`` (v1/worker/worker_base.py), so a server
that does not calibrate holds none of this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_subspec import envs
from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration.linear import SHADOW_DTYPE, ShadowedLinearMethod
from vllm_subspec.integration.vocabulary import VocabularyMethod
from vllm_subspec.shadow import ShadowCache, ShadowSettings, build_shadows

_IN_LAYER = re.compile(r"(.+?\.\d+)\.(.+)")  # a linear's decoder layer, and its name therein


class SensitivityExtension:
    """RPC of a calibrating worker."""

    model_runner: Any

    @torch.inference_mode()
    def subspec_sensitivity(
        self, sequences: Sequence[tuple[list[int], int]], bits: Sequence[int]
    ) -> list[list[float]]:
        """Divergences of the next-token distribution with one unit low-bit at a time.

        As in drafting, each token goes through the low-bit weights alone: keys and values of the
        tokens before it are the target's.

        Args:
            sequences: (tokens, how many of them are the prompt), written by this model.
            bits: of shadows; this machine has kernels for them.

        Returns:
            For each of ``bits``, the mean of KL(target || draft) in nats over the written tokens:
            by decoder layer, then the head's.

        Raises:
            UnsupportedError: no kernel serves one of the linears, or the model has no head that
                can be found.
        """
        runner = self.model_runner
        config = runner.subspec_config
        settings = [ShadowSettings(b, config.group_size, config.quantizer) for b in bits]
        with ExitStack() as undo:
            probe = _Probe(runner, sequences, undo)
            bar = undo.enter_context(tqdm(total=len(probe.layers) + 1, desc="Sensitivity"))
            units = []
            for unit in range(len(probe.layers) + 1):
                units.append(probe.divergences(unit, settings))
                bar.update()
        return [list(of_bits) for of_bits in zip(*units, strict=True)]


class _Probe:
    """The model, run over all sequences at once in draft view with every shadow taken off.

    ``undo`` gives the model back as it was.
    """

    def __init__(
        self, runner: Any, sequences: Sequence[tuple[list[int], int]], undo: ExitStack
    ) -> None:
        self._runner = runner
        self._model: nn.Module = runner.model
        # Shadows of these weights, not of their fp32 copies, lie in the cache for serving.
        self._served_dtype = runner.vllm_config.model_config.hf_config.dtype
        self._cache = ShadowCache(envs.cache_dir() / "shadows")
        lengths = [len(tokens) for tokens, _ in sequences]
        self._tokens = torch.tensor([token for tokens, _ in sequences for token in tokens])
        self._positions = torch.cat([torch.arange(length) for length in lengths])
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        self._written = torch.cat(
            [
                torch.arange(start + num_prompt - 1, start + len(tokens))
                for start, (tokens, num_prompt) in zip(starts, sequences, strict=True)
            ]
        )
        self.layers = self._take_shadows_off(undo)
        self._attend_to_target(lengths, undo)
        self._head = runner.offloader.vocabulary.head
        if self._head is None:
            raise UnsupportedError(
                f"{type(self._model).__name__} has no language model head of its own: its "
                "sensitivity cannot be measured, and plans are made with another model's"
            )
        self._outputs: list[Any] = []
        with ExitStack() as hooks:
            for name, _ in self.layers:
                layer = self._model.get_submodule(name)
                hook = layer.register_forward_hook(
                    lambda _, args, output: self._outputs.append(_copy(output))
                )
                hooks.callback(hook.remove)
            self._hidden = self._run()
        self._target = self._logprobs(self._hidden)

    def _take_shadows_off(self, undo: ExitStack) -> list[tuple[str, dict[str, nn.Module]]]:
        """Decoder layers by name, with their shadowed linears by name, in order."""
        layers: dict[str, dict[str, nn.Module]] = {}
        for name, module in self._model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, ShadowedLinearMethod | VocabularyMethod):
                undo.callback(setattr, method, "shadow", method.shadow)
                method.shadow = None
            if isinstance(method, ShadowedLinearMethod):
                found = _IN_LAYER.fullmatch(name)
                assert found is not None, name
                layers.setdefault(found[1], {})[found[2]] = module
        return list(layers.items())

    def _attend_to_target(self, lengths: Sequence[int], undo: ExitStack) -> None:
        """Let attention layers remember what the first run's keys and values are."""
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        ago = self._positions[:, None] - self._positions
        visible = (ids[:, None] == ids) & (ago >= 0)
        for layer in get_layers_from_vllm_config(self._runner.vllm_config, Attention).values():
            window = layer.impl.sliding_window
            seen = visible & (ago < window) if window > 0 else visible
            undo.enter_context(_forwarding(layer, _TargetAttention(layer.impl, seen)))

    def divergences(self, unit: int, settings: Sequence[ShadowSettings]) -> list[float]:
        """Of one unit at each of ``settings``, in nats; the head is the last unit."""
        if unit == len(self.layers):
            return [self._of_head(setting) for setting in settings]
        name, linears = self.layers[unit]
        weights = {n: self._weight(linear) for n, linear in linears.items()}
        found = []
        for setting in settings:
            shadows, _ = build_shadows(weights, setting, SHADOW_DTYPE, self._cache, name)
            for child, shadow in shadows.items():
                linears[child].quant_method.shadow = shadow
            with self._starting_at(unit):
                found.append(self._divergence(self._run()))
        for linear in linears.values():
            linear.quant_method.shadow = None
        return found

    def _of_head(self, settings: ShadowSettings) -> float:
        weights = {"head": self._head.weight.data.to(self._served_dtype)}
        shadows, _ = build_shadows(weights, settings, SHADOW_DTYPE, self._cache, "the head")
        self._head.quant_method.shadow = shadows["head"]
        return self._divergence(self._hidden)

    def _weight(self, linear: nn.Module) -> torch.Tensor:
        """The weight [out, in], exactly: vLLM may have repacked it and dropped the plain one, but
        its products with unit vectors are its columns."""
        units = torch.eye(linear.input_size, dtype=self._runner.vllm_config.model_config.dtype)
        columns = linear.quant_method.inner.apply(linear, units)
        return columns.T.to(self._served_dtype).contiguous()

    @contextmanager
    def _starting_at(self, unit: int) -> Iterator[None]:
        """Let the layers before ``unit`` give the target's output instead of computing it again."""
        with ExitStack() as undo:
            for (name, _), output in zip(self.layers[:unit], self._outputs, strict=False):
                replay = _Replay(output)
                undo.enter_context(_forwarding(self._model.get_submodule(name), replay))
            yield

    def _run(self) -> torch.Tensor:
        """Hidden states [tokens, hidden] in draft view."""
        context = set_forward_context({}, self._runner.vllm_config, num_tokens=len(self._tokens))
        with self._runner.offloader.view.draft(), context:
            hidden: torch.Tensor = self._model(input_ids=self._tokens, positions=self._positions)
        return hidden

    def _logprobs(self, hidden: torch.Tensor) -> torch.Tensor:
        """[written tokens, vocabulary] fp32."""
        with self._runner.offloader.view.draft():
            logits = self._model.compute_logits(hidden[self._written])
        return logits.float().log_softmax(dim=-1)

    def _divergence(self, hidden: torch.Tensor) -> float:
        draft = self._logprobs(hidden)
        kl = F.kl_div(draft, self._target, log_target=True, reduction="batchmean")
        return max(float(kl), 0.0)  # rounding may leave a hair less; NaN stays NaN


class _TargetAttention:
    """Attention of all tokens at once; from the second call on, each sees its own key and value
    beside those that the first call had for the tokens before it.

    Args:
        impl: of vLLM's layer.
        visible: bool [tokens, tokens], true where a query (row) may look.
    """

    def __init__(self, impl: Any, visible: torch.Tensor) -> None:
        self._impl = impl
        self._visible = visible
        self._target: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        impl = self._impl
        q, k, v = (
            rows.view(len(rows), -1, impl.head_size).transpose(0, 1).float()
            for rows in (query, key, value)
        )
        share = impl.num_heads // impl.num_kv_heads
        k, v = k.repeat_interleave(share, dim=0), v.repeat_interleave(share, dim=0)
        if self._target is None:
            self._target = k, v
        keys, values = self._target
        scores = q @ keys.mT
        scores.diagonal(dim1=1, dim2=2).copy_((q * k).sum(dim=-1))
        scores *= impl.scale
        if impl.logits_soft_cap:
            scores = impl.logits_soft_cap * torch.tanh(scores / impl.logits_soft_cap)
        shares = scores.masked_fill_(~self._visible, -torch.inf).softmax(dim=-1)
        own = shares.diagonal(dim1=1, dim2=2)[..., None]
        out = shares @ values + own * (v - values)
        return out.transpose(0, 1).reshape(query.shape).to(query.dtype)


class _Replay:
    """A decoder layer that gives what it gave before; later layers work in place on it."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _copy(self._output)


@contextmanager
def _forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.forward
    module.forward = forward
    try:
        yield
    finally:
        module.forward = before


def _copy(output: Any) -> Any:
    """A decoder layer's output, a tensor or a tuple of them, out of reach of in-place work."""
    return tuple(_copy(part) for part in output) if isinstance(output, tuple) else output.clone()
