"""The patch ledger: each change to vLLM that no official option makes needless.

Every entry says what it changes, why, how, and when it can go. All are inert unless a user asks
for SubSpec, and absent where a vLLM outside the tested range lacks their target.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from vllm_subspec.integration.arguments import (
    PROPOSER,
    accept_subspec_on_command_line,
    asks_for_subspec,
    translate,
)
from vllm_subspec.integration.compat import check_vllm

_Function = Callable[..., Any]


@dataclass(frozen=True)
class Patch:
    """One entry of the ledger.

    Attributes:
        target: the function that is replaced, ``module:Class.name``.
        why: what vLLM does that cannot stay.
        how: what the replacement does.
        goes_when: what vLLM must offer for the patch to go.
        replace: makes the replacement out of the original.
    """

    target: str
    why: str
    how: str
    goes_when: str
    replace: Callable[[_Function], _Function]


def _translate_before_engine_config(original: _Function) -> _Function:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks_for_subspec(self):
            return original(self, *args, **kwargs)
        check_vllm()
        config = translate(self)
        kv_bytes, sequences = self.kv_cache_memory_bytes, self.max_num_seqs
        vllm_config = original(self, *args, **kwargs)
        from vllm_subspec.integration.placing import reserve_kv_cache  # late, as in `translate`
        from vllm_subspec.integration.support import refuse_engine

        refuse_engine(vllm_config, config)
        if config.memory_budget is not None:
            reserve_kv_cache(vllm_config, kv_bytes, sequences)
        return vllm_config

    return create_engine_config


def _extend_command_line(original: _Function) -> _Function:
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        accept_subspec_on_command_line(parser)
        return parser

    return add_cli_args


def _validate_as_ours(original: _Function) -> _Function:
    def validate(self: Any, speculative_config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(speculative_config, "model", None) != PROPOSER:
            original(self, speculative_config, *args, **kwargs)
            return
        from vllm_subspec.integration.request_options import check_request  # late, as above

        check_request(self.extra_args, speculative_config.num_speculative_tokens)

    return validate


LEDGER = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        why="SpeculativeConfig.method is a closed list and rejects unknown keys, and worker_cls is "
        "read before the speculative configuration",
        how="translates {'method': 'subspec', ...} to custom_class, worker_cls and "
        "additional_config before the original runs, and refuses what SubSpec does not serve",
        goes_when="vLLM lets a plugin register a speculative method with its own options",
        replace=_translate_before_engine_config,
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        why="--speculative-config takes JSON only and --spec-method a closed list",
        how="replaces the type of the one action and extends the choices of the other, after the "
        "parser is built",
        goes_when="vLLM lets a plugin register a speculative method",
        replace=_extend_command_line,
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        why="vLLM refuses min_p and logit_bias under any speculation, though our sampler applies "
        "them, and has no hook that refuses a request's own options before the engine has them",
        how="where the proposer is ours, skips that check and looks at our options in extra_args",
        goes_when="vLLM asks the speculative method which parameters it serves",
        replace=_validate_as_ours,
    ),
)

_applied = False


def apply_patches() -> None:
    """Apply the ledger once per process."""
    global _applied
    if not _applied:
        _applied = True
        for patch in LEDGER:
            _apply(patch)


def _apply(patch: Patch) -> None:
    owner_name, _, name = patch.target.rpartition(".")
    try:
        owner = resolve_name(owner_name)
        found = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError):
        return  # `check_vllm` tells whoever asks for SubSpec; nobody else is concerned
    original = getattr(owner, name)
    replacement = functools.wraps(original)(patch.replace(original))
    setattr(
        owner, name, staticmethod(replacement) if isinstance(found, staticmethod) else replacement
    )
