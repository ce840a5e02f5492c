"""A real server under mixed requests and departing clients, then without its engine core.

The long forms are `ci/soak load` and `ci/soak kills`; this is one start, with a tiny model.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))

from proofs.clients import Answer, Choice
from proofs.mortal import Mortal
from proofs.pool import MODEL_LEN, pool
from proofs.servers import serve
from proofs.traffic import Traffic, left_behind, metrics

pytestmark = pytest.mark.engine

CLIENTS, REQUESTS, DEADLINE_S = 8, 40, 300.0
SUBSPEC = {"width": 4, "depth": 8, "bits": 8}


@pytest.fixture(scope="module")
def stream_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("spill")


@pytest.fixture(scope="module")
def cases(lively_model_dir):
    """Those whose answers the engine in this process gives in the same form."""
    tokenizer = Tokenizer.from_file(str(lively_model_dir / "tokenizer.json"))
    all_cases = pool(lambda text: list(tokenizer.encode(text).ids), 42, seed=1)
    others = ("echo", "logprobs", "refused")
    return [case for case in all_cases if not any(name in case.name for name in others)]


@pytest.fixture(scope="module")
def served(open_engine, lively_model_dir, cases, stream_dir, tmp_path_factory):
    """The server, and the right answers, which come from plain vLLM while it starts."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    subspec = SUBSPEC | {"stream_dir": str(stream_dir)}
    with ExitStack() as stack, ThreadPoolExecutor(1) as starting:
        server = serve(lively_model_dir, log, subspec)
        started = starting.submit(stack.enter_context, server)
        with open_engine(lively_model_dir, max_model_len=MODEL_LEN) as plain:
            expected = answered(plain, cases)
        yield started.result(), expected


def answered(engine, cases) -> list[Answer]:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    requests = [CompletionRequest(model="m", **case.body) for case in cases]
    outputs = engine.llm.generate(
        [{"prompt_token_ids": request.prompt} for request in requests],
        [request.to_sampling_params(request.max_tokens, {}) for request in requests],
        use_tqdm=False,
    )
    return [
        Answer(
            200,
            {
                c.index: Choice(c.text, list(c.token_ids), [], c.finish_reason, c.stop_reason)
                for c in output.outputs
            },
            is_whole=True,
        )
        for output in outputs
    ]


def complete(server, **body) -> httpx.Response:
    body = {"model": "m", "temperature": 0, "return_token_ids": True} | body
    return httpx.post(
        f"{server.url}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False
    )


def test_mixed_requests_with_departing_clients_are_right_and_leave_nothing(served, cases):
    server, expected = served
    traffic = Traffic(server.url, cases, expected, 0, DEADLINE_S)
    asyncio.run(traffic.run(CLIENTS, lambda: traffic.asked >= REQUESTS))
    assert traffic.wrong == traffic.hung == traffic.failures == []
    assert traffic.answered.total() > REQUESTS / 2
    assert traffic.given_up.total() > 0
    assert metrics(server)["num_preemptions_total"] > 0
    assert left_behind(server) == {}
    assert server.statistics()["accepted_by_level"][3] > 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [5] * MODEL_LEN},
        {"prompt": [5], "max_tokens": -1},
    ],
    ids=["no-tokens", "no-text", "no-room", "no-seed"],
)
def test_what_cannot_be_answered_is_the_clients_error(served, body):
    server, _ = served
    response = complete(server, **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_killed_engine_core_ends_all_and_its_spill_is_used_again(
    served, cases, open_engine, lively_model_dir, stream_dir
):
    server, expected = served
    mortal = Mortal(server.process, server.url, server.log)
    traffic = Traffic(server.url, cases, expected, 1, DEADLINE_S)
    killed = threading.Event()

    def killed_in_mid_stream() -> bool:
        if traffic.answered.total() >= 10 and not killed.is_set():
            killed.set()
            assert mortal.kill("EngineCore"), mortal.processes()
        return False  # clients go on until the server fails

    asyncio.run(traffic.run(CLIENTS, killed_in_mid_stream))
    assert killed.is_set()
    assert len(traffic.failures) == CLIENTS
    assert traffic.wrong == traffic.hung == []
    assert mortal.survivors() == []

    files = sorted(stream_dir.iterdir())
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
    assert [path.suffix for path in files] == [".json", ".spill"]
    subspec = SUBSPEC | {"stream": "disk", "stream_dir": str(stream_dir)}
    with open_engine(lively_model_dir, subspec, max_model_len=MODEL_LEN) as again:
        assert answered(again, cases[:6]) == expected[:6]
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before
    assert sorted(stream_dir.iterdir()) == files
