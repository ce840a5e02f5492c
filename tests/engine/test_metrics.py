"""What an operator sees: ``/metrics``, ``stats``, one request's figures, and the line a minute.

All are held against the tokens that the requests got, on one engine.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import vllm_subspec
from vllm_subspec.errors import ConfigError

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SUBSPEC = {"width": 3, "depth": 4, "bits": 8, "stream": "disk", "slots": 2, "resident_layers": 1}


@pytest.fixture(scope="module")
def engine(open_engine: Any, lively_model_dir: Path) -> Iterator[Any]:
    options = {"per_request_spec_decode_metrics": "summary", "max_num_seqs": 4}
    with open_engine(lively_model_dir, SUBSPEC, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def shown(engine: Any) -> Any:
    """``shown()``: samples of ``/metrics``, by name and labels but the engine's."""

    async def get() -> str:
        from fastapi import FastAPI
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router

        app = FastAPI()
        attach_router(app)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get("/metrics")).raise_for_status().text

    def shown() -> dict[tuple[str, str], float]:
        import asyncio

        return {
            (sample.name, _label(sample.labels)): sample.value
            for family in text_string_to_metric_families(asyncio.run(get()))
            for sample in family.samples
            if sample.name.startswith("vllm:") and not sample.name.endswith("_created")
        }

    return shown


def _label(labels: dict[str, str]) -> str:
    others = {name: value for name, value in labels.items() if name not in ("model_name", "engine")}
    return ",".join(f"{name}={value}" for name, value in sorted(others.items()))


@dataclass(frozen=True)
class Served:
    """Outputs of some requests, and what grew meanwhile."""

    outputs: list[Any]
    counted: vllm_subspec.Statistics
    metrics: dict[tuple[str, str], float]

    @property
    def num_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    def metric(self, name: str, label: str = "") -> float:
        return self.metrics[f"vllm:{name}", label]


