"""A function in a process of its own: what it held is given back, whatever its libraries keep."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from vllm_subspec.tools.bench_process import WorkerError

T = TypeVar("T")
_END_S = 20.0  # for what libraries do at the end of a process


def in_own_process(work: Callable[..., T], *args: Any) -> T:
    """Call ``work(*args)`` in a new Python process; it ends with this call.

    Args:
        work: a function of a module, or a method of something that can be pickled.
        args: likewise.

    Raises:
        WorkerError: the process died without an answer.
        Exception: what ``work`` raised.
    """
    spawn = get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(sender, work, args))
    process.start()
    sender.close()
    try:
        answer, error = receiver.recv()
        process.join(_END_S)
    except EOFError:
        process.join()
        raise WorkerError(
            f"a process died of exit status {process.exitcode}; -9 is the kernel's or a user's "
            "kill, mostly for want of memory"
        ) from None
    finally:
        process.kill()
        process.join()
    if error is not None:
        raise error
    found: T = answer
    return found


def _answer(sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        sender.send((work(*args), None))
    except Exception as error:
        sender.send((None, error))
