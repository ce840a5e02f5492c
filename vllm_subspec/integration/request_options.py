"""What one request may ask of SubSpec, in ``SamplingParams.extra_args``.

The OpenAI API hands these through as ``vllm_xargs``, which holds strings, numbers and lists of them
only, and turns ``false`` into 0: so every option is one flat key, and 0 means ``false``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_subspec.errors import ConfigError

PREFIX = "subspec"
KNOWN = ("subspec", "subspec_depth")


class RequestError(VLLMValidationError, ConfigError):
    """An option of one request is unknown or out of range; the API answers with status 400."""


@dataclass(frozen=True)
class RequestOptions:
    """A request's own options.

    Attributes:
        speculate: false: the target alone answers, one token a pass.
        depth: levels of its trees at most; ``None``: as deep as the engine drafts.
    """

    speculate: bool = True
    depth: int | None = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> RequestOptions:
        """The options in arguments that `check_request` let pass."""
        given = extra_args or {}
        return cls(speculate=bool(given.get("subspec", True)), depth=given.get("subspec_depth"))


def check_request(extra_args: Mapping[str, Any] | None, most_depth: int) -> None:
    """Refuse what `RequestOptions` cannot hold.

    Args:
        extra_args: of the request's sampling parameters.
        most_depth: levels of the deepest tree that this engine could ever draft.

    Raises:
        RequestError: names the option, its value, and what may stand there.
    """
    for name, value in (extra_args or {}).items():
        if not str(name).startswith(PREFIX):
            continue  # somebody else's
        if name not in KNOWN:
            raise RequestError(
                f"unknown option {name!r} of a request: known ones are {', '.join(KNOWN)}",
                parameter="extra_args",
            )
        if name == "subspec" and not (isinstance(value, bool | int) and value in (0, 1)):
            raise RequestError(
                f"option 'subspec' of a request is {value!r}: give false (or 0) to draft nothing "
                "for it, or leave it out",
                parameter="extra_args",
            )
        if name == "subspec_depth" and not (type(value) is int and 1 <= value <= most_depth):
            raise RequestError(
                f"option 'subspec_depth' of a request is {value!r}: this engine's trees hold at "
                f"most {most_depth} nodes, so give an integer from 1 to {most_depth}",
                parameter="extra_args",
            )