@pytest.fixture(scope="module")
def requests(prompts: tuple[str, ...]) -> list[Any]:
    """Prompts and parameters: greedy, sampled, and one whose grammar allows chains only."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(choice=["one two three four five six seven"])
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=17, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=grammar),
    ]
    return list(zip(prompts[:4], params, strict=True))


@pytest.fixture(scope="module")
def served(engine: Any, shown: Any, requests: list[Any]) -> Served:
    before, seen = vllm_subspec.stats(engine.llm), shown()
    prompts, params = zip(*requests, strict=True)
    outputs = engine.llm.generate(list(prompts), list(params), use_tqdm=False)
    grown = {name: value - seen.get(name, 0) for name, value in shown().items()}
    return Served(outputs, vllm_subspec.stats(engine.llm) - before, grown)


def test_counters_against_outputs(served: Served) -> None:
    """Each request's first token comes from its prompt's own pass, every other from a pass."""
    counted = served.counted
    assert counted.committed_tokens == served.num_tokens - len(served.outputs)
    assert counted.target_passes + sum(counted.accepted_by_level) == counted.committed_tokens
    assert sum(counted.passes_by_tokens) == counted.target_passes > 0
    assert counted.target_passes - counted.undrafted_passes == counted.drafted_by_level[0]
    assert 1 < counted.tau < 5
    assert counted.engine_steps >= counted.decode_steps > 0
    assert counted.busy_seconds > counted.target_seconds + counted.draft_seconds > 0
    # One decoder layer of four stays; two slots may be ahead.
    assert (counted.resident_layers, counted.streamed_layers) == (1, 3)
    assert counted.layers_by_bits == {"8": 3}
    read = counted.stream_bytes_read / counted.streamed_bytes_per_pass
    assert abs(read - counted.engine_steps) <= 1
    assert counted.resident_bytes == counted.streamed_bytes_per_pass / 3
    assert counted.slot_bytes == 2 * counted.resident_bytes
    assert 0 < counted.shadow_bytes < counted.streamed_bytes_per_pass
    assert counted.worker_memory_bytes > counted.resident_bytes


def test_metrics_against_counters(served: Served) -> None:
    counted, metric = served.counted, served.metric
    assert metric("generation_tokens_total") == served.num_tokens
    assert metric("subspec_passes_total") == counted.target_passes
    assert metric("subspec_committed_tokens_total") == counted.committed_tokens
    assert metric("subspec_drafted_nodes_total") == counted.drafted_nodes
    assert metric("subspec_undrafted_passes_total") == counted.undrafted_passes
    assert metric("subspec_engine_steps_total") == counted.engine_steps
    assert metric("subspec_acceptance_length_count") == counted.target_passes
    assert metric("subspec_acceptance_length_sum") == counted.committed_tokens
    assert metric("subspec_acceptance_length_bucket", "le=1.0") == counted.passes_by_tokens[0]
    for level, accepted in enumerate(counted.accepted_by_level, start=1):
        assert metric("subspec_accepted_nodes_total", f"level={level}") == accepted
    assert metric("subspec_draft_steps_total", "phase=between") == counted.draft_steps
    assert metric("subspec_draft_seconds_total", "phase=between") == pytest.approx(
        counted.draft_seconds
    )
    assert metric("subspec_busy_seconds_total") == pytest.approx(counted.busy_seconds)
    assert metric("subspec_target_seconds_total") == pytest.approx(counted.target_seconds)


def test_fallbacks_by_reason(served: Served, engine: Any, requests: list[Any]) -> None:
    assert served.counted.fallbacks["grammar"] > 0
    assert served.metric("subspec_fallbacks_total", "reason=grammar") == pytest.approx(
        served.counted.fallbacks["grammar"]
    )
    others = {k: v for k, v in served.counted.fallbacks.items() if k != "grammar"}
    assert set(others.values()) == {0}


def test_gauges_show_what_is_loaded(served: Served, shown: Any) -> None:
    now, counted = shown(), served.counted
    assert now["vllm:subspec_layers", "place=resident"] == 1
    assert now["vllm:subspec_layers", "place=streamed"] == 3
    assert now["vllm:subspec_shadow_layers", "bits=8"] == 3
    assert now["vllm:subspec_memory_bytes", "part=shadows"] == counted.shadow_bytes
    assert now["vllm:subspec_memory_bytes", "part=slots"] == counted.slot_bytes
    assert now["vllm:subspec_pass_bytes", ""] == counted.streamed_bytes_per_pass
    assert now["vllm:subspec_worker_memory_bytes", ""] > counted.resident_bytes


def test_metrics_have_the_whole_count_since_start(engine: Any, served: Served, shown: Any) -> None:
    """The prefetch before the first request included."""
    now, counted = shown(), vllm_subspec.stats(engine.llm)
    assert now["vllm:subspec_passes_total", ""] == counted.target_passes
    # The slots fill up after the last step.
    assert counted.stream_bytes_read - now["vllm:subspec_link_read_bytes_total", ""] >= 0
    assert counted.stream_bytes_read - now["vllm:subspec_link_read_bytes_total", ""] <= (
        counted.slot_bytes
    )


def test_vllms_own_metrics_of_speculation(served: Served) -> None:
    """Nodes as drafts, levels as positions; only passes that verified something are counted."""
    counted, metric = served.counted, served.metric
    drafted = counted.target_passes - counted.undrafted_passes
    assert metric("spec_decode_num_drafts_total") == drafted
    assert metric("spec_decode_num_draft_tokens_total") == counted.drafted_nodes
    assert metric("spec_decode_num_accepted_tokens_total") == sum(counted.accepted_by_level)
    for level, accepted in enumerate(counted.accepted_by_level):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert metric(name, f"position={level}") == accepted


def test_one_requests_figures(served: Served) -> None:
    """vLLM's own, asked for by ``--per-request-spec-decode-metrics summary``."""
    from vllm.entrypoints.generate.base.serving import (
        build_per_request_timing_metrics,
        build_spec_decoding_metrics,
    )

    told = [build_spec_decoding_metrics(output) for output in served.outputs]
    assert None not in told
    counted = served.counted
    assert sum(one.num_spec_steps for one in told) == (
        counted.target_passes - counted.undrafted_passes
    )
    assert sum(one.num_draft_tokens for one in told) == counted.drafted_nodes
    by_level = [
        sum(sum(one.acceptance_histogram[level:]) for one in told)
        for level in range(1, len(counted.accepted_by_level) + 1)
    ]
    assert by_level == list(counted.accepted_by_level)
    for output in served.outputs:
        assert build_per_request_timing_metrics(output.metrics, 1).queue_time_ms >= 0


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_one_line_a_minute_while_it_works(
    engine: Any, served: Served, requests: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, log = _Lines(), logging.getLogger("vllm.subspec")
    log.addHandler(handler)
    write = engine.llm.llm_engine.do_log_stats
    try:
        write()
        assert handler.lines == []  # the minute is not over
        monkeypatch.setattr("vllm_subspec.integration.metrics.SECONDS_BETWEEN_LINES", 0.0)
        write()
        [line] = handler.lines
        write()
        assert handler.lines == [line]  # idle
    finally:
        log.removeHandler(handler)
    assert re.search(
        r"^SubSpec, engine 0: [\d.]+ tokens/s while it worked, [\d.]+ tokens a pass, "
        r"link busy \d+% at [\d.]+ GB/s, 0 running, grammar \d+$",
        line,
    )
    for prompt, _ in requests:
        assert prompt not in line


def test_the_dashboard_asks_for_metrics_that_are_there(served: Served, shown: Any) -> None:
    dashboard = (ROOT / "examples/grafana/dashboard.json").read_text()
    json.loads(dashboard)
    asked = set(re.findall(r"vllm:\w+", dashboard))
    assert asked - {name for name, _ in shown()} == set()
    assert len({name for name in asked if name.startswith("vllm:subspec_")}) >= 15


def test_the_readme_tells_of_every_metric(served: Served, shown: Any) -> None:
    _, _, table = (ROOT / "README.md").read_text().partition("| `vllm:subspec_` | meaning |\n")
    rows = table.split("\n\n")[0].splitlines()[1:]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    names = {name.removeprefix("vllm:subspec_") for name, _ in shown() if "subspec" in name}
    assert told == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_no_statistics_of_an_engine_without_subspec(engine: Any) -> None:
    config = type("Config", (), {"additional_config": {}, "model_config": _Named()})
    other = type("LLM", (), {"vllm_config": config})
    with pytest.raises(ConfigError, match="runs without SubSpec"):
        vllm_subspec.stats(other())  # type: ignore[call-overload]


class _Named:
    model = "some-model"


def test_the_report_travels_between_processes(engine: Any, served: Served) -> None:
    """From worker to engine core by pickle, from there to the frontend by msgpack."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from vllm_subspec.integration.metrics import carrying, take_report

    report = engine.statistics()
    arrived = pickle.loads(pickle.dumps(carrying(report))).ec_connector_stats.data
    stats = SchedulerStats(ec_connector_stats=arrived)
    sent = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(sent).scheduler_stats
    assert take_report(received) == report
    assert take_report(received) is None  # vLLM's own loggers see nothing
    assert take_report(None) is None
