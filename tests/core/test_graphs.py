"""Draft steps by graph, on a device that records operations as CUDA records launches."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from played_graphs import PlayedGraphs
from subspec_kernels.grow_mask import grow_mask, unpack_mask
from subspec_kernels.sharpened_topk import sharpened_topk

from vllm_subspec.draft.graphs import CudaGraphs, StepGraphs, StepShape, Tensors

VOCAB, DIM, WIDTH, DEPTH = 37, 8, 3, 19
NUM_SLOTS = 1 + WIDTH * DEPTH


class Model:
    """A shadow of one attention layer without context, keys and values in a scratch of its own."""

    def __init__(self, requests: int) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        self.table = torch.randn(VOCAB, 3, DIM, generator=generator)
        self.head = torch.randn(DIM, VOCAB, generator=generator)
        self.scratch = torch.zeros(2, requests, NUM_SLOTS, DIM)

    def step(self, inputs: Tensors) -> Tensors:
        """Fill the level's slots, attend to what its words show, choose the next level."""
        x = self.table[inputs["tokens"]] * torch.cos(inputs["levels"][..., None, None])
        query, key, value = x.unbind(2)
        self.scratch[0].index_copy_(1, inputs["slots"], key)
        self.scratch[1].index_copy_(1, inputs["slots"], value)
        num_slots = inputs["spanned"].shape[0]
        seen = unpack_mask(inputs["words"], num_slots)
        keys, values = self.scratch[:, :, :num_slots]
        scores = (query @ keys.transpose(1, 2)).masked_fill(~seen, -math.inf)
        logits = torch.softmax(scores, -1) @ values @ self.head
        tokens, parents, best = sharpened_topk(logits, inputs["scores"], WIDTH, 0.5)
        return {"tokens": tokens, "parents": parents, "scores": best}


