"""From what a user writes to what vLLM understands: the only place that parses engine arguments.

``--speculative-config subspec``, its JSON forms, ``--spec-method subspec`` and vLLM's long form
with ``custom_class`` all become: our worker, vLLM's ``custom_class`` method, and the settings in
``additional_config["subspec"]``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm_subspec.config import SubSpecConfig
from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

METHOD = "subspec"
CONFIG_KEY = "subspec"
PROPOSER = "vllm_subspec.SubstituteProposer"
_CPU_WORKER = "vllm_subspec.integration.worker.SubSpecCPUWorker"


def parse_speculative_config(text: str) -> dict[str, Any] | None:
    """``--speculative-config``: the bare word ``subspec``, or JSON as vLLM takes it."""
    if text in ("None", ""):
        return None
    if text.strip() == METHOD:
        return {"method": METHOD}
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def asks_for_subspec(engine_args: Any) -> bool:
    """Whether these ``EngineArgs`` ask for SubSpec in any of its forms."""
    config = engine_args.speculative_config or {}
    if config == METHOD or engine_args.spec_method == METHOD:
        return True
    if not isinstance(config, Mapping):
        return False
    model = config.get("model") or engine_args.spec_model
    return config.get("method") == METHOD or model == PROPOSER


def translate(engine_args: Any) -> None:
    """Rewrite ``EngineArgs`` in place; a second call finds nothing left to do.

    Raises:
        ConfigError: unknown or contradictory options.
        UnsupportedError: an engine feature that SubSpec does not serve exactly.
    """
    additional = dict(engine_args.additional_config or {})
    if engine_args.worker_cls == _CPU_WORKER and isinstance(additional.get(CONFIG_KEY), dict):
        return
    options = _options(engine_args, additional)
    config = SubSpecConfig.from_options(options)
    _refuse(engine_args, config)
    nodes = TreeShape(config.width, config.depth, config.max_nodes).node_count
    _check_token_budget(engine_args, nodes)
    engine_args.additional_config = additional | {CONFIG_KEY: config.to_options()}
    engine_args.worker_cls = _CPU_WORKER
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = (
        {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": nodes}
        if config.speculate
        else None
    )
    if not engine_args.enforce_eager:
        logger.info("SubSpec runs the model eagerly: draft view and streaming hooks are Python")
        engine_args.enforce_eager = True


def _options(engine_args: Any, additional: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options from every place they may stand in, each at most once."""
    given = engine_args.speculative_config or {}
    options = {} if given == METHOD else dict(given)
    if engine_args.spec_tokens is not None:
        _put(options, "num_speculative_tokens", engine_args.spec_tokens, "--spec-tokens")
    for name in ("method", "model"):
        options.pop(name, None)
    nodes = options.pop("num_speculative_tokens", None)
    if nodes is not None:
        _put(options, "max_nodes", nodes, "num_speculative_tokens (SubSpec: max_nodes)")
    for name, value in dict(additional.get(CONFIG_KEY) or {}).items():
        _put(options, name, value, f"additional_config[{CONFIG_KEY!r}]")
    return options


def _put(options: dict[str, Any], name: str, value: Any, source: str) -> None:
    if name in options and options[name] != value:
        raise ConfigError(
            f"option {name!r} is given twice: {options[name]!r}, and {value!r} by {source}; "
            f"keep one"
        )
    options[name] = value


def _refuse(engine_args: Any, config: SubSpecConfig) -> None:
    """What cannot be served exactly yet, by name, with the flag to change."""
    refused: list[tuple[bool, str]] = [
        (
            engine_args.worker_cls != "auto",
            f"--worker-cls {engine_args.worker_cls}: SubSpec brings its own worker",
        ),
        (
            engine_args.pipeline_parallel_size > 1,
            "--pipeline-parallel-size above 1: the draft needs every layer in one process",
        ),
        (
            engine_args.decode_context_parallel_size > 1
            or engine_args.prefill_context_parallel_size > 1,
            "context parallelism: a tree's keys and values lie on one rank",
        ),
        (engine_args.enable_dbo, "--enable-dbo: SubSpec's batches cannot be split"),
        (
            engine_args.quantization is not None,
            f"--quantization {engine_args.quantization}: SubSpec makes its own low-bit shadow of "
            f"an unquantised target",
        ),
        (
            engine_args.kv_transfer_config is not None
            or engine_args.kv_offloading_size is not None,
            "KV transfer and KV offloading: they may copy blocks before a tree is compacted",
        ),
        (engine_args.enable_lora, "--enable-lora: the shadow is of the base model"),
        (
            engine_args.cpu_offload_gb > 0 or engine_args.offload_backend not in ("auto", None),
            "vLLM's own weight offloading: SubSpec streams weights itself",
        ),
        (
            bool(engine_args.logits_processors) and config.speculate,
            "custom logits processors: vLLM does not run them under speculation",
        ),
        (
            engine_args.runner == "pooling",
            "--runner pooling: SubSpec speculates on generated text",
        ),
        (
            config.stream == "host",
            'stream="host": weights in pinned RAM are for CUDA, which this release does not '
            'serve; on a CPU use stream="disk", or "off"',
        ),
    ]
    for applies, reason in refused:
        if applies:
            raise UnsupportedError(f"SubSpec does not work with {reason}")


def _check_token_budget(engine_args: Any, nodes: int) -> None:
    budget = engine_args.max_num_batched_tokens
    if budget is not None and nodes + 1 > budget:
        raise ConfigError(
            f"a tree of {nodes} nodes and its root never fit --max-num-batched-tokens {budget}: "
            f"raise it to {nodes + 1}, or set max_nodes to {budget - 1}"
        )


def accept_subspec_on_command_line(parser: Any) -> None:
    """Let a built parser take ``--speculative-config subspec`` and ``--spec-method subspec``."""
    for action in parser._actions:
        if "--speculative-config" in action.option_strings:
            action.type = _falling_back(parse_speculative_config)
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, METHOD]


def _falling_back(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def speculative_config(text: str) -> Any:
        try:
            return parse(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} is neither 'subspec' nor a JSON object: {error}") from error

    return speculative_config
