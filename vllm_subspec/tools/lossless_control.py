"""Samplers that are wrong on purpose: what the losslessness protocol must catch.

No option leads here. A wrong sampler lives as long as the block of ``wrong_sampler``, in the
process that calls it, which is the worker of the control and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from vllm_subspec.errors import ConfigError

_COOLING = 1.25

WRONG_SAMPLERS: Mapping[str, str] = {
    "accepting": "enters a drafted child wherever there is one, whatever the target says",
    "cooler": f"draws at the request's temperature divided by {_COOLING}",
}
"""Name and meaning."""
MUST_FAIL: Mapping[str, tuple[str, ...]] = {
    "accepting": ("greedy", "seeded", "unseeded"),
    "cooler": ("seeded", "unseeded"),  # greedy requests have no temperature
}
"""The checks that must catch each of them. None must be caught by its tasks: a model that answers
few questions rightly loses little by a wrong sampler."""


@contextmanager
def wrong_sampler(name: str) -> Iterator[None]:
    """Verification of this process's engine draws wrongly inside the block.

    Raises:
        ConfigError: no such sampler.
    """
    if name not in WRONG_SAMPLERS:
        raise ConfigError(f"wrong sampler {name!r} is unknown: {', '.join(WRONG_SAMPLERS)}")
    with _accepting() if name == "accepting" else _cooler():
        yield


@contextmanager
def _accepting() -> Iterator[None]:
    from vllm_subspec.integration.sampler import _Draw

    draw_rows: Callable[..., None] = _Draw._draw_rows

    def accept(self: Any, pending: Any, paths: Any) -> None:
        draw_rows(self, pending, paths)
        for request, row in pending:
            tree = self.verification.trees[request]
            children = tree.tokens[tree.parents == row - 1]
            if len(children):  # the last of them: the one that the draft liked least
                self.drawn[self.starts[request] + row] = children[-1]

    with (
        patch.object(_Draw, "_draw_rows", accept),
        patch.object(_Draw, "_plain_greedy", lambda self: False),  # which draws no rows
    ):
        yield


@contextmanager
def _cooler() -> Iterator[None]:
    from vllm_subspec.integration.rows import RowProcessor

    process: Callable[..., Any] = RowProcessor.process

    def cool(self: Any, *args: Any) -> Any:
        logits, greedy = process(self, *args)
        return logits * _COOLING, greedy

    with patch.object(RowProcessor, "process", cool):
        yield
