"""No process of an engine outlives the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from vllm.logger import init_logger

logger = init_logger("vllm.subspec")

_OURS = ("EngineCore", "VllmWorker")  # names that vLLM gives to the processes it starts
_LAST_S = 5.0
_THREAD = "subspec-parent-watch"


def end_with_parent() -> None:
    """From now on: when the process that started this one is gone, however it went, end this one.

    SIGTERM first, which vLLM's processes take for the order to tidy up; but an engine core that
    loads only notes it. A process that vLLM did not start stays as it is. Idempotent.
    """
    parent = multiprocessing.parent_process()
    started_by_vllm = multiprocessing.current_process().name.startswith(_OURS)
    watched = any(thread.name == _THREAD for thread in threading.enumerate())
    if parent is None or not started_by_vllm or watched:
        return

    def watch() -> None:
        parent.join()
        logger.error("SubSpec: process %s, which started this one, is gone: ending", parent.pid)
        os.kill(os.getpid(), signal.SIGTERM)
        # A daemon thread: if the process ends in time, this is never reached.
        threading.Event().wait(_LAST_S)
        os._exit(1)

    threading.Thread(target=watch, name=_THREAD, daemon=True).start()
