"""Every weight is aligned, and no two overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ConfigError
from vllm_subspec.stream import SpillLayout, TensorSpec


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(1, 40), max_size=3),
                st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
            ),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_layout_is_aligned_and_nothing_overlaps(layers: list) -> None:
    specs = [
        [TensorSpec(f"w{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(layer)]
        for layer in layers
    ]
    layout = SpillLayout.of(specs)
    end_of_layer = 0
    for layer, wanted in zip(layout.layers, specs, strict=True):
        assert layer.offset == end_of_layer
        assert layer.offset % 4096 == layer.nbytes % 4096 == 0
        end = 0
        for spec, start in layer.tensors:
            assert start % 64 == 0
            assert 0 <= start - end < 64
            end = start + spec.nbytes
        assert 0 <= layer.nbytes - end < 4096
        assert [spec for spec, _ in layer.tensors] == wanted
        end_of_layer += layer.nbytes
    assert layout.total_bytes == end_of_layer
    assert layout.slot_bytes == max(layer.nbytes for layer in layout.layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        ([[]], "layer 0 has no bytes"),
        ([[TensorSpec("w", (0,), torch.float32)]], "layer 0 has no bytes"),
        ([[TensorSpec("w", (1,), torch.float32)] * 2], "names a weight twice"),
    ],
)
def test_layout_refuses(layers: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpillLayout.of(layers)