def grow(run: Callable[[StepShape, Tensors], Tensors], roots: list[int]) -> list[Tensors]:
    """Levels of a growth, each with its words padded to its shape."""
    requests = len(roots)
    level = {
        "tokens": torch.tensor(roots)[:, None],
        "parents": torch.zeros(requests, 1, dtype=torch.int64),
        "scores": torch.zeros(requests, 1),
    }
    words = torch.zeros(requests, 1, -(-NUM_SLOTS // 64), dtype=torch.int64)
    levels, filled = [], 0
    for depth in range(DEPTH + 1):
        m = level["tokens"].shape[1]
        words = grow_mask(words, level["parents"], filled)
        shape = StepShape.of(requests, WIDTH, depth, DEPTH)
        inputs = {
            "tokens": level["tokens"],
            "scores": level["scores"],
            "levels": torch.full((requests, m), float(depth)),
            "slots": torch.arange(filled, filled + m),
            "words": words,
            "spanned": torch.zeros(shape.num_slots),
        }
        filled += m
        level = {name: made.clone() for name, made in run(shape, inputs).items()}
        levels.append(level)
    return levels


def capturing(graphs: StepGraphs, captured: set[StepShape]) -> Callable[..., Tensors]:
    def run(shape: StepShape, inputs: Tensors) -> Tensors:
        if shape not in captured:
            captured.add(shape)
            graphs.capture(shape, inputs)
        return graphs.run(shape, inputs)

    return run


def assert_same(found: list[Tensors], expected: list[Tensors]) -> None:
    for level, other in zip(found, expected, strict=True):
        assert level.keys() == other.keys()
        for name in level:
            assert torch.equal(level[name], other[name]), name


def test_replays_grow_what_eager_steps_grow() -> None:
    device, captured = PlayedGraphs(), set[StepShape]()
    eager, model = Model(2), Model(2)
    graphs = StepGraphs(model.step, device)
    for roots in ([3, 8], [8, 30], [5, 5]):
        expected = grow(lambda shape, inputs: eager.step(inputs), roots)
        assert_same(grow(capturing(graphs, captured), roots), expected)
        assert torch.equal(model.scratch, eager.scratch)
    assert device.captures == len(captured) == 4, "the root's, 8, 16 and 19 levels"
    assert (graphs.replayed_steps, graphs.eager_steps) == (3 * (DEPTH + 1), 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_replays_what_eager_steps_grow() -> None:
    captured = set[StepShape]()
    with torch.device("cuda"):
        eager, model = Model(2), Model(2)
        graphs = StepGraphs(model.step, CudaGraphs(torch.cuda.current_stream()))
        for roots in ([3, 8], [8, 30], [5, 5]):
            expected = grow(lambda shape, inputs: eager.step(inputs), roots)
            assert_same(grow(capturing(graphs, captured), roots), expected)
    assert graphs.replayed_steps == 3 * (DEPTH + 1)


def test_shapes_outside_the_captured_run_eagerly_and_are_counted() -> None:
    device, model, eager = PlayedGraphs(), Model(2), Model(2)
    graphs = StepGraphs(model.step, device)
    deepest = StepShape.of(2, WIDTH, DEPTH, DEPTH)

    def run(shape: StepShape, inputs: Tensors) -> Tensors:
        if shape == deepest and not device.captures:
            graphs.capture(shape, inputs)
        return graphs.run(shape, inputs)

    expected = grow(lambda shape, inputs: eager.step(inputs), [1, 2])
    assert_same(grow(run, [1, 2]), expected)
    assert (graphs.replayed_steps, graphs.eager_steps) == (DEPTH - 16, 17)
    others = StepGraphs(Model(1).step, device)
    alone = Model(1)
    expected = grow(lambda shape, inputs: alone.step(inputs), [1])
    assert_same(grow(others.run, [1]), expected)
    assert (others.replayed_steps, others.eager_steps) == (0, DEPTH + 1)


def doubling(inputs: Tensors) -> Tensors:
    return {"sum": inputs["a"] + inputs["b"], "double": (inputs["a"] * 2).expand(2, 3)}


SHAPE = StepShape(1, 3, 4)


def given(a: float, b: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((1, 3), a), "b": torch.full((1, 3), b)}


def test_a_replay_allocates_nothing() -> None:
    device = PlayedGraphs()
    graphs = StepGraphs(doubling, device)
    graphs.capture(SHAPE, given(1, 2))
    first = graphs.run(SHAPE, given(3, 4))
    where = {name: made.data_ptr() for name, made in first.items()}
    for a in range(3):
        inputs = given(a, 10)
        with device.watching() as operations:
            outputs = graphs.run(SHAPE, inputs)
        assert [operation for operation, *_ in operations] == [torch.ops.aten.copy_.default] * 2
        assert {name: made.data_ptr() for name, made in outputs.items()} == where
        assert torch.equal(outputs["sum"], torch.full((1, 3), a + 10.0))
        assert torch.equal(outputs["double"], torch.full((2, 3), a * 2.0))


def test_a_capture_keeps_no_tensor_of_the_callers() -> None:
    graphs = StepGraphs(doubling, PlayedGraphs())
    inputs = given(1, 2)
    graphs.capture(SHAPE, inputs)
    outputs = graphs.run(SHAPE, given(5, 6))
    assert torch.equal(inputs["a"], torch.ones(1, 3)), "the caller's own is written"
    inputs["a"].fill_(99)
    assert torch.equal(outputs["sum"], torch.full((1, 3), 11.0))


def test_one_shape_leaves_another_shapes_outputs() -> None:
    """Graphs share memory, so what a graph made lies elsewhere when another one runs."""
    graphs = StepGraphs(doubling, PlayedGraphs())
    other = StepShape(2, 3, 4)
    graphs.capture(SHAPE, given(1, 2))
    graphs.capture(other, given(1, 2))
    outputs = graphs.run(SHAPE, given(1, 1))
    graphs.run(other, given(50, 50))
    assert torch.equal(outputs["sum"], torch.full((1, 3), 2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.zeros(1, 1)}, r"input a is torch.float32 \[1, 1\]"),  # copy_ would spread it
        ({"b": torch.zeros(1, 3).int()}, r"input b is torch.int32 \[1, 3\]"),
        ({"c": torch.zeros(1)}, r"inputs are \['a', 'b', 'c'\]"),
    ],
    ids=["shape", "dtype", "name"],
)
def test_other_inputs_than_at_capture_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    graphs = StepGraphs(doubling, PlayedGraphs())
    graphs.capture(SHAPE, given(1, 2))
    with pytest.raises(ValueError, match=message):
        graphs.run(SHAPE, given(1, 2) | changes)
    assert graphs.replayed_steps == 0


def test_levels_share_shapes() -> None:
    shapes = [StepShape.of(4, 6, level, 48) for level in range(49)]
    assert shapes[0] == StepShape(4, 1, 1)
    assert {shape.num_slots for shape in shapes[1:]} == {1 + 6 * n for n in (8, 16, 32, 48)}
    for level, shape in enumerate(shapes[1:], 1):
        assert (shape.requests, shape.nodes) == (4, 6)
        assert shape.num_slots >= 1 + 6 * level, "the level itself has slots"
    assert StepShape.of(4, 6, 3, 5).num_slots == 1 + 6 * 5, "no more than the scratch holds"
