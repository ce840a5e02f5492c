"""Layers of vLLM's own linears, wrapped, loaded, streamed and refused without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)

from vllm_subspec import SubSpecConfig
from vllm_subspec.errors import (
    BudgetError,
    ShadowCacheError,
    SpillError,
    SubSpecError,
    UnsupportedError,
)
from vllm_subspec.integration import offloader as module_of_offloader
from vllm_subspec.integration import placing
from vllm_subspec.integration.device import CpuDevice
from vllm_subspec.integration.linear import ShadowedLinearMethod
from vllm_subspec.integration.offloader import SubSpecOffloader

pytestmark = pytest.mark.engine

MLP = 128


class Layer(nn.Module):
    """A gated MLP of vLLM's linears, one of them with a bias, and a norm that stays."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = MergedColumnParallelLinear(hidden, [MLP, MLP], bias=False, disable_tp=True)
        self.down = ReplicatedLinear(MLP, hidden, bias=True, disable_tp=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x * self.norm)[0].chunk(2, -1)
        return x + self.down(torch.relu(gate) * up)[0]


def layers(count: int = 3, hidden: int = 64) -> list[Layer]:
    return [Layer(hidden) for _ in range(count)]


def checkpoint(count: int = 3, hidden: int = 64, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    return [
        {
            "gate": weight(MLP, hidden),
            "up": weight(MLP, hidden),
            "down": weight(hidden, MLP),
            "bias": weight(hidden),
        }
        for _ in range(count)
    ]


def load(layer: Layer, weights: dict[str, torch.Tensor]) -> None:
    """As a model's ``load_weights`` does: each shard through its parameter's loader."""
    for shard, name in enumerate(("gate", "up")):
        parameter = layer.gate_up.weight
        parameter.weight_loader(parameter, weights[name], shard)
    for parameter, name in ((layer.down.bias, "bias"), (layer.down.weight, "down")):
        parameter.weight_loader(parameter, weights[name])


def process(layer: Layer) -> None:
    """As vLLM does after all weights are loaded."""
    for linear in (layer.gate_up, layer.down):
        linear.quant_method.process_weights_after_loading(linear)


@pytest.fixture(autouse=True)
def _one_rank_with_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path / "cache"))
    # One rank, without the process group that vLLM's workers start.
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(
        "vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1
    )


Make = Callable[..., SubSpecOffloader]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """``make(**options)``: an offloader of 6 rtn bits that spills below ``tmp_path``."""
    made: list[SubSpecOffloader] = []

    def of(ranks: int = 1, **options: Any) -> SubSpecOffloader:
        if options.get("stream") != "off":
            options = {"stream_dir": str(tmp_path / "spill"), **options}
        config = SubSpecConfig(**{"quantizer": "rtn", **options})
        vllm_config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=torch.float32,
                model="a/model",
                revision=None,
                hf_text_config=SimpleNamespace(),
                get_vocab_size=lambda: 256,
                get_hidden_size=lambda: 64,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks, rank=0),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=1 << 50),  # nothing fits
            speculative_config=None,
        )
        made.append(SubSpecOffloader(config, vllm_config, CpuDevice(torch.device("cpu"))))
        return made[-1]

    yield of
    for offloader in made:
        offloader.close()


def run(modules: list[Layer], x: torch.Tensor) -> torch.Tensor:
    for module in modules:
        x = module(x)
    return x


@pytest.fixture
def expected() -> torch.Tensor:
    """What the layers give without any of this."""
    plain = layers()
    for layer, weights in zip(plain, checkpoint(), strict=True):
        load(layer, weights)
        process(layer)
    return run(plain, inputs())


