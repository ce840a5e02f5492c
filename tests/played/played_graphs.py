"""A device that records operations as CUDA records launches, played on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Every operation on tensors, with the very tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = operation(*args, **kwargs or {})
        self.operations.append((operation, args, kwargs or {}, out))
        return out


def storages(values: Any) -> set[int]:
    return {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor)
    }


class PlayedGraph:
    """Operations on the tensors they were captured with, whatever Python would do by now."""

    def __init__(self, device: PlayedGraphs, operations: list[tuple[Any, Any, Any, Any]]) -> None:
        self._device = device
        self._operations = operations
        self._pool: list[torch.Tensor] = []  # what the capture allocated
        known: set[int] = set()
        for _, args, kwargs, out in operations:
            for made in tree_leaves(out):
                if isinstance(made, torch.Tensor) and not storages([made]) <= (
                    storages([args, kwargs]) | known
                ):
                    self._pool.append(made)
                    known |= storages([made])
        self.spoil()

    def spoil(self) -> None:
        """Another graph used the shared memory."""
        for made in self._pool:
            made.fill_(math.nan if made.is_floating_point() else 77)

    def replay(self) -> None:
        assert self._device.in_stream, "a replay must go to compute's stream"
        with self._device.unwatched():
            for operation, args, kwargs, out in self._operations:
                found = tree_leaves(operation(*args, **kwargs))
                for made, new in zip(tree_leaves(out), found, strict=True):
                    if isinstance(made, torch.Tensor) and not storages([made]) & storages(
                        [args, kwargs]
                    ):
                        made.copy_(new)
            self.spoil()


class PlayedGraphs:
    """A ``GraphDevice`` on a CPU."""

    def __init__(self) -> None:
        self.in_stream = False
        self.captures = 0
        self.watched: Recorder | None = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.in_stream = True
        yield
        self.in_stream = False

    def capture(self, work: Callable[[], None]) -> PlayedGraph:
        """Runs ``work`` to see its operations; what it leaves in its outputs is spoilt."""
        self.captures += 1
        with Recorder() as recorder:
            work()
        graph = PlayedGraph(self, recorder.operations)
        for operation, args, _, _ in recorder.operations:
            if operation is torch.ops.aten.copy_.default:
                args[0].fill_(77)
        return graph

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A replay is no operation of the host's."""
        before = len(self.watched.operations) if self.watched else 0
        yield
        if self.watched:
            del self.watched.operations[before:]

    @contextmanager
    def watching(self) -> Iterator[list[tuple[Any, Any, Any, Any]]]:
        with Recorder() as self.watched:
            yield self.watched.operations
        self.watched = None
