"""vLLM engines in the test's own process, and what they answer."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

Request = tuple[str | list[int], dict[str, Any]]  # prompt, and arguments of SamplingParams
OpenEngine = Callable[..., AbstractContextManager["Engine"]]

_STORY = (
    "Once upon a time there was a small village between two rivers, and in the village lived an "
    "old woman who could read the weather from the flight of the birds. Every morning she walked "
    "to the bridge, looked at the sky for a long while, and told the children what the day would "
    "bring. Nobody remembered that she had ever been wrong, until the year"
)


@dataclass(frozen=True)
class Answer:
    """One completion; equal to another if tokens, text and the reason to stop are."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    num_cached_tokens: int = field(compare=False)
    logprobs: Any = field(compare=False, repr=False)
    prompt_logprobs: Any = field(compare=False, repr=False)

    def assert_same_logprobs(self, other: Answer) -> None:
        """The same ids and ranks at each position, and values within 2e-3."""
        assert (self.logprobs is None) == (other.logprobs is None)
        mine = [*(self.logprobs or []), *(self.prompt_logprobs or [])]
        theirs = [*(other.logprobs or []), *(other.prompt_logprobs or [])]
        assert len(mine) == len(theirs) > 0
        for position, expected in zip(mine, theirs, strict=True):
            if expected is None:  # nothing precedes a prompt's first token
                assert position is None
                continue
            # A rank counts the tokens ahead: deep in the tail the last bits decide about some.
            assert {t: value.rank for t, value in position.items()} == pytest.approx(
                {t: value.rank for t, value in expected.items()}, rel=0.02
            )
            assert {t: value.logprob for t, value in position.items()} == pytest.approx(
                {t: value.logprob for t, value in expected.items()}, abs=2e-3
            )


class Engine:
    """An engine, and the ways in which requests may reach it."""

    def __init__(self, model: Path, subspec: dict[str, Any] | None, options: dict[str, Any]):
        from vllm import LLM

        settings: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        if subspec is not None:
            settings["speculative_config"] = {"method": "subspec", **subspec}
        self.llm = LLM(str(model), **settings | options)
        self._ids = count()

    def batch(self, requests: Sequence[Request]) -> list[Answer]:
        """All requests at once."""
        outputs = self.llm.generate(
            [_prompt(prompt) for prompt, _ in requests],
            [_params(params) for _, params in requests],
            use_tqdm=False,
        )
        return [answer for output in outputs for answer in _answers(output)]

    def singly(self, requests: Sequence[Request]) -> list[Answer]:
        """One request after the other."""
        return [answer for request in requests for answer in self.batch([request])]

    def staggered(self, requests: Sequence[Request], every: int = 1) -> list[Answer]:
        """A new request each ``every`` steps, while the former ones are being served."""
        outputs = []
        for request in requests:
            self.add([request])
            for _ in range(every):
                outputs += self.step()
        return self.finish(outputs)

    def add(self, requests: Sequence[Request]) -> list[str]:
        """Hand requests over without running a step; returns their ids."""
        ids = [str(next(self._ids)) for _ in requests]
        for id_, (prompt, params) in zip(ids, requests, strict=True):
            self.llm.llm_engine.add_request(id_, _prompt(prompt), _params(params))
        return ids

    def step(self) -> list[Any]:
        """One step; returns what it finished."""
        return [output for output in self.llm.llm_engine.step() if output.finished]

    def finish(self, outputs: Sequence[Any] = ()) -> list[Answer]:
        """Run to the end; the answers, in the order in which their requests were added."""
        outputs = list(outputs)
        while self.llm.llm_engine.has_unfinished_requests():
            outputs += self.step()
        outputs.sort(key=lambda output: int(output.request_id))
        return [answer for output in outputs for answer in _answers(output)]

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        """The model runner."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def num_preemptions(self) -> int:
        """Requests that were preempted since start."""
        (counter,) = [m for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"]
        return int(counter.value)

    def statistics(self) -> dict[str, Any]:
        """SubSpec's counters."""
        (statistics,) = self.llm.collective_rpc("subspec_statistics")
        return dict(statistics)

    def placement(self) -> dict[str, Any]:
        """What is kept, and what is streamed."""
        (placement,) = self.llm.collective_rpc("subspec_placement")
        return dict(placement)

    def close(self) -> None:
        """Shut down as vLLM does it in its own process."""
        self.llm.llm_engine.engine_core.shutdown()


def _prompt(prompt: str | list[int]) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _params(params: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | params)


def _answers(output: Any) -> list[Answer]:
    return [
        Answer(
            tokens=tuple(completion.token_ids),
            text=completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            logprobs=completion.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        for completion in output.outputs
    ]


def _open_spills() -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.is_symlink()]
    return [target for target in targets if target.endswith(".spill")]


@contextmanager
def _open_engine(
    model: Path, subspec: dict[str, Any] | None = None, **options: Any
) -> Iterator[Engine]:
    engine = Engine(model, subspec, options)
    try:
        yield engine
    finally:
        engine.close()
        assert [t for t in threading.enumerate() if t.name.startswith("subspec")] == []
        assert _open_spills() == []


@pytest.fixture(scope="session")
def subspec_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The one cache of shadows and spills of all engines; kernels are those that setup built."""
    from vllm_subspec import envs

    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("subspec-cache")
        built = envs.cache_dir() / "kernels"
        if built.is_dir():
            shutil.copytree(built, directory / "kernels")
        patch.setenv("SUBSPEC_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="session")
def open_engine(subspec_cache: Path) -> Iterator[OpenEngine]:
    """``open_engine(model, {SubSpec's options}, **options of LLM)``, a context; None: plain vLLM.

    One engine at a time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield _open_engine


@pytest.fixture(scope="session")
def lively_model_dir(tmp_path_factory: pytest.TempPathFactory, small_model_dir: Path) -> Path:
    """Random weights, 4 layers, 4096 tokens, float32 (28 MB): fast, and its text never settles.

    A truncated real model soon says "and, and, and", whatever its KV cache holds. Here a token
    that changes changes half of those after it, so that a slip shows. The tokenizer is the
    real one's, with its first 4096 tokens.
    """
    return write_lively_model(tmp_path_factory.mktemp("models") / "lively", small_model_dir)


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory, small_model_dir: Path) -> Path:
    """Like the lively model, with one tensor as embedding table and head (24 MB)."""
    return write_lively_model(
        tmp_path_factory.mktemp("models") / "tied", small_model_dir, tied=True
    )


def write_lively_model(directory: Path, tokenizer_from: Path, tied: bool = False) -> Path:
    """Write the model of `lively_model_dir`, or of `tied_model_dir`, and return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=tied,
        dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    if not tied:  # such large values would make a tied head repeat its input
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    model.save_pretrained(directory)
    shutil.copy(tokenizer_from / "tokenizer_config.json", directory)
    tokenizer = json.loads((tokenizer_from / "tokenizer.json").read_text())
    bpe = tokenizer["model"]
    bpe["vocab"] = {text: id_ for text, id_ in bpe["vocab"].items() if id_ < config.vocab_size}
    bpe["merges"] = [pair for pair in bpe["merges"] if "".join(pair) in bpe["vocab"]]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="session")
def prompts() -> tuple[str, ...]:
    """Eight prompts; 5 to 94 tokens of the lively model, 4 to 72 of the real one."""
    return (
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):",
        _STORY,
        "1, 1, 2, 3, 5, 8,",
        "The three laws of robotics are, in the order in which they were first written down,",
        "List five fruits:",
        _STORY[: len(_STORY) // 2],
    )
