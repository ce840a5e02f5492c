"""vLLM's OpenAI-compatible server with SubSpec answers as it does without, streamed and not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.engine

SEEDED = {"temperature": 0.9, "seed": 7}
STORY = "Once upon a time there was a small village between two rivers, and in the village"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
    "required": ["colour", "dark"],
    "additionalProperties": False,
}


def tools(**strictness: bool) -> dict[str, Any]:
    """Two functions to call."""
    functions = [{"name": name, "parameters": COLOURS, **strictness} for name in ("paint", "mix")]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


TOOLS = tools()
STRICT = tools(strict=True) | {"parallel_tool_calls": False}
CALL = r'<tool_call>\n\{"name": "paint", "arguments": \{"colour": "[a-z]{2,9}"\}\}\n</tool_call>'


def completion(**body: Any) -> tuple[str, dict[str, Any]]:
    prompt = {"prompt": STORY, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return "/v1/completions", prompt | body


def chat(**body: Any) -> tuple[str, dict[str, Any]]:
    question = {"messages": CHAT, "max_tokens": 32, "temperature": 0}
    return "/v1/chat/completions", question | body


def response_format(kind: str, **content: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **content}}


REQUESTS = {
    "completion": completion(),
    "completion-of-token-ids": completion(prompt=[1, 50, 60, 70, 80], return_token_ids=True),
    "completions-of-several-prompts": completion(prompt=[STORY, "List five fruits:"]),
    "completion-logprobs": completion(logprobs=5),
    "completion-echo-and-logprobs": completion(echo=True, logprobs=2),
    "completion-echo-alone": completion(echo=True, max_tokens=1, logprobs=1),
    "completion-prompt-logprobs": completion(prompt_logprobs=2),
    "completion-two-seeded": completion(n=2, **SEEDED),
    "completion-stop": completion(stop=["e", "zz"], max_tokens=40, logprobs=1),
    "completion-stop-included": completion(stop="o", include_stop_str_in_output=True),
    "completion-bias": completion(logit_bias={"300": 4.0, "301": -100.0}),
    "completion-regex": completion(structured_outputs={"regex": r"[a-z ]{12,40}"}),
    "completion-choice": completion(structured_outputs={"choice": ["rivers", "mountains"]}),
    "completion-without-drafts": completion(vllm_xargs={"subspec": False}),
    "completion-of-shallow-trees": completion(vllm_xargs={"subspec_depth": 2}),
    "chat": chat(),
    "chat-logprobs": chat(logprobs=True, top_logprobs=20),
    "chat-two-seeded": chat(n=2, logprobs=True, top_logprobs=0, **SEEDED),
    "chat-min-tokens": chat(min_tokens=20, stop_token_ids=list(range(100, 700)), logprobs=True),
    "chat-penalties": chat(presence_penalty=0.7, frequency_penalty=-0.4, **SEEDED),
    "chat-bad-words": chat(bad_words=["the", "and", "river"]),
    "chat-echo": chat(echo=True, add_generation_prompt=False, continue_final_message=True),
    "chat-json-object": chat(**response_format("json_object")),
    "chat-json-schema": chat(
        **response_format("json_schema", json_schema={"name": "paint", "schema": COLOURS})
    ),
    "chat-tools-unused": chat(**TOOLS, tool_choice="auto"),
    "chat-tool-written": chat(
        **TOOLS, tool_choice="auto", structured_outputs={"regex": CALL}, max_tokens=96
    ),
    "chat-tool-required": chat(**STRICT, tool_choice="required", max_tokens=96),
    "chat-tool-named": chat(
        **TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}}, max_tokens=64
    ),
    "chat-tools-none": chat(**TOOLS, tool_choice="none"),
}
STREAMED = [name for name in REQUESTS if name != "completion-prompt-logprobs"]
REFUSED = {
    "stream-of-prompt-logprobs": completion(prompt_logprobs=2, stream=True),
    "stream-of-nothing": chat(max_tokens=-1, stream=True),
    "unknown-model": completion(model="none-such"),
    "no-prompt": ("/v1/completions", {"max_tokens": 4}),
    "empty-prompt": completion(prompt=[]),
    "long-prompt": completion(prompt=[50] * 400),
    "token-beyond-the-vocabulary": completion(prompt=[1, 999_999]),
    "negative-max-tokens": completion(max_tokens=-3),
    "min-tokens-above-max-tokens": completion(min_tokens=30),
    "several-greedy": completion(n=2),
    "many-logprobs": completion(logprobs=21),
    "temperature": completion(temperature=-1.0),
    "min-p": completion(min_p=1.5, **SEEDED),
    "empty-stop": completion(stop=[""]),
    "bias-of-an-unknown-token": completion(logit_bias={"999999": 1.0}),
    "bias-of-a-word": completion(logit_bias={"word": 1.0}),
    "bad-regex": completion(structured_outputs={"regex": "(("}),
    "two-grammars": completion(structured_outputs={"regex": "a", "choice": ["b"]}),
    "nested-extra-arguments": completion(vllm_xargs={"subspec": {"depth": 2}}),
    "no-messages": ("/v1/chat/completions", {"max_tokens": 4}),
    "chat-logprobs-unasked": chat(top_logprobs=3),
    "chat-tool-unknown": chat(
        **TOOLS, tool_choice={"type": "function", "function": {"name": "none-such"}}
    ),
    "chat-format-unknown": chat(**response_format("poem")),
}


class Server:
    """vLLM's own app on an engine core in this process."""

    def __init__(self, runner: asyncio.Runner, app: Any, engine: Any) -> None:
        self._runner, self._app = runner, app
        self.engine = engine

    def post(self, requests: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
        """Answers to requests that arrive at once."""

        async def all_of_them() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return list(
                    await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
                )

        return self._runner.run(all_of_them())

    def statistics(self) -> dict[str, Any]:
        (statistics,) = self._runner.run(self.engine.collective_rpc("subspec_statistics"))
        return dict(statistics)


def in_process_core() -> type:
    """The client of an engine core that runs in the server's event loop: it starts ten times as
    fast as vLLM's own, which is a process, and everything before it is the server's own code."""
    from vllm.v1.engine.core_client import InprocClient

    class InProcessCore(InprocClient):
        engine_ranks_managed = (0,)
        resources = SimpleNamespace(engine_dead=False)

        def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, **_: Any):
            super().__init__(vllm_config, executor_class, log_stats)
            self._arrived = asyncio.Event()

        async def get_output_async(self) -> Any:
            while True:
                await asyncio.sleep(0)
                if not self.engine_core.scheduler.has_requests():
                    self._arrived.clear()
                    await self._arrived.wait()
                outputs = self.get_output()
                if outputs.outputs:
                    return outputs

        async def add_request_async(self, request: Any) -> None:
            self.add_request(request)
            self._arrived.set()

        async def abort_requests_async(self, request_ids: list[str]) -> None:
            self.abort_requests(request_ids)

        async def get_supported_tasks_async(self) -> Any:
            return self.get_supported_tasks()

        async def reset_mm_cache_async(self) -> None:
            self.reset_mm_cache()

        async def collective_rpc_async(self, *args: Any, **kwargs: Any) -> Any:
            return self.collective_rpc(*args, **kwargs)

    return InProcessCore


