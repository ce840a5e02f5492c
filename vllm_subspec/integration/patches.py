"""The patch ledger: each change to vLLM that no official option makes needless.

Every entry says what it changes, why, how, and when it can go. All are inert unless a user asks
for SubSpec.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams

from vllm_subspec.integration.arguments import (
    PROPOSER,
    accept_subspec_on_command_line,
    asks_for_subspec,
    translate,
)
from vllm_subspec.integration.compat import check_vllm


@dataclass(frozen=True)
class Patch:
    """One entry of the ledger."""

    target: str
    why: str
    how: str
    goes_when: str
    apply: Callable[[], None]


def _translate_before_engine_config() -> None:
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if asks_for_subspec(self):
            check_vllm()
            translate(self)
        return original(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def _extend_command_line() -> None:
    original = EngineArgs.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        accept_subspec_on_command_line(parser)
        return parser

    EngineArgs.add_cli_args = staticmethod(add_cli_args)


def _allow_min_p_and_logit_bias() -> None:
    original = SamplingParams._validate_spec_decode

    @functools.wraps(original)
    def validate(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
        if speculative_config is None or speculative_config.model != PROPOSER:
            original(self, speculative_config)

    SamplingParams._validate_spec_decode = validate


LEDGER = (
    Patch(
        target="vllm.engine.arg_utils.EngineArgs.create_engine_config",
        why="SpeculativeConfig.method is a closed list and rejects unknown keys, and worker_cls is "
        "read before the speculative configuration",
        how="translates {'method': 'subspec', ...} to custom_class, worker_cls and "
        "additional_config before the original runs",
        goes_when="vLLM lets a plugin register a speculative method with its own options",
        apply=_translate_before_engine_config,
    ),
    Patch(
        target="vllm.engine.arg_utils.EngineArgs.add_cli_args",
        why="--speculative-config takes JSON only and --spec-method a closed list",
        how="replaces the type of the one action and extends the choices of the other, after the "
        "parser is built",
        goes_when="vLLM lets a plugin register a speculative method",
        apply=_extend_command_line,
    ),
    Patch(
        target="vllm.sampling_params.SamplingParams._validate_spec_decode",
        why="vLLM refuses min_p and logit_bias under any speculation; our sampler applies them",
        how="skips that check where the proposer is ours",
        goes_when="vLLM asks the speculative method which parameters it serves",
        apply=_allow_min_p_and_logit_bias,
    ),
)

_applied = False


def apply_patches() -> None:
    """Apply the ledger once per process."""
    global _applied
    if not _applied:
        _applied = True
        for patch in LEDGER:
            patch.apply()
