"""The benchmark's arithmetic, on counters small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_subspec.tools.bench_figures import decode_run, figures, losses, ratios, spread


def answer(tokens: int, seconds: float, decode: float, steps: int, **counters: Any) -> Any:
    return {
        "prompt": [1, 2],
        "tokens": list(range(tokens)),
        "seconds": seconds,
        "decode_seconds": decode,
        "decode_steps": steps,
        "early_tokens": 0,
        "statistics": counters,
    }


def counters(**changes: Any) -> dict[str, Any]:
    known = {
        "target_passes": 4,
        "drafted_nodes": 40,
        "accepted_by_level": [4, 2],
        "drafted_by_level": [4, 4],
        "decode_steps": 4,
        "target_seconds": 2.0,
        "draft_steps": 16,
        "draft_seconds": 0.8,
        "overlapped_draft_steps": 4,
        "streamed_bytes_per_pass": 100,
        "stream_bytes_read": 400,
        "stream_reads": 8,
        "stream_read_busy_s": 2.0,
        "stream_wait_s": 0.5,
    }
    return known | changes


SUBSPEC = {
    "answers": [
        answer(13, 4.0, 3.0, 4, **counters()),
        answer(9, 4.0, 3.0, 4, **counters(accepted_by_level=[4, 1, 1], drafted_by_level=[4, 4, 2])),
    ],
    "joules": None,
}
PLAIN = {
    "answers": [answer(5, 5.0, 4.0, 4, target_passes=0, **{"stream_bytes_read": 0})],
    "joules": None,
}


def test_counters_add_up_by_item() -> None:
    total = decode_run(SUBSPEC).statistics
    assert total["accepted_by_level"] == [8, 3, 1]
    assert total["drafted_by_level"] == [8, 8, 2]
    assert total["stream_bytes_read"] == 800
    assert total["streamed_bytes_per_pass"] == 100  # a size, not a count


def test_figures_of_speculation() -> None:
    found = figures(SUBSPEC)
    assert found["tokens_per_s"] == 22 / 8
    assert found["decode_tokens_per_s"] == 20 / 6  # each prompt's own pass gave its first token
    assert found["acceptance_length"] == 20 / 8
    assert found["cycle_ms"] == 1e3 * 6 / 8
    assert found["draft_step_ms"] == pytest.approx(50.0)
    assert found["target_pass_ms"] == pytest.approx(500.0)
    assert found["levels_per_pass"] == 18 / 8
    assert found["draft_steps_in_passes"] == 0.2
    assert found["link_bandwidth"] == 200.0
    assert found["link_utilization"] == pytest.approx(4 / 6)
    assert found["bound_share"] == pytest.approx((20 / 6) / (2.5 * 200 / 100))


def test_figures_without_drafts_and_without_stream() -> None:
    assert figures(PLAIN) == {
        "tokens_per_s": 1.0,
        "decode_tokens_per_s": 1.0,
        "acceptance_length": 1.0,
        "cycle_ms": 1000.0,
    }


def test_losses_sum_to_the_whole_time() -> None:
    found = losses(SUBSPEC, slot_bytes=20)
    prefetch = 8 * 20 / 200  # both answers' passes found full slots
    assert found == {
        "link_needed": pytest.approx(4 / 6),
        "link_read_in_vain": pytest.approx(0.0),
        "idle_while_drafting": pytest.approx((1.6 - prefetch) / 6),
        "idle_while_verifying": pytest.approx((4.0 - (4.0 - prefetch)) / 6),
        "idle_in_bookkeeping": pytest.approx((6 - 1.6 - 4.0) / 6),
    }
    assert sum(found.values()) == pytest.approx(1.0)


def test_slots_larger_than_drafting_can_fill_hide_all_of_it() -> None:
    assert losses(SUBSPEC, slot_bytes=10**9)["idle_while_drafting"] == 0.0


def test_no_share_is_negative_where_the_link_reads_on_in_between() -> None:
    busy = counters(target_seconds=1.5, draft_seconds=0.0)
    found = losses({"answers": [answer(13, 4.0, 3.0, 4, **busy)]}, slot_bytes=20)
    assert found["idle_while_verifying"] == 0.0
    assert found["idle_in_bookkeeping"] == pytest.approx((3.0 - 2.0) / 3.0)
    assert sum(found.values()) == pytest.approx(1.0)


def test_energy_is_of_all_new_tokens_and_absent_without_a_counter() -> None:
    assert figures({**PLAIN, "joules": 20.0})["joules_per_token"] == 4.0
    assert "joules_per_token" not in figures(PLAIN)


def test_tokens_that_came_while_others_had_none_are_not_decoding() -> None:
    batch = {"answers": [answer(5, 1.0, 1.0, 4), answer(5, 1.0, 1.0, 0)], "joules": None}
    assert figures(batch)["acceptance_length"] == 2.0  # tokens a pass, over the batch
    batch["answers"][0]["early_tokens"] = 1
    assert figures(batch)["decode_tokens_per_s"] == 3.5


def test_spread_over_repeats() -> None:
    told = spread([{"tau": 3.0, "levels": [1]}, {"tau": 1.0, "levels": [2]}, {"tau": 2.0}])
    assert told["levels"] == [1]
    # Student's t, two degrees of freedom: 4.303 standard errors of 1 / sqrt(3).
    half = told["tau"].pop("ci95")
    assert half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert told["tau"] == {"mean": 2.0, "median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([{"tau": 3.0}])["tau"]["ci95"] is None


def test_ratios_are_of_rounds() -> None:
    fast, slow = (
        [{"tokens_per_s": v, "decode_tokens_per_s": v} for v in values]
        for values in ((4.0, 2.0), (2.0, 1.0))
    )
    found = ratios(fast, slow)["speedup"]
    assert (found["mean"], found["ci95"]) == (2.0, 0.0)  # a slow round was slow for both