@contextmanager
def serving(model: Any, template: Any, options: list[str]) -> Iterator[Server]:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient

    common = ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"]
    common += ["--block-size", "32", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
    common += ["--chat-template", str(template), "--served-model-name", "lively"]
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    common += ["--structured-outputs-config", json.dumps(compact)]
    common += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-stats"]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([str(model), *common, *options])
    args.model = str(model)

    async def start() -> tuple[Any, Any, Any]:
        context = build_async_engine_client(args)
        engine = await context.__aenter__()
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        return context, app, engine

    core = staticmethod(in_process_core())
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(EngineCoreClient, "make_async_mp_client", core)
        context, app, engine = runner.run(start())
        try:
            yield Server(runner, app, engine)
        finally:
            runner.run(context.__aexit__(None, None, None))


def streamed(request: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    path, body = request
    return path, body | {"stream": True, "stream_options": {"include_usage": True}}


def answer(response: httpx.Response) -> dict[str, Any]:
    """What a client sees, without ids and times."""
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    choices = [_without_ids(choice) for choice in body["choices"]]
    return {"choices": choices, "usage": body["usage"], "prompts": body.get("prompt_logprobs")}


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_ids(v) for k, v in value.items() if k != "id"}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """All that the deltas of a stream say, by choice: texts in one piece, lists in one list."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    choices.sort(key=lambda choice: choice["index"])
    whole = {
        index: _join(_without_ids(list(pieces)))
        for index, pieces in groupby(choices, key=lambda choice: choice["index"])
    }
    return {"choices": whole, "usage": chunks[-1]["usage"]}


def _join(pieces: list[Any]) -> Any:
    pieces = [piece for piece in pieces if piece is not None]
    if not pieces:
        return None
    if isinstance(pieces[0], dict):
        names = {name: None for piece in pieces for name in piece}
        return {
            name: pieces[0][name]
            if name in ("index", "role", "type")
            else _join([piece.get(name) for piece in pieces])
            for name in names
        }
    if isinstance(pieces[0], list) and any(_is_call(item) for item in pieces[0]):
        calls = sorted((call for piece in pieces for call in piece), key=lambda c: c["index"])
        return [_join(list(same)) for _, same in groupby(calls, key=lambda c: c["index"])]
    if isinstance(pieces[0], list):
        return [item for piece in pieces for item in piece]
    return "".join(pieces) if isinstance(pieces[0], str) else pieces[-1]


def without_time(message: str) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "", message)  # the grammar's compiler says it


def _is_call(item: Any) -> bool:
    return isinstance(item, dict) and "function" in item


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal, but for logprobs' last digits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-3), where
    elif where.endswith(".rank"):
        assert found == pytest.approx(expected, rel=0.02), where
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def template(small_model_dir):
    return small_model_dir / "chat_template.jinja"


@pytest.fixture(scope="module")
def plain(subspec_cache, lively_model_dir, template):
    """What the server without SubSpec says to everything."""
    with serving(lively_model_dir, template, []) as server:
        return SimpleNamespace(
            whole=dict(zip(REQUESTS, map(answer, server.post([*REQUESTS.values()])), strict=True)),
            streams=dict(
                zip(
                    STREAMED,
                    map(deltas, server.post([streamed(REQUESTS[name]) for name in STREAMED])),
                    strict=True,
                )
            ),
            refused=dict(zip(REFUSED, server.post([*REFUSED.values()]), strict=True)),
        )


@pytest.fixture(scope="module")
def server(subspec_cache, plain, lively_model_dir, template):
    draft = {"method": "subspec", "width": 4, "depth": 8, "bits": 8, "stream": "off"}
    options = ["--speculative-config", json.dumps(draft)]
    with serving(lively_model_dir, template, options) as server:
        yield server


@pytest.fixture(scope="module")
def found(server):
    """What it says to everything, asked at once, streamed and not."""
    streams = [streamed(REQUESTS[name]) for name in STREAMED]
    responses = server.post([*REQUESTS.values(), *streams, *REFUSED.values()])
    return SimpleNamespace(
        whole=dict(zip(REQUESTS, responses, strict=False)),
        streams=dict(zip(STREAMED, responses[len(REQUESTS) :], strict=False)),
        refused=dict(zip(REFUSED, responses[-len(REFUSED) :], strict=True)),
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_answer(found, plain, name):
    assert_same(answer(found.whole[name]), plain.whole[name])


@pytest.mark.parametrize("name", STREAMED)
def test_stream(found, plain, name):
    chunks = deltas(found.streams[name])
    assert_same(joined(chunks), joined(plain.streams[name]))
    if name in ("completion", "chat", "completion-logprobs"):
        assert len(chunks) < len(plain.streams[name]) - 8  # several tokens came in one delta


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(found, plain, name):
    refused, expected = found.refused[name], plain.refused[name]
    assert 400 <= expected.status_code < 500
    assert refused.status_code == expected.status_code
    assert without_time(refused.text) == without_time(expected.text)


def test_reference_holds_what_the_requests_are_about(plain):
    whole, streams = plain.whole, plain.streams
    calls = {name: whole[name]["choices"][0]["message"] for name in whole if "tool" in name}
    assert calls["chat-tool-written"]["tool_calls"][0]["function"]["name"] == "paint"
    assert calls["chat-tool-named"]["tool_calls"][0]["function"]["name"] == "paint"
    stopped = whole["completion-stop"]["choices"][0]
    assert stopped["stop_reason"] == "e"
    assert "e" not in stopped["text"]
    assert "tokens" in whole["completion-echo-and-logprobs"]["choices"][0]["logprobs"]
    usage = streams["chat"][-1]["usage"]
    assert usage["completion_tokens"] > 0
    assert usage.items() <= whole["chat"]["usage"].items()


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"subspec": "no"}, "'subspec' of a request is 'no': give false"),
        ({"subspec_depth": 0}, "'subspec_depth' of a request is 0: .* from 1 to 32"),
        ({"subspec_depth": 33}, "'subspec_depth' of a request is 33: .* from 1 to 32"),
        ({"subspec_deep": 2}, "unknown option 'subspec_deep' .* subspec, subspec_depth"),
    ],
)
def test_wrong_options_of_a_request_are_a_client_error(server, extra, reason):
    for make in (completion, chat):
        request = make(vllm_xargs=extra)
        whole, stream = server.post([request, streamed(request)])
        assert whole.status_code == 400
        # vLLM begins a stream before its engine looks at the request: the error is its only event.
        event, done = [line for line in stream.text.splitlines() if line]
        assert done == "data: [DONE]"
        for error in (whole.json()["error"], json.loads(event.removeprefix("data: "))["error"]):
            assert error["type"] == "BadRequestError"
            assert error["code"] == 400
            assert error["param"] == "extra_args"
            assert re.search(reason, error["message"])


def test_a_request_that_opted_out_drafts_nothing(server):
    before = server.statistics()
    server.post([REQUESTS["completion-without-drafts"]])
    assert server.statistics()["drafted_nodes"] == before["drafted_nodes"]
    server.post([REQUESTS["completion-of-shallow-trees"]])
    after = server.statistics()
    assert after["drafted_nodes"] > before["drafted_nodes"]
    assert after["drafted_by_level"][2:] == before["drafted_by_level"][2:]
