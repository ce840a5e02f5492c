"""Which layers stay and which are streamed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import BudgetError
from vllm_subspec.plan import Placement, place


@settings(deadline=None, max_examples=100)
@given(layers=st.integers(1, 80), data=st.data(), slots=st.integers(1, 100))
def test_the_last_layers_stay(layers: int, data: st.DataObject, slots: int) -> None:
    resident = data.draw(st.integers(0, layers - 1))
    placement = place(layers, resident, slots)
    assert [placement.is_streamed(layer) for layer in range(layers)] == [True] * (
        layers - resident
    ) + [False] * resident
    assert placement.streamed == tuple(range(layers - resident))
    assert 1 <= placement.num_slots <= len(placement.streamed)
    assert placement.num_slots == min(slots, layers - resident)


@pytest.mark.parametrize(("layers", "resident"), [(4, 4), (4, 5), (1, 1), (1, 7)])
def test_a_layer_must_be_left_to_stream(layers: int, resident: int) -> None:
    with pytest.raises(BudgetError) as refused:
        place(layers, resident, 3)
    message = str(refused.value)
    assert f"resident_layers={resident}" in message
    assert f"{layers} layers" in message
    assert f"choose at most {layers - 1}" in message


def test_a_placement_is_a_value() -> None:
    assert place(4, 1, 2) == Placement(4, (0, 1, 2), 2)
    assert hash(place(4, 1, 2)) == hash(place(4, 1, 2))
