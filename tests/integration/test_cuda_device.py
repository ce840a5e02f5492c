"""A GPU's parts, where there is none: all on vLLM's stream, and a warning nobody overlooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.draft.static_scratch import StaticScratch
from vllm_subspec.errors import UnsupportedError, VersionError
from vllm_subspec.integration import cuda_device
from vllm_subspec.integration.compaction import Compactor
from vllm_subspec.integration.compat import Seam
from vllm_subspec.integration.cuda_device import CudaDevice
from vllm_subspec.integration.device import CpuDevice, device_for
from vllm_subspec.integration.runner import SubSpecGPUModelRunner, SubSpecRunnerMixin
from vllm_subspec.integration.worker import SubSpecGPUWorker
from vllm_subspec.stream import SpillLayout, TensorSpec

pytestmark = pytest.mark.engine

GPU = torch.device("cuda", 0)


class Stream:
    """vLLM's, that compute runs on."""

    num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(cuda_device, "current_stream", lambda: stream)
    return stream


@pytest.fixture
def device(stream: Stream) -> CudaDevice:
    return CudaDevice(GPU)


def test_each_torch_device_has_its_class(stream: Stream) -> None:
    assert type(device_for(torch.device("cpu"))) is CpuDevice
    assert type(device_for(GPU)) is CudaDevice


def test_it_warns_that_it_never_ran(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(cuda_device.logger, "warning", lines.append)
    CudaDevice(GPU)
    assert "NEVER RUN ON A GPU" in lines[0]


def test_seams_of_gpus_are_checked(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "CUDA_SEAMS", (Seam("vllm", "gone", ()),))
    with pytest.raises(VersionError, match=r"vllm\.gone is missing"):
        CudaDevice(GPU)


def test_copies_graphs_and_waits_are_of_the_stream_that_computes(
    device: CudaDevice, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    copies = SimpleNamespace(allocate_host=lambda n: torch.empty(n, dtype=torch.uint8))

    def copy_device(place: torch.device, compute: Stream, pin: bool) -> Any:
        given.append((place, compute, pin))
        return copies

    monkeypatch.setattr(cuda_device, "CudaCopies", copy_device)
    monkeypatch.setattr(cuda_device, "CudaGraphs", lambda compute: given.append(compute))
    monkeypatch.setattr(cuda_device, "should_pin_memory", lambda: True)
    layout = SpillLayout.of([[TensorSpec("w", (4, 4), torch.float32)]])
    tier = device.open_tier(SubSpecConfig(), SimpleNamespace(), layout)
    tier.put(0, {"w": torch.ones(4, 4)})
    tier.close()
    device.graphs()
    assert given == [(GPU, stream, True), stream]
    device.finish()
    assert stream.num_waits == 1


def test_a_gpu_reads_its_tables_and_replays_its_drafts(device: CudaDevice) -> None:
    assert (device.maps_tables, device.captures_drafts) == (False, True)


def test_memory_is_that_of_the_ranks_own_gpu(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (1, 80))
    assert device.memory_bytes(ranks=2) == 80


def test_runner_and_worker_are_vllms_own_with_subspec_before_them() -> None:
    assert issubclass(SubSpecGPUModelRunner, GPUModelRunner)
    assert issubclass(SubSpecGPUWorker, Worker)
    assert SubSpecGPUWorker.runner_class is SubSpecGPUModelRunner
    for name in ("load_model", "_prepare_inputs", "_sample", "_dummy_sampler_run", "shutdown"):
        assert getattr(SubSpecGPUModelRunner, name) is getattr(SubSpecRunnerMixin, name)


def test_vllms_dummy_run_leaves_our_verification_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = object.__new__(SubSpecGPUModelRunner)
    runner.speculative_config = config = object()
    seen: list[Any] = []
    monkeypatch.setattr(
        GPUModelRunner,
        "_dummy_sampler_run",
        lambda self, hidden: seen.append((self.speculative_config, hidden)),
    )
    runner._dummy_sampler_run(torch.ones(1))
    assert seen[0][0] is None
    assert runner.speculative_config is config


def test_a_backend_without_trees_is_refused_by_name() -> None:
    layer: Any = SimpleNamespace(impl=object())
    with pytest.raises(UnsupportedError, match=r"of a\.layer, object.*TRITON_ATTN"):
        Compactor({"a.layer": layer}, {"a.layer": 0})


def test_scratch_is_static(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "torch_device", torch.device("meta"))
    assert isinstance(device.scratch(torch.float16), StaticScratch)
