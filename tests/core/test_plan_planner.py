"""What holds of every plan, whatever the model, the budget and the machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import BudgetError, ConfigError
from vllm_subspec.plan import MachineFigures, ModelShape, Placement, Sensitivity, Unit, place, plan
from vllm_subspec.plan.ledger import scratch_bytes, shadow_bytes

MACHINE = MachineFigures(1.6e9, 1.5e10, 1.88e11, 1e-4, 1e-4)
HIDDEN = 64


def unit(name: str, weights: int) -> Unit:
    return Unit(name, 2 * weights, weights)


def model(layers: list[int], rows: int, tied: bool) -> ModelShape:
    """Layers of so many thousand weights; a head of ``rows``, 0 for none."""
    head = unit("head", rows * HIDDEN) if rows else None
    units = tuple(unit(f"layer {n}", 1000 * size) for n, size in enumerate(layers))
    return ModelShape(units, head, 2 * max(rows, 1) * HIDDEN, tied and bool(rows), 999, 512, HIDDEN)


MODELS = st.builds(
    model,
    st.lists(st.integers(300, 3000), min_size=1, max_size=8),
    st.sampled_from([0, 1000, 50_000]),
    st.booleans(),
)
EVEN = model([2000] * 8, 20_000, False)
W1 = ModelShape(
    tuple(unit(f"layer {n}", 31_850_496) for n in range(30)),
    unit("head", 49152 * 1728),
    2 * 49152 * 1728,
    False,
    210_816,
    69_120,
    1728,
)


def planned(shape: ModelShape, budget: int, kv_bytes: int = 4096, **wishes: Any) -> Placement:
    prior = Sensitivity.prior(len(shape.layers))
    return plan(shape, budget, kv_bytes, MACHINE, prior, **wishes)


def smallest(shape: ModelShape, **wishes: Any) -> int:
    with pytest.raises(BudgetError, match="the smallest that works here is") as refused:
        planned(shape, 0, **wishes)
    return int(str(refused.value).split("works here is ")[1].split()[0])


@settings(deadline=None, max_examples=25)
@given(shape=MODELS, speculate=st.booleans(), bits=st.sampled_from([None, 4, 8]))
def test_the_budget_that_the_error_names_works_and_one_byte_less_does_not(
    shape: ModelShape, speculate: bool, bits: int | None
) -> None:
    least = smallest(shape, speculate=speculate, bits=bits)
    assert planned(shape, least, speculate=speculate, bits=bits).total_bytes == least
    with pytest.raises(BudgetError, match=f"budget of {least - 1} bytes .* is {least} bytes"):
        planned(shape, least - 1, speculate=speculate, bits=bits)


def test_the_error_names_what_eats_the_budget() -> None:
    with pytest.raises(BudgetError, match=r"most of it for KV cache 50000000, shadows \d+, slots"):
        planned(EVEN, 10**6, kv_bytes=50_000_000)


@settings(deadline=None, max_examples=25)
@given(shape=MODELS, shares=st.lists(st.floats(0, 1), min_size=2, max_size=5), post=st.booleans())
def test_more_budget_never_predicts_fewer_tokens(
    shape: ModelShape, shares: list[float], post: bool
) -> None:
    least = smallest(shape, post_speculation=post)
    rates = []
    for share in sorted(shares):
        budget = least + int(share * 2 * shape.total_bytes)
        found = planned(shape, budget, post_speculation=post)
        assert found.total_bytes <= budget
        rates.append(found.prediction.tokens_per_s)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(rates))


@settings(deadline=None, max_examples=25)
@given(shape=MODELS, bits=st.sampled_from([4, 6, 8]), share=st.floats(0, 1))
def test_spread_bits_are_at_least_as_fast_as_uniform_ones(
    shape: ModelShape, bits: int, share: float
) -> None:
    budget = smallest(shape, bits=bits) + int(share * shape.total_bytes)
    uniform = planned(shape, budget, bits=bits)
    assert {b for b in (*uniform.bits, uniform.head_bits) if b is not None} == {bits}
    spread = planned(shape, budget)
    assert spread.prediction.tokens_per_s >= uniform.prediction.tokens_per_s * (1 - 1e-9)


@settings(deadline=None, max_examples=25)
@given(shape=MODELS, share=st.floats(0, 1), speculate=st.booleans())
def test_a_placement_is_consistent(shape: ModelShape, share: float, speculate: bool) -> None:
    budget = smallest(shape, speculate=speculate) + int(share * shape.total_bytes)
    found = planned(shape, budget, speculate=speculate)
    layers = len(shape.layers)
    assert found.streamed == tuple(range(len(found.streamed)))
    assert 1 <= len(found.streamed) <= layers == found.num_layers == len(found.bits)
    for layer, bits in enumerate(found.bits):
        assert (bits is not None) == (speculate and found.is_streamed(layer))
    assert (found.head_bits is not None) == (speculate and found.head == "streamed")
    assert (found.tree is None) == (not speculate)
    ledger = {item.name: item.bytes for item in found.memory}
    assert found.total_bytes == sum(ledger.values()) <= budget
    sizes = [unit.weight_bytes for unit in shape.layers]
    assert ledger["resident layers"] == sum(sizes[len(found.streamed) :])
    assert ledger["slots"] == found.num_slots * max(sizes[: len(found.streamed)])
    assert bool(ledger["shadows"]) == bool(ledger["draft scratch"]) == speculate
    kept = shape.head is not None and found.head == "resident"
    assert ledger["head"] == (shape.head.weight_bytes if shape.head and kept else 0)
    assert (ledger["embedding"] == 0) == (shape.tied and kept)
    streamed = sum(sizes[: len(found.streamed)])
    streamed += shape.head.weight_bytes if shape.head and found.head == "streamed" else 0
    prediction = found.prediction
    assert prediction.streamed_bytes == streamed
    assert prediction.tokens_per_s == pytest.approx(prediction.tau / prediction.cycle_s)
    assert 0 < prediction.link_utilization <= 1 + 1e-9
    assert Placement.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("wishes", "seen"),
    [
        ({"bits": 6}, lambda p: {*p.bits, p.head_bits} - {None} == {6}),
        ({"resident_layers": 0}, lambda p: len(p.streamed) == 8),
        ({"resident_layers": 3}, lambda p: p.streamed == (0, 1, 2, 3, 4)),
        ({"slots": 4}, lambda p: p.num_slots == 4),
        ({"slots": 1}, lambda p: p.num_slots == 1),
        ({"width": 3}, lambda p: p.tree.width == 3),
        ({"depth": 7}, lambda p: p.tree.depth == 7),
        ({"width": 8, "depth": 9, "max_nodes": 17}, lambda p: p.tree == TreeShape(8, 9, 17)),
        ({"width": 2, "depth": 9, "max_nodes": 900}, lambda p: p.tree == TreeShape(2, 9)),
        ({"node_limit": 12}, lambda p: p.tree.node_count <= 12),
        ({"width": 2, "depth": 9, "node_limit": 12}, lambda p: p.tree == TreeShape(2, 9, 12)),
        ({"available_bits": (4, 8)}, lambda p: {*p.bits, p.head_bits} <= {4, 8, None}),
    ],
)
def test_explicit_values_win(wishes: dict[str, Any], seen: Any) -> None:
    least = smallest(EVEN, **wishes)
    for budget in (least, least + EVEN.total_bytes // 4):
        assert seen(planned(EVEN, budget, **wishes))


def test_the_order_of_the_available_bits_does_not_matter() -> None:
    budget = smallest(EVEN) + 10**6
    found = planned(EVEN, budget, available_bits=(8, 6, 4))
    assert found == planned(EVEN, budget, available_bits=(4, 6, 8))


def test_what_is_left_of_a_budget_keeps_layers_resident() -> None:
    found = planned(EVEN, EVEN.total_bytes, speculate=False)
    assert len(found.streamed) <= 2


def test_a_draft_step_reads_shadows_and_all_that_is_resident() -> None:
    found = planned(EVEN, 10**9, bits=4, resident_layers=3, width=1)
    kept = 3 * 4_000_000 + (0 if found.head == "streamed" else 2_560_000)
    shadows = 5 * 1_125_000 + (720_000 if found.head == "streamed" else 0)
    assert found.prediction.draft_step_s == pytest.approx((kept + shadows) / 1.5e10 + 8e-4)


def test_residents_compute_after_the_last_streamed_layer() -> None:
    """Three layers of 2.5 ms stream into one slot; five and the head compute while it fills."""
    machine = dataclasses.replace(MACHINE, draft_bytes_per_s=1e10)
    kv_bytes, prior = 4096, Sensitivity.prior(8)
    found = plan(
        model([2000] * 8, 20_000, True), 10**9, kv_bytes, machine, prior,
        resident_layers=5, slots=1, speculate=False,
    )  # fmt: skip
    compute_s = 34_560_000 / 1e10 + 8e-4
    tail_s = compute_s * (6 * 2_000_000 + 1_280_000) / 17_280_000
    assert found.head == "resident"
    assert found.prediction.target_pass_s == pytest.approx(2 * 2.5e-3 + tail_s)


def test_no_more_nodes_are_verified_than_hide_under_the_stream() -> None:
    found = planned(W1, W1.total_bytes * 8 // 15, post_speculation=False, width=8, depth=48)
    assert found.tree is not None
    slots = {item.name: item.bytes for item in found.memory}["slots"]
    link_s = (found.prediction.streamed_bytes - slots) / 1.6e9
    row_s = 2 * (30 * 31_850_496 + 49152 * 1728) / 1.88e11
    assert 100 < found.tree.node_count == int((link_s - 30 * 1e-4) / row_s) - 1


def test_slots_are_no_more_than_the_units_to_stream() -> None:
    alone = model([2000], 0, False)
    assert planned(alone, 10**9, slots=4).num_slots == 1
    assert planned(EVEN, 10**9, resident_layers=7, slots=50).num_slots <= 2


@pytest.mark.parametrize(
    ("wishes", "kind", "reason"),
    [
        ({"bits": 5}, ConfigError, "bits 5 .* use one of 4, 6, 8"),
        ({"bits": 6, "available_bits": (4, 8)}, ConfigError, "bits 6 .* use one of 4, 8"),
        ({"available_bits": ()}, ConfigError, "choose some of 4, 6, 8"),
        ({"available_bits": (3,)}, ConfigError, "choose some of 4, 6, 8"),
        ({"slots": 0}, ConfigError, "slots 0"),
        ({"width": 0}, ConfigError, "width 0"),
        ({"depth": 500}, ConfigError, "depth 500"),
        ({"max_nodes": 0}, ConfigError, "max_nodes 0"),
        ({"resident_layers": 8}, BudgetError, "resident_layers=8.* 8 layers.*0 to 7"),
        ({"resident_layers": -1}, BudgetError, "resident_layers=-1"),
    ],
)
def test_explicit_values_that_cannot_be(
    wishes: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        planned(EVEN, 10**9, **wishes)


def test_a_sensitivity_of_another_model_or_without_the_bits() -> None:
    with pytest.raises(ConfigError, match="covers 3 layers, the model has 8"):
        plan(EVEN, 10**9, 0, MACHINE, Sensitivity.prior(3))
    partial = Sensitivity({bits: (0.1,) * 9 for bits in (4, 8)})
    with pytest.raises(ConfigError, match="no divergences for 6 bits"):
        plan(EVEN, 10**9, 0, MACHINE, partial)
    assert plan(EVEN, 10**9, 0, MACHINE, partial, available_bits=(4, 8)).tree is not None


def test_bits_go_where_they_save_the_most() -> None:
    fifth = {4: 0.1, 6: 0.0, 8: 0.0}
    kl = {
        bits: (*[0.001 / bits] * 5, fifth[bits], 0.001 / bits, 0.001 / bits, 0.0) for bits in fifth
    }
    one_step = 2_000_000 * 7 // 32  # 4.5 to 6.25 bits
    budget = smallest(EVEN, resident_layers=0) + one_step
    found = plan(EVEN, budget, 4096, MACHINE, Sensitivity(kl), resident_layers=0)
    assert found.bits == (4, 4, 4, 4, 4, 6, 4, 4)


def test_shadows_and_scratch_by_hand() -> None:
    million = unit("m", 1_000_000)
    assert [shadow_bytes(million, bits) for bits in (4, 6, 8)] == [562_500, 781_250, 1_031_250]
    assert shadow_bytes(unit("odd", 3), 4) == 2
    # Six nodes and a root of 512 bytes each; logits of four nodes and the root.
    assert scratch_bytes(EVEN, 6, 4, 1) == 7 * 512 + 5 * 20_000 * 6
    assert scratch_bytes(EVEN, 18, 4, 3) == 21 * 512 + 3 * 5 * 20_000 * 6
    tree = {"width": 2, "depth": 4, "max_nodes": 5}
    for post, sequences, grown in ((False, 1, 8), (True, 1, 16), (True, 2, 16), (True, 3, 24)):
        found = planned(EVEN, 10**9, post_speculation=post, sequences=sequences, **tree)
        assert {item.name: item.bytes for item in found.memory}["draft scratch"] == scratch_bytes(
            EVEN, grown, 5, sequences
        )


def test_a_measured_divergence_that_rises_with_bits_buys_nothing() -> None:
    noisy = Sensitivity({4: (0.001,) * 9, 6: (0.002,) * 9, 8: (0.003,) * 9})
    found = plan(EVEN, 10**9, 4096, MACHINE, noisy, resident_layers=0)
    assert set(found.bits) == {4}


def test_the_reference_workload() -> None:
    """W1: half of a 1.13 B model, on two cores and a disk."""
    budget, kv_bytes = W1.total_bytes * 8 // 15, 1024 * W1.kv_bytes_per_token
    found = planned(W1, budget, kv_bytes)
    uniform = planned(W1, budget, kv_bytes, bits=4)
    plain = planned(W1, budget, kv_bytes, speculate=False)
    assert found.total_bytes <= budget
    assert found.prediction.tokens_per_s > 1.2 * uniform.prediction.tokens_per_s
    assert found.prediction.tokens_per_s > 4.5 * plain.prediction.tokens_per_s
    assert plain.prediction.link_utilization > 0.95


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warp": 1}, "unknown key 'warp'"),
        ({"bits": [4]}, "bits for 1"),
        ({"streamed": [0, 9]}, r"streams \[0, 9\]"),
        ({"tree": {"width": 0, "depth": 1, "max_nodes": None}}, "width 0"),
        ({"prediction": {"tau": 1}}, "Prediction lacks"),
        ({"memory": [3]}, "MemoryItem is 3"),
    ],
)
def test_json_that_is_no_placement(change: dict[str, Any], reason: str) -> None:
    value = planned(EVEN, 10**9).to_json() | change
    with pytest.raises(ConfigError, match=reason):
        Placement.from_json(value)


def test_a_placement_by_count_round_trips_too() -> None:
    assert Placement.from_json(place(4, 1, 2).to_json()) == place(4, 1, 2)


def test_a_draft_apart_has_a_shadow_of_every_unit_and_pays_for_it() -> None:
    budget = smallest(EVEN, bits=4) + 12_000_000
    apart, shared = (planned(EVEN, budget, bits=4, share_layers=share) for share in (False, True))
    assert (apart.bits, apart.head_bits) == ((4,) * 8, 4)
    units = [*EVEN.layers, EVEN.head]
    [shadows] = [item.bytes for item in apart.memory if item.name == "shadows"]
    assert shadows == sum(shadow_bytes(unit, 4) for unit in units if unit is not None)
    assert 0 < 8 - len(apart.streamed) < 8 - len(shared.streamed)
    assert apart.total_bytes <= budget
    assert shared.bits[-1] is None
