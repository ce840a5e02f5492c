"""CUDA graphs of draft steps: captured once a shape, then replayed, without allocation.

A step of a small shadow is mostly launches, and a graph makes them one. What a step is given lies
in the same buffers at each replay, and so does what it returns; whatever else it touches (weights,
vLLM's blocks, the draft's scratch) must stay where it was at capture.

Inputs are all that differs between two steps of a shape, padded to it: tokens, positions, levels,
mask words, the scratch slots to write, block tables and context lengths
(``static_scratch.StaticScratch`` makes most of them). Capture before the first request, never
within a target's pass: a pause between two layers would let the target's launches into it. A
replay is one launch, and does not pause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Step = Callable[[Tensors], Tensors]
"""A draft step on a device: launches only, no look at data from the host. Run twice with the same
inputs it leaves the same behind."""

_LEAST_BOUND = 8


@dataclass(frozen=True)
class StepShape:
    """What fixes the shapes within a draft step.

    Attributes:
        requests: in the batch.
        nodes: of a request in the level.
        num_slots: scratch slots that masks span; the step may fill fewer, and bits of the others
            are 0.
    """

    requests: int
    nodes: int
    num_slots: int

    @classmethod
    def of(cls, requests: int, width: int, level: int, most_levels: int) -> StepShape:
        """The shape that a level's step is padded to: levels share one up to a power of two.

        Slots that no node sees are not read, so padding costs next to nothing, and a graph per
        level would cost its memory.

        Args:
            requests: in the batch.
            width: nodes of a level, the root's apart.
            level: 0 for the root.
            most_levels: that the scratch holds.
        """
        if level == 0:
            return cls(requests, 1, 1)
        bound = max(_LEAST_BOUND, 1 << (level - 1).bit_length())
        return cls(requests, width, 1 + min(bound, most_levels) * width)


class Graph(Protocol):
    """A device's record of launches."""

    def replay(self) -> None:
        """Issue them again on the current stream; the host does not wait."""


class GraphDevice(Protocol):
    """What graphs need of a device."""

    def stream(self) -> AbstractContextManager[object]:
        """Within it, work is issued to compute's stream."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` issues; nothing of it need run.

        What ``work`` allocates stays the graph's, in memory that all graphs of this device share:
        it is valid within one replay only.
        """


class CudaGraphs:
    """CUDA: captures on a stream of their own, all graphs in one memory pool.

    Args:
        compute_stream: the stream the model runs on. Named, not taken from the calling thread, as
            for ``stream.host.CudaDevice``.
    """

    def __init__(self, compute_stream: torch.cuda.Stream) -> None:
        self._compute = compute_stream
        self._captures = torch.cuda.Stream(compute_stream.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._compute)

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads copy weights meanwhile, and may wait or allocate: no error of this capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._captures, capture_error_mode="thread_local"
        ):
            work()
        return graph


@dataclass(frozen=True)
class _Captured:
    graph: Graph
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class StepGraphs:
    """A draft step, by graph where its shape was captured, else as it is.

    Args:
        step: what to run.
        device: where it runs.

    Attributes:
        replayed_steps: runs by graph.
        eager_steps: runs of shapes that were not captured.
    """

    def __init__(self, step: Step, device: GraphDevice) -> None:
        self._step = step
        self._device = device
        self._captured: dict[StepShape, _Captured] = {}
        self.replayed_steps = 0
        self.eager_steps = 0

    def capture(self, shape: StepShape, inputs: Tensors) -> None:
        """Let ``run`` replay this shape from now on; the step runs, and is recorded.

        Args:
            shape: not captured before.
            inputs: good ones for the step; copied.
        """
        assert shape not in self._captured, shape
        with self._device.stream():
            contiguous = torch.contiguous_format
            kept = {name: given.clone(memory_format=contiguous) for name, given in inputs.items()}
            # The first run compiles and tunes kernels, which no capture could.
            outputs = {name: _buffer_for(made) for name, made in self._step(kept).items()}

        def work() -> None:
            for name, made in self._step(kept).items():
                outputs[name].copy_(made)  # out of the memory that graphs share

        self._captured[shape] = _Captured(self._device.capture(work), kept, outputs)

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, shape: StepShape | None, inputs: Tensors) -> Tensors:
        """One step.

        Args:
            shape: of the step; ``None``: whatever was captured, it would not do.
            inputs: by name; of a captured shape, in the shapes and dtypes of its capture.

        Returns:
            What the step returns, by name. Of a captured shape these are its buffers: the next run
            of that shape overwrites them.

        Raises:
            ValueError: inputs differ from those at capture by name, shape or dtype.
        """
        captured = None if shape is None else self._captured.get(shape)
        with self._device.stream():
            if captured is None:
                self.eager_steps += 1
                return self._step(inputs)
            _check_inputs(captured.inputs, inputs)
            for name, buffer in captured.inputs.items():
                buffer.copy_(inputs[name], non_blocking=True)
            captured.graph.replay()
        self.replayed_steps += 1
        return captured.outputs


def _buffer_for(made: Tensor) -> Tensor:
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _check_inputs(kept: Tensors, given: Tensors) -> None:
    if kept.keys() != given.keys():
        raise ValueError(
            f"inputs are {sorted(given)}; their graph was captured with {sorted(kept)}: give these"
        )
    for name, buffer in kept.items():
        found = given[name]
        if found.shape != buffer.shape or found.dtype != buffer.dtype:
            raise ValueError(
                f"input {name} is {found.dtype} {list(found.shape)}; its graph was captured "
                f"with {buffer.dtype} {list(buffer.shape)}: pad or cast it to that"
            )
