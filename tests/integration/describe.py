"""What vLLM makes of plain arguments; run here with the plugin, and by itself without."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

PLAIN = {"max_model_len": 128, "skip_tokenizer_init": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
LONG_FORM = {
    "method": "custom_class",
    "model": "vllm_subspec.SubstituteProposer",
    "num_speculative_tokens": 16,
}


def describe(model: str) -> dict[str, Any]:
    """JSON-serialisable facts about a vLLM that nobody asked for SubSpec."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    facts: dict[str, Any] = {}
    for name, speculative_config in (("plain", None), ("ngram", NGRAM)):
        args = EngineArgs(model, speculative_config=speculative_config, **PLAIN)
        config = args.create_engine_config()
        facts[name] = dict(flatten(config, ""))
        facts[f"{name} hash"] = config.compute_hash()
        facts[f"{name} refuses min_p"] = refuses(config, min_p=0.1)
        facts[f"{name} refuses logit_bias"] = refuses(config, logit_bias={3: 1.0})
    facts["overridden"] = [b.name for b in AttentionBackendEnum if b.is_overridden()]
    facts["json"] = parsed(AsyncEngineArgs, "--speculative-config", json.dumps(NGRAM))
    facts["no json"] = parsed(AsyncEngineArgs, "--speculative-config", "medusa")
    facts["method"] = parsed(EngineArgs, "--spec-method", "ngram")
    return facts


def flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every field below ``value`` as (dotted path, text), but for what differs in each run."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from flatten(getattr(value, field.name, "absent"), f"{path}.{field.name}")
    elif not path.endswith((".instance_id", "_port", "_port_list", "_ip")):
        text = repr(value)
        yield path, text.split(" at 0x")[0]


def refuses(config: Any, **sampling: Any) -> bool:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    try:
        SamplingParams(**sampling)._validate_spec_decode(config.speculative_config)
    except VLLMValidationError:
        return True
    return False


def parsed(kind: Any, *arguments: str) -> str:
    """The speculative settings that the command line gives, or "refused"."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = kind.add_cli_args(FlexibleArgumentParser())
    try:
        with redirect_stderr(StringIO()):
            args = parser.parse_args(list(arguments))
    except SystemExit:
        return "refused"
    return repr((args.speculative_config, args.spec_method))


def load_long_form(model: str) -> str:
    """The error of vLLM's custom class loader for our class where the plugin is missing."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    config = EngineArgs(model, speculative_config=LONG_FORM, **PLAIN).create_engine_config()
    try:
        create_custom_proposer(config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


if __name__ == "__main__":
    found = describe(sys.argv[1]) | {"long form": load_long_form(sys.argv[1])}
    print(json.dumps(found))
