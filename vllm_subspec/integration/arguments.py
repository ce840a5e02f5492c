"""From what a user writes to what vLLM understands: the only place that parses engine arguments.

``--speculative-config subspec``, its JSON forms, ``--spec-method subspec`` and vLLM's long form
with ``custom_class`` all become: our worker, vLLM's ``custom_class`` method, and the settings in
``additional_config["subspec"]``. One of vLLM's own methods may stay beside them, over our stream.
"""

from __future__ import annotations

import json
import logging
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.errors import ConfigError
from vllm_subspec.plan.budget import divided

logger = logging.getLogger(__name__)

METHOD = "subspec"
CONFIG_KEY = "subspec"
OWN_METHOD_KEY = "subspec_beside"  # names the method of vLLM's that was asked for beside SubSpec
OVER_STREAM = ("ngram", "suffix", "draft_model")
_HOW_BESIDE = (
    f"set speculate to false in additional_config[{CONFIG_KEY!r}] to run it over SubSpec's stream"
)
PROPOSER = "vllm_subspec.SubstituteProposer"
CPU_WORKER = "vllm_subspec.integration.worker.SubSpecCPUWorker"
GPU_WORKER = "vllm_subspec.integration.worker.SubSpecGPUWorker"


def speculative_config(text: str) -> Any:
    """The type of ``--speculative-config``: the bare word ``subspec``, or JSON as vLLM takes it."""
    if text in ("None", ""):
        return None
    if text.strip() == METHOD:
        return {"method": METHOD}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # argparse shows the text of this error only; of a ValueError it says "invalid value".
        raise ArgumentTypeError(f"{text!r} is neither {METHOD!r} nor JSON ({error})") from error


def accept_subspec_on_command_line(parser: Any) -> None:
    """Let a built parser take ``--speculative-config subspec`` and ``--spec-method subspec``."""
    for action in parser._actions:
        if "--speculative-config" in action.option_strings:
            action.type = speculative_config
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, METHOD]


def asks_for_subspec(engine_args: Any) -> bool:
    """Whether these ``EngineArgs`` ask for SubSpec in any of its forms, or were translated.

    Runs for everybody's arguments, in any vLLM: it takes nothing for granted.
    """
    config = getattr(engine_args, "speculative_config", None)
    additional = getattr(engine_args, "additional_config", None)
    given = config if isinstance(config, Mapping) else {}
    return (
        METHOD in (config, getattr(engine_args, "spec_method", None), given.get("method"))
        or PROPOSER in (getattr(engine_args, "spec_model", None), given.get("model"))
        or (isinstance(additional, Mapping) and CONFIG_KEY in additional)
    )


def translate(engine_args: Any) -> SubSpecConfig:
    """Rewrite ``EngineArgs`` in place and return the settings; a second call rewrites nothing.

    Raises:
        ConfigError: unknown or contradictory options.
        UnsupportedError: an engine feature that SubSpec does not serve exactly.
        DependencyError: the quantizer's package is missing.
    """
    # Late: an untested vLLM may lack what it imports, and nobody has asked for SubSpec before.
    from vllm_subspec.integration.support import refuse_arguments

    additional = engine_args.additional_config or {}
    if engine_args.worker_cls in (CPU_WORKER, GPU_WORKER) and CONFIG_KEY in additional:
        return SubSpecConfig(**additional[CONFIG_KEY])
    beside = _method_beside(engine_args)
    options = additional[CONFIG_KEY] if beside else _options(engine_args)
    config = SubSpecConfig(**options)
    refuse_arguments(engine_args, config)
    if config.memory_budget is not None:  # an engine does not know of its replicas
        budget = divided(config.memory_budget, _replicas_here(engine_args))
        config = config.model_copy(update={"memory_budget": budget})
    settings: dict[str, Any] = {CONFIG_KEY: config.to_options()}
    engine_args.worker_cls = GPU_WORKER if config.unmeasured_cuda else CPU_WORKER
    engine_args.async_scheduling = False  # each step's tokens are needed before the next is made
    if beside:
        settings[OWN_METHOD_KEY] = beside
    else:
        _name_proposer(engine_args, config)
    engine_args.additional_config = {**additional, **settings}
    if not engine_args.enforce_eager:
        logger.info("SubSpec runs the model eagerly: draft view and streaming hooks are Python")
        engine_args.enforce_eager = True
    return config


def _replicas_here(engine_args: Any) -> int:
    """Data-parallel replicas that this command starts on this machine."""
    everywhere = engine_args.data_parallel_size // engine_args.nnodes
    return max(1, engine_args.data_parallel_size_local or everywhere)


def _method_beside(engine_args: Any) -> str | None:
    """The method of vLLM's that was asked for together with streaming that drafts nothing."""
    settings = (engine_args.additional_config or {}).get(CONFIG_KEY)
    given = engine_args.speculative_config
    method = given.get("method") if isinstance(given, Mapping) else None
    method = method or engine_args.spec_method
    streams_only = isinstance(settings, Mapping) and settings.get("speculate") is False
    return method if streams_only and method in OVER_STREAM else None


def _name_proposer(engine_args: Any, config: SubSpecConfig) -> None:
    """Make our proposer the speculative method, or none if nothing is to be drafted."""
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = (
        {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": config.node_count,
        }
        if config.speculate
        else None
    )


def _options(engine_args: Any) -> dict[str, Any]:
    """The user's options from every place they may stand in, each at most once."""
    options: dict[str, Any] = {}
    given = engine_args.speculative_config or {}
    if given == METHOD:
        given = {"method": METHOD}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculative_config = {given!r}: use {METHOD!r}, or map options to values"
        )
    for name, value in given.items():
        _put(options, name, value, "speculative_config")
    for name, value, source in (
        ("method", engine_args.spec_method, "--spec-method"),
        ("model", engine_args.spec_model, "--spec-model"),
        ("num_speculative_tokens", engine_args.spec_tokens, "--spec-tokens"),
    ):
        if value is not None:
            _put(options, name, value, source)
    _drop_names(options)
    nodes = options.pop("num_speculative_tokens", None)
    if nodes is not None:
        _put(options, "max_nodes", nodes, "num_speculative_tokens (SubSpec's max_nodes)")
    source = f"additional_config[{CONFIG_KEY!r}]"
    settings = (engine_args.additional_config or {}).get(CONFIG_KEY, {})
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{source} = {settings!r} must map option names to values")
    for name, value in settings.items():
        _put(options, name, value, source)
    return options


def _drop_names(options: dict[str, Any]) -> None:
    """Remove the method and the model, which no option of ours is, if they name SubSpec."""
    method, model = options.pop("method", None), options.pop("model", None)
    if method not in (None, METHOD) and (method, model) != ("custom_class", PROPOSER):
        raise ConfigError(
            f"speculative method {method!r} and SubSpec are asked for at once; keep one"
            + (f", or {_HOW_BESIDE}" if method in OVER_STREAM else "")
        )
    if model not in (None, PROPOSER):
        raise ConfigError(
            f"speculative model {model!r}: SubSpec drafts with the target's own shadow and takes "
            f"no draft model; leave it out"
        )


def _put(options: dict[str, Any], name: str, value: Any, source: str) -> None:
    name = str(name).replace("-", "_")
    if name in options and options[name] != value:
        raise ConfigError(
            f"option {name!r} is given twice: {options[name]!r}, and {value!r} by {source}; "
            f"keep one"
        )
    options[name] = value
