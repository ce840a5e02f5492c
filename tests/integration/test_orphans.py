"""Processes of an engine end with the one that started them, however that went."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

from vllm_subspec.integration import orphans
from vllm_subspec.integration.plugin import register

pytestmark = pytest.mark.engine

ON = SimpleNamespace(additional_config={"subspec": {}})
OFF = [{}, {"other": 1}, object()]
# Starts four more by fork, so that vLLM is imported once, and is then killed.
FAMILY = """
import multiprocessing, os, signal, sys, time
from vllm_subspec.integration import orphans

def serve(is_deaf):
    if is_deaf:  # as an engine core while it loads
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphans._LAST_S = 0.5
    orphans.end_with_parent()
    ready.release()
    time.sleep(600)

fork = multiprocessing.get_context("fork")
ready = fork.Semaphore(0)
# A forked process holds what its elder brothers watch, so the youngest ends first.
names = {"Users own": False, "EngineCore": False, "EngineCore_DP1": True, "VllmWorker-0": False}
children = [fork.Process(target=serve, name=n, args=(deaf,)) for n, deaf in names.items()]
for child in children:
    child.start()
for child in children:
    ready.acquire()
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""


def test_what_vllm_started_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        own, *engines = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert all(process.is_running() for process in (*engines, own))
        parent.kill()
        try:
            _, alive = psutil.wait_procs(engines, timeout=60)
            assert alive == []
            assert own.is_running()
        finally:
            for process in (*engines, own):
                if process.is_running():
                    process.kill()


@pytest.mark.parametrize("additional", OFF)
def test_only_engines_with_subspec_watch(monkeypatch: pytest.MonkeyPatch, additional) -> None:
    register()
    watched = []
    monkeypatch.setattr(orphans, "end_with_parent", lambda: watched.append(True))
    for config, is_on in ((ON, True), (SimpleNamespace(additional_config=additional), False)):
        watched.clear()
        with pytest.raises(AttributeError):  # vLLM's own part, which wants a whole configuration
            Executor.__init__(SimpleNamespace(), config)
        assert watched == [True] * is_on


@pytest.mark.parametrize("config", [ON, *(SimpleNamespace(additional_config=o) for o in OFF)])
def test_requests_that_are_open_at_the_shutdown_fail(config) -> None:
    register()
    failed: list[Exception] = []

    async def shut_down() -> None:
        engine = SimpleNamespace(
            output_handler=asyncio.create_task(asyncio.sleep(60)),
            output_processor=SimpleNamespace(propagate_error=failed.append),
            vllm_config=config,
        )
        await asyncio.get_running_loop().run_in_executor(None, AsyncLLM.shutdown, engine)
        await asyncio.sleep(0)

    asyncio.run(shut_down())
    assert [type(error) for error in failed] == [EngineDeadError] * (config is ON)
