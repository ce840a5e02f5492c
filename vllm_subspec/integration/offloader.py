"""Shadows and streaming as a vLLM offloader (design D5): weights leave RAM as they load."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.offloader import BaseOffloader

from vllm_subspec import envs
from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import UnsupportedError
from vllm_subspec.integration.device import Device
from vllm_subspec.integration.linear import (
    SHADOW_DTYPE,
    ShadowedLinearMethod,
    View,
    plain_linears,
)
from vllm_subspec.integration.placing import head_shape, place_on_ranks
from vllm_subspec.integration.tier import SlowTier
from vllm_subspec.integration.vocabulary import Vocabulary
from vllm_subspec.memory import release_freed_memory
from vllm_subspec.plan import Placement
from vllm_subspec.shadow import ShadowCache, ShadowSettings, build_shadows
from vllm_subspec.shadow.formats import check_shape
from vllm_subspec.stream import (
    LayerStreamer,
    RowPiece,
    SpillLayout,
    StreamStatistics,
    TensorSpec,
    split_rows,
)
from vllm_subspec.timeline import Timeline

_NO_LINEARS = (
    "this model has no decoder layers with plain linears to shadow or to stream: run it without "
    "SubSpec"
)


@dataclass
class _Layer:
    """One decoder layer while its weights load."""

    module: nn.Module
    linears: dict[str, LinearBase]
    missing: dict[str, int] = field(default_factory=dict)  # linear -> elements still to load
    done: bool = False


class SubSpecOffloader(BaseOffloader):
    """Takes each decoder layer's weights as they load, shadows them, and streams them back.

    A layer is finished as soon as its last shard arrived: its linears become shadows, its weights
    go to the slow tier and leave the fast one, so loading needs about one layer above the budget
    (vLLM model_executor/offloader/base.py gives the seams). Weights load in host RAM, where
    shadows are made; what stays then goes to the device.

    Raises:
        ShadowCacheError: the cache's directory cannot be made private.
    """

    def __init__(self, config: SubSpecConfig, vllm_config: VllmConfig, device: Device) -> None:
        self.config = config
        self._device = device
        self.view = View()
        self.streamer: LayerStreamer | None = None
        self.timeline = Timeline()
        self._acquired_at = 0.0
        self.while_waiting: Callable[[Callable[[], bool]], bool] | None = None  # see `acquire`
        self.between_draft_layers: Callable[[], None] | None = None
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._layers: list[_Layer] = []
        self._placement: Placement | None = None
        self._tier: SlowTier | None = None  # while the model loads
        self._vllm_config = vllm_config
        self.vocabulary = Vocabulary(self.view, self._finish_vocabulary)
        self._vocabulary_done = False
        self._head_pieces: tuple[RowPiece, ...] = ()
        self._cache = ShadowCache(envs.cache_dir() / "shadows") if config.speculate else None
        self._progress: Any = None
        self._resident_bytes = 0
        self.sizes: dict[str, Any] = {}

    # -- loading ---------------------------------------------------------------------------------

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        """Wrap every linear of the decoder layers.

        Everything that may be wrong with them is found before the slow tier is touched.

        Raises:
            UnsupportedError: quantised linears, no linears, linears that no kernel serves, or more
                than one stack of layers.
            BudgetError: more resident layers than there are.
            SpillError: the spill cannot be created.
        """
        if self._layers and self._speculates_otherwise():
            return list(modules_generator)  # vLLM's own draft model, which fits
        if self._layers:
            raise UnsupportedError(
                "this model has more than one stack of decoder layers (encoder-decoder, or a "
                "multi-modal tower): SubSpec serves decoder-only text models"
            )
        for index, module in enumerate(modules_generator):
            linears_of_layer = plain_linears(module, f"layer {index}")
            for linear in linears_of_layer.values():  # before the next layer takes fast memory
                _move(linear, torch.device("cpu"))
            self._layers.append(_Layer(module, linears_of_layer))
        modules = [layer.module for layer in self._layers]
        if not any(layer.linears for layer in self._layers):
            raise UnsupportedError(_NO_LINEARS)
        linears = [layer.linears for layer in self._layers]
        self._placement = place_on_ranks(
            self.config,
            self._vllm_config,
            modules,
            linears,
            self._device.memory_bytes(self._ranks),
        )
        for index, layer in enumerate(self._layers):
            if self._bits(index) is not None:
                for name, linear in layer.linears.items():
                    settings = self._settings(self._bits(index))
                    check_shape(*linear.weight.shape, settings, f"layer {index}.{name}")
        if self.config.stream != "off":
            self._spill_layout = self._layout()
            self._tier = self._device.open_tier(self.config, self._vllm_config, self._spill_layout)
        for index in range(len(modules)):
            self._wrap_layer(index)
        return modules

    @property
    def placement(self) -> Placement:
        """What was decided; there once the model was built."""
        assert self._placement is not None
        return self._placement

    def _speculates_otherwise(self) -> bool:
        """Whether one of vLLM's own methods drafts over our stream."""
        return not self.config.speculate and self._vllm_config.speculative_config is not None

    def _bits(self, index: int) -> int | None:
        """Of a layer's shadow; ``None`` where it has none."""
        assert self._placement is not None
        return self._placement.bits[index] if self._placement.bits else None

    def _settings(self, bits: int) -> ShadowSettings:
        return ShadowSettings(bits, self.config.group_size, self.config.quantizer)

    @property
    def _streams_head(self) -> bool:
        return self.config.stream != "off" and self.placement.head == "streamed"

    @property
    def _maps_embedding(self) -> bool:
        """Under a budget a disk keeps the table, unless a resident head is the same tensor."""
        tied = getattr(self._vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
        budgeted = self.config.memory_budget is not None and self.config.stream != "off"
        return self._device.maps_tables and budgeted and not (tied and not self._streams_head)

    def _streams(self, index: int) -> bool:
        assert self._placement is not None
        return self.config.stream != "off" and self._placement.is_streamed(index)

    def _wrap_layer(self, index: int) -> None:
        layer = self._layers[index]
        assert self._placement is not None
        if not self._placement.is_streamed(index):
            for linear in layer.linears.values():
                _move(linear, self._device.torch_device)
            self._resident_bytes += sum(linear.weight.nbytes for linear in layer.linears.values())
            if self._bits(index) is None:
                layer.done = True  # the draft uses the target's own weights
                return
        for name, linear in layer.linears.items():
            method = ShadowedLinearMethod(
                linear.quant_method,
                self.view,
                self._streams(index),
                finish=partial(self._finish_layer, index),
            )
            linear.quant_method = method
            weight = linear.weight
            layer.missing[name] = weight.numel() * self._ranks
            weight.weight_loader = self._counting(index, name, weight.weight_loader)
        if self._streams(index):
            layer.module.register_forward_pre_hook(lambda *_: self._acquire(index))
            layer.module.register_forward_hook(lambda *_: self._release(index))

    def _counting(self, index: int, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        """The parameter's own loader, which also notices when its layer is complete.

        Under tensor parallelism a loader gets unsharded weights, so the count is of those. Where
        that is not exact (replicated KV heads) or no loader runs (dummy weights), the layer is
        finished by `ShadowedLinearMethod.process_weights_after_loading`.
        """

        def load_and_count(param: Any, loaded_weight: torch.Tensor, *args: Any, **kw: Any) -> Any:
            result = load(param, loaded_weight, *args, **kw)
            layer = self._layers[index]
            layer.missing[name] -= loaded_weight.numel()
            if all(left == 0 for left in layer.missing.values()):
                self._finish_layer(index)
            return result

        return load_and_count

    def _finish_layer(self, index: int) -> None:
        layer = self._layers[index]
        if layer.done:
            return
        layer.done = True
        weights = {name: linear.weight.data for name, linear in layer.linears.items()}
        if (bits := self._bits(index)) is not None:
            shadows, cached = build_shadows(
                weights, self._settings(bits), SHADOW_DTYPE, self._cache, f"layer {index}"
            )
            for name, shadow in shadows.items():
                on_device = shadow.to(self._device.torch_device)
                layer.linears[name].quant_method.shadow = on_device
            self._advance_progress(cached)
        if self._tier is not None and self._streams(index):
            self._tier.put(index, weights)
            for linear in layer.linears.values():
                linear.weight.data = linear.weight.data.new_empty(0)
            weights.clear()
            release_freed_memory()
        else:
            for linear in layer.linears.values():
                linear.weight.data = linear.weight.data.to(self._device.torch_device)

    def _finish_vocabulary(self) -> None:
        """Table and head are loaded: shadow the head, and bring what streams or is mapped away."""
        if self._vocabulary_done or self._placement is None:
            return
        self._vocabulary_done = True
        vocabulary = self.vocabulary
        if vocabulary.head is not None and self._placement.head_bits is not None:
            weight = vocabulary.head.weight.data.cpu()
            settings = self._settings(self._placement.head_bits)
            shadows, _ = build_shadows(
                {"head": weight}, settings, SHADOW_DTYPE, self._cache, "the head"
            )
            shadow = shadows["head"].to(self._device.torch_device)
            vocabulary.head.quant_method.shadow = shadow
        if self.config.memory_budget is not None:
            for module in (vocabulary.embedding, vocabulary.head):
                if module is not None:
                    module.quant_method.keeps_plain = True
        if self._tier is None:
            return
        if self._streams_head:
            self._put_head(vocabulary)
        if self._maps_embedding:
            assert vocabulary.embedding is not None
            self._tier.put_mapped("embedding", vocabulary.embedding.weight.data)
            vocabulary.embedding.weight.data = vocabulary.embedding.weight.data.new_empty(0)
        release_freed_memory()

    def _put_head(self, vocabulary: Vocabulary) -> None:
        assert self._tier is not None
        if vocabulary.head is None:
            raise UnsupportedError("this model has no language model head to stream")
        weight = vocabulary.head.weight.data
        first = len(self.placement.streamed)
        for number, piece in enumerate(self._head_pieces):
            rows = weight[piece.start : piece.stop]
            self._tier.put(first + number, {piece.spec.name: rows})
        vocabulary.head.quant_method.stream = self._head_rows
        if not vocabulary.is_tied:
            vocabulary.head.weight.data = weight.new_empty(0)

    def _head_rows(self) -> Iterator[torch.Tensor]:
        """The head's pieces, streamed; each is given up when the next is asked for."""
        assert self.streamer is not None
        first = len(self.placement.streamed)
        for number, piece in enumerate(self._head_pieces):
            rows = self.streamer.acquire(first + number, self.while_waiting)[piece.spec.name]
            began = time.monotonic()
            yield rows
            self.streamer.release(first + number)
            self.timeline.record("target", began, time.monotonic())

    def _advance_progress(self, cached: bool) -> None:
        assert self._placement is not None
        if self._progress is None:
            shadowed = sum(bits is not None for bits in self._placement.bits)
            self._progress = tqdm(total=shadowed, desc="Shadow layers")
        self._progress.set_postfix_str("from cache" if cached else "quantised")
        self._progress.update()

    # -- the slow tier ---------------------------------------------------------------------------

    def _layout(self) -> SpillLayout:
        layers = [
            [
                TensorSpec(name, tuple(linear.weight.shape), linear.weight.dtype)
                for name, linear in self._layers[index].linears.items()
            ]
            for index in self.placement.streamed
        ]
        shape = head_shape(self._vllm_config)
        if self._streams_head:
            largest = SpillLayout.of(layers).slot_bytes
            self._head_pieces = split_rows(TensorSpec("head", shape, self._dtype), largest)
        mapped = [TensorSpec("embedding", shape, self._dtype)] if self._maps_embedding else []
        return SpillLayout.of([*layers, *([p.spec] for p in self._head_pieces)], mapped)

    def post_init(self) -> None:
        """Every weight is loaded: finish layers without linears, then start the stream.

        Raises:
            UnsupportedError: the model never showed its layers.
            SpillError: the disk fails.
        """
        if not self._layers:
            raise UnsupportedError(_NO_LINEARS)
        for index in range(len(self._layers)):
            self._finish_layer(index)
        self._finish_vocabulary()
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._tier is not None:
            assert self._placement is not None
            tier, self._tier = self._tier, None
            store = tier.finish()
            self._slow_tier = tier.name
            if self._maps_embedding:
                assert self.vocabulary.embedding is not None
                self.vocabulary.embedding.weight.data = tier.mapped("embedding")
                self.vocabulary.embedding.quant_method.is_mapped = True
            self.streamer = LayerStreamer(
                store, self._spill_layout, self._placement.num_slots, timeline=self.timeline
            )
            self.streamer.start()
        self.sizes = self._sizes()

    def _sizes(self) -> dict[str, Any]:
        """What of the decoder layers is where, as ``Statistics`` has it; it never changes."""
        streamed = len(self.placement.streamed) if self.streamer is not None else 0
        bits = Counter(str(bits) for bits in self.placement.bits if bits is not None)
        slots = self.placement.num_slots if self.streamer is not None else 0
        return {
            "resident_layers": self.placement.num_layers - streamed,
            "streamed_layers": streamed,
            "layers_by_bits": dict(bits),
            "resident_bytes": self._resident_bytes,
            "shadow_bytes": self.shadow_bytes,
            "slot_bytes": slots * self._spill_layout.slot_bytes if slots else 0,
        }

    @property
    def shadow_bytes(self) -> int:
        """Bytes of all shadows."""
        modules = [linear for layer in self._layers for linear in layer.linears.values()]
        modules += [self.vocabulary.head] if self.vocabulary.head is not None else []
        shadows = [getattr(module.quant_method, "shadow", None) for module in modules]
        return sum(shadow.nbytes for shadow in shadows if shadow is not None)

    def placement_line(self) -> str:
        """What stays and what streams, for the log."""
        assert self._placement is not None
        placement = self._placement
        if self.streamer is None:
            return f"{placement.num_layers} layers on the fast tier"
        return (
            f"streams {len(placement.streamed)} of {placement.num_layers} layers from "
            f"{self._slow_tier} ({self.streamed_bytes_per_pass / 1e6:.0f} MB a pass) into "
            f"{placement.num_slots} slots"
        )

    # -- running ---------------------------------------------------------------------------------

    def _acquire(self, index: int) -> None:
        if self.view.drafting:
            if self.between_draft_layers is not None:
                self.between_draft_layers()
            return
        assert self.streamer is not None
        weights = self.streamer.acquire(index, self.while_waiting)
        for name, linear in self._layers[index].linears.items():
            linear.quant_method.weight = weights[name]
        self._acquired_at = time.monotonic()

    def _release(self, index: int) -> None:
        if self.view.drafting:
            return
        assert self.streamer is not None
        for linear in self._layers[index].linears.values():
            linear.quant_method.weight = None
        self.streamer.release(index)
        self.timeline.record("target", self._acquired_at, time.monotonic())

    def statistics(self) -> StreamStatistics | None:
        """What the stream moved so far; ``None`` where nothing is streamed."""
        return self.streamer.statistics() if self.streamer is not None else None

    @property
    def streamed_bytes_per_pass(self) -> int:
        """Bytes that one target pass reads from the slow tier."""
        return self._spill_layout.streamed_bytes if self.streamer is not None else 0

    def waited_s(self) -> float:
        """Seconds that passes have waited for weights since start, and did nothing else."""
        return 0.0 if self.streamer is None else self.streamer.statistics().wait_s

    def close(self) -> None:
        """Stop reading and free the slots; a spill that is not finished is removed. Idempotent."""
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        if self.streamer is not None:
            if self._maps_embedding:  # the mapping keeps the spill's file and lock
                assert self.vocabulary.embedding is not None
                self.vocabulary.embedding.weight.data = torch.empty(0, dtype=self._dtype)
            self.streamer.close()
            self.streamer = None


def _move(linear: LinearBase, device: torch.device) -> None:
    """Give a weight that is not loaded yet its memory on ``device``."""
    if linear.weight.device.type != device.type:
        linear.weight.data = torch.empty_like(linear.weight.data, device=device)