def inputs() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": 1},
        {"resident_layers": 1},
        {"stream": "off"},
        {"stream": "off", "resident_layers": 2},
        {"speculate": False},
        {"bits": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("loads", [True, False], ids=["loaders", "no loaders"])
def test_target_view_computes_what_plain_layers_do(
    options: dict[str, Any], loads: bool, make: Make, expected: torch.Tensor
) -> None:
    offloader, modules = make(**options), layers()
    assert offloader.wrap_modules(iter(modules)) == modules
    for layer, weights in zip(modules, checkpoint(), strict=True):
        if loads:
            load(layer, weights)
        else:  # dummy weights, and loaders that copy into the parameters themselves
            layer.gate_up.weight.data.copy_(torch.cat([weights["gate"], weights["up"]]))
            layer.down.weight.data.copy_(weights["down"])
            layer.down.bias.data.copy_(weights["bias"])
    for layer in modules:
        process(layer)
    offloader.post_init()
    for _ in range(3):
        torch.testing.assert_close(run(modules, inputs()), expected)
    if not options.get("speculate", True):
        return
    with offloader.view.draft():
        drafted = run(modules, inputs())
    assert not torch.equal(drafted, expected)
    error = (drafted - expected).norm() / expected.norm()
    assert error < {6: 0.12, 8: 0.04}[options.get("bits", 6)], "a shadow of other weights"
    torch.testing.assert_close(run(modules, inputs()), expected)


def test_the_draft_moves_nothing(make: Make) -> None:
    offloader, modules = make(), layers()
    offloader.wrap_modules(iter(modules))
    for layer, weights in zip(modules, checkpoint(), strict=True):
        load(layer, weights)
        process(layer)
    offloader.post_init()
    run(modules, inputs())
    statistics = offloader.statistics()
    assert statistics is not None
    with offloader.view.draft():
        for _ in range(10):
            run(modules, inputs())
    run(modules, inputs())
    after = offloader.statistics()
    assert after is not None
    assert after.bytes_read <= statistics.bytes_read + 2 * offloader.streamed_bytes_per_pass


def test_weights_leave_ram_as_they_load(make: Make) -> None:
    offloader, modules = make(), layers()
    offloader.wrap_modules(iter(modules))
    weights = checkpoint()
    for index, layer in enumerate(modules):
        for other in modules[index:]:
            assert other.gate_up.weight.numel() == 2 * MLP * 64
        load(layer, weights[index])
        assert layer.gate_up.weight.numel() == layer.down.weight.numel() == 0
        assert layer.down.bias.numel() == 64


def test_a_gpu_holds_one_streamed_layer_while_the_model_is_built(
    make: Make, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM builds all layers with the GPU as torch's default device, here one without memory."""
    offloader = make(resident_layers=1)
    moves: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        module_of_offloader, "_move", lambda linear, device: moves.append((device.type, linear))
    )
    offloader._device.torch_device = torch.device("cuda")
    built: list[Layer] = []

    def build() -> Iterator[Layer]:
        for index in range(3):
            assert len(moves) == 2 * index, "each layer goes to host RAM before the next is built"
            with torch.device("cpu"):
                built.append(Layer(64))
            yield built[-1]

    with torch.device("meta"):
        offloader.wrap_modules(build())
    of_layer = [(layer.gate_up, layer.down) for layer in built]
    in_host_ram = [("cpu", linear) for linears in of_layer for linear in linears]
    assert moves == [*in_host_ram, *(("cuda", linear) for linear in of_layer[2])]
    offloader._device.torch_device = torch.device("cpu")
    for layer, weights in zip(built, checkpoint(), strict=True):
        load(layer, weights)
        process(layer)
    offloader.post_init()
    torch.testing.assert_close(run(built, inputs()), expected)


def test_under_tensor_parallelism_shards_of_every_rank_count(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's loaders see the whole checkpoint and keep their part of it."""
    first = SimpleNamespace(rank_in_group=0, broadcast_object=lambda placement, src: placement)
    monkeypatch.setattr(placing, "get_tp_group", lambda: first)
    offloader, modules = make(ranks=2), layers(1)
    offloader.wrap_modules(iter(modules))
    load(modules[0], checkpoint(1)[0])
    assert modules[0].down.weight.numel() > 0
    load(modules[0], checkpoint(1)[0])
    assert modules[0].down.weight.numel() == 0


def test_a_layer_keeps_no_weights_once_it_has_run(make: Make) -> None:
    offloader, modules = make(), layers()
    offloader.wrap_modules(iter(modules))
    for layer, weights in zip(modules, checkpoint(), strict=True):
        load(layer, weights)
    offloader.post_init()
    run(modules, inputs())
    assert [layer.down.quant_method.weight for layer in modules] == [None] * 3


def test_a_weight_that_comes_twice_after_all_fails_loudly(make: Make) -> None:
    offloader, modules = make(), layers(1)
    offloader.wrap_modules(iter(modules))
    load(modules[0], checkpoint(1)[0])
    with pytest.raises((RuntimeError, AssertionError)):
        load(modules[0], checkpoint(1)[0])


def test_shadows_come_from_the_cache_the_second_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drafts = []
    for start in range(2):
        offloader, modules = make(), layers()
        offloader.wrap_modules(iter(modules))
        for layer, weights in zip(modules, checkpoint(), strict=True):
            load(layer, weights)
        offloader.post_init()
        with offloader.view.draft():
            drafts.append(run(modules, inputs()))
        offloader.close()
        if start == 0:
            monkeypatch.setattr("vllm_subspec.shadow.build._quantize", None)
    assert torch.equal(*drafts)
    assert len(list((tmp_path / "cache" / "shadows").iterdir())) == 3


# -- refusals --------------------------------------------------------------------------------------


def refused(
    kind: type[SubSpecError], offloader: SubSpecOffloader, modules: list[Any], tmp_path: Path
) -> str:
    with pytest.raises(SubSpecError) as found:
        offloader.wrap_modules(iter(modules))
    assert type(found.value) is kind
    assert not list(tmp_path.glob("spill/*")), "something was written"
    return str(found.value)


def test_a_quantised_linear(make: Make, tmp_path: Path) -> None:
    class FourBits(LinearMethodBase):
        """Any method but the plain one."""

        def create_weights(self, *args: Any, **kwargs: Any) -> None: ...

        def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

    modules = layers()
    modules[1].down.quant_method = FourBits()
    message = refused(UnsupportedError, make(), modules, tmp_path)
    assert "layer 1.down is quantised (FourBits)" in message
    assert "Serve the BF16, FP16 or FP32 checkpoint" in message


def test_weights_that_are_no_linears(make: Make, tmp_path: Path) -> None:
    modules = layers()
    modules[2].experts = nn.Parameter(torch.zeros(4, 8, 8))
    message = refused(UnsupportedError, make(), modules, tmp_path)
    assert "layer 2.experts (4, 8, 8) is no plain linear (mixture of experts" in message


def test_no_linears(make: Make, tmp_path: Path) -> None:
    message = refused(UnsupportedError, make(), [nn.LayerNorm(8), nn.LayerNorm(8)], tmp_path)
    assert "no decoder layers with plain linears" in message


def test_a_model_that_never_shows_its_layers(make: Make) -> None:
    with pytest.raises(UnsupportedError, match="no decoder layers with plain linears"):
        make().post_init()


def test_two_stacks_of_layers(make: Make) -> None:
    offloader = make()
    offloader.wrap_modules(iter(layers()))
    with pytest.raises(UnsupportedError, match="more than one stack of decoder layers"):
        offloader.wrap_modules(iter(layers()))


def test_a_shape_that_no_kernel_serves(make: Make, tmp_path: Path) -> None:
    message = refused(UnsupportedError, make(), layers(hidden=96), tmp_path)
    assert "layer 0.gate_up: no 6-bit kernel serves a weight of shape [256, 96]" in message
    assert "group_size 64; set group_size to 32, or keep this layer resident" in message
    make(group_size=32).wrap_modules(iter(layers(hidden=96)))
    make(speculate=False, stream_dir=str(tmp_path / "other")).wrap_modules(iter(layers(hidden=96)))


def test_resident_layers_need_no_kernel(make: Make) -> None:
    modules = [*layers(2), *layers(1, hidden=96)]
    make(resident_layers=1).wrap_modules(iter(modules))


def test_more_resident_layers_than_layers(make: Make, tmp_path: Path) -> None:
    message = refused(BudgetError, make(resident_layers=3), layers(), tmp_path)
    assert "resident_layers=3" in message
    assert "choose at most 2" in message


@pytest.mark.parametrize("where", ["file", "below a file", "open to all", "no such disk"])
def test_a_directory_that_cannot_hold_the_spill(where: str, make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    directory = {
        "file": tmp_path / "file",
        "below a file": tmp_path / "file" / "spill",
        "open to all": tmp_path / "open",
        "no such disk": Path("/proc/spill"),
    }[where]
    message = refused(SpillError, make(stream_dir=str(directory)), layers(), tmp_path)
    assert str(directory) in message
    assert "set stream_dir" in message
    assert not list((tmp_path / "open").iterdir())


def test_a_cache_that_cannot_be_made(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(ShadowCacheError, match="set SUBSPEC_CACHE"):
        make()
    make(speculate=False)  # which has no shadows to keep


def test_weights_that_are_not_finite_leave_no_spill(make: Make, tmp_path: Path) -> None:
    offloader, modules = make(), layers()
    offloader.wrap_modules(iter(modules))
    weights = checkpoint()
    weights[1]["up"][3, 5] = float("nan")
    load(modules[0], weights[0])
    with pytest.raises(UnsupportedError, match=r"layer 1\.gate_up: its weights are not finite"):
        load(modules[1], weights[1])
    offloader.close()
    assert list((tmp_path / "spill").iterdir()) == []


# -- the linear ------------------------------------------------------------------------------------


def test_the_layer_is_finished_before_its_weight_is_repacked() -> None:
    order: list[str] = []

    class Inner(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            order.append("repacked")

    for streamed in (False, True):
        method = ShadowedLinearMethod(
            Inner(), SimpleNamespace(drafting=False), streamed, lambda: order.append("finished")
        )
        method.process_weights_after_loading(nn.Module())
    assert order == ["finished", "repacked", "finished"]


def test_a_streamed_linear_outside_its_layer_is_a_bug() -> None:
    view: Any = SimpleNamespace(drafting=False)
    method = ShadowedLinearMethod(UnquantizedLinearMethod(), view, True, lambda: None)
    with pytest.raises(RuntimeError, match="not acquired"):
        method.apply(nn.Module(), torch.zeros(1, 4))
