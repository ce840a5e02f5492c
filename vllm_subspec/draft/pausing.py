"""Work that steps aside half-way and goes on later, on the same thread.

A draft step that has begun while the target waits for weights must not keep the target waiting once
they have come. It cannot be cut short: it is one forward of a model. So it runs on a stack of its
own and pauses between two layers. Threads would do the same, but each would bring the compute
library's own pool of workers, all spinning on the same cores.
"""

from __future__ import annotations

from collections.abc import Callable

from greenlet import GreenletExit, greenlet


class Pausable:
    """One piece of work, run in slices.

    Args:
        work: called once; at any depth it may ask ``is_pause_due`` and call ``pause``.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._stack = greenlet(work)
        self.is_pause_due: Callable[[], bool] = _never

    def resume(self, is_pause_due: Callable[[], bool] | None = None) -> bool:
        """Begin, or go on, until the work pauses or ends; True where it has ended.

        Args:
            is_pause_due: what the work shall ask; ``None`` lets it run to its end.

        Raises:
            BaseException: what the work raised; it has ended then.
        """
        self.is_pause_due = _never if is_pause_due is None else is_pause_due
        self._stack.parent = greenlet.getcurrent()
        self._stack.switch()
        return bool(self._stack.dead)

    def pause(self) -> None:
        """Called by the work: return to ``resume``'s caller, until the next ``resume``."""
        assert self._stack.parent is not None
        self._stack.parent.switch()

    def drop(self) -> None:
        """Give the work up where it paused; its ``finally`` blocks run."""
        self._stack.parent = greenlet.getcurrent()
        self._stack.throw(GreenletExit)


def _never() -> bool:
    return False
