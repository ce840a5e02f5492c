"""The patch ledger: each change to vLLM that no official option makes needless.

Every entry says what it changes, why, how, and when it can go. All are inert unless a user asks
for SubSpec, and absent where a vLLM outside the tested range lacks their target.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from vllm_subspec.integration.arguments import (
    CONFIG_KEY,
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


def _end_core_with_its_parent(original: _Function) -> _Function:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if _is_on(vllm_config):
            from vllm_subspec.integration.orphans import end_with_parent  # only where asked for

            end_with_parent()
        original(self, vllm_config, *args, **kwargs)

    return init


def _fail_open_requests_at_shutdown(original: _Function) -> _Function:
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        handler = getattr(self, "output_handler", None)
        if handler is not None and _is_on(self.vllm_config):
            from vllm.utils.async_utils import run_in_loop
            from vllm.v1.engine.exceptions import EngineDeadError

            fail = self.output_processor.propagate_error
            run_in_loop(handler.get_loop(), fail, EngineDeadError())

    return shutdown


def _add_stat_logger(original: _Function) -> _Function:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if _is_on(vllm_config):
            from vllm_subspec.integration.metrics import SubSpecStatLogger  # only where asked for

            alone = kwargs.get("client_count", 1) == 1
            ours = SubSpecStatLogger(vllm_config, self.engine_indexes, writes_lines=alone)
            self.stat_loggers.insert(0, ours)

    return init


def _is_on(vllm_config: Any) -> bool:
    additional = vllm_config.additional_config  # by its type it may be no mapping
    return isinstance(additional, Mapping) and CONFIG_KEY in additional


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
    Patch(
        target="vllm.v1.executor.abstract:Executor.__init__",
        why="an engine core whose API server was killed goes on for ever, and its workers with it: "
        "their memory, and the lock of a spill being written, are not there for the next start",
        how="first thing in an engine core with SubSpec, has it end with the process that started "
        "it; workers do the same by themselves",
        goes_when="vLLM's engine core ends with its parent",
        replace=_end_core_with_its_parent,
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.shutdown",
        why="SIGTERM to a server with open requests stops the engine and then waits for their "
        "connections to close, while each waits for the engine: for ever, if the client waits too",
        how="with SubSpec, ends the requests that are open after the shutdown with an error",
        goes_when="vLLM ends open requests when it shuts down",
        replace=_fail_open_requests_at_shutdown,
    ),
    Patch(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        why="AsyncLLM loads stat loggers of plugins for everybody and turns statistics on for "
        "them, LLM loads none; and those of an engine are dropped when vLLM registers its own",
        how="with SubSpec, puts its logger before vLLM's in the list, once those are made",
        goes_when="vLLM lets a speculative method bring its stat logger",
        replace=_add_stat_logger,
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
