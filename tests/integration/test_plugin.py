"""Every way to ask for SubSpec starts the same thing; unasked, vLLM is as it was."""

from __future__ import annotations

import json
import pickle
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

from vllm_subspec import SubSpecConfig
from vllm_subspec.errors import ConfigError
from vllm_subspec.integration import patches
from vllm_subspec.integration.plugin import register
from vllm_subspec.integration.proposer import SubstituteProposer

pytestmark = pytest.mark.engine

PROPOSER = "vllm_subspec.SubstituteProposer"
WORKER = "vllm_subspec.integration.worker.SubSpecCPUWorker"
LONG_FORM = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 16}
Make = Callable[[str], EngineArgs]


def python(speculative_config: Any, kind: type[EngineArgs] = EngineArgs, **more: Any) -> Make:
    """What ``LLM(model, speculative_config=...)`` and ``AsyncLLM`` build."""
    more |= {"skip_tokenizer_init": True}
    return lambda model: kind(model, speculative_config=speculative_config, **more)


def command(*arguments: str, kind: type[EngineArgs] = EngineArgs) -> Make:
    """What an entry point with vLLM's engine options builds."""

    def make(model: str) -> EngineArgs:
        parser = kind.add_cli_args(FlexibleArgumentParser())
        common = ["--model", model, "--skip-tokenizer-init"]
        return kind.from_cli_args(parser.parse_args([*common, *arguments]))

    return make


def serve(*arguments: str) -> Make:
    """What ``vllm serve`` builds."""

    def make(model: str) -> EngineArgs:
        parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
        args = parser.parse_args(["--skip-tokenizer-init", *arguments])
        args.model = model
        return AsyncEngineArgs.from_cli_args(args)

    return make


DEFAULTS: dict[str, Make] = {
    "LLM, the word": python("subspec"),
    "LLM, a mapping": python({"method": "subspec"}),
    "AsyncLLM": python({"method": "subspec"}, AsyncEngineArgs),
    "spec_method": python(None, spec_method="subspec"),
    "class alone": python({"model": PROPOSER}),
    "additional_config": python(None, additional_config={"subspec": {}}),
    "--speculative-config subspec": command("--speculative-config", "subspec"),
    "--speculative-config=subspec": command("--speculative-config=subspec"),
    "--speculative_config": command("--speculative_config", " subspec "),
    "-sc subspec": command("-sc", "subspec"),
    "a JSON string": command("-sc", '"subspec"'),
    "JSON": command("--speculative-config", '{"method": "subspec"}'),
    "dotted": command("--speculative-config.method", "subspec"),
    "--spec-method": command("--spec-method", "subspec"),
    "AsyncEngineArgs' command line": command("-sc", "subspec", kind=AsyncEngineArgs),
    "vllm serve, the word": serve("--speculative-config", "subspec"),
    "vllm serve, --spec-method": serve("--spec-method", "subspec"),
}
DEPTH_8: dict[str, Make] = {
    "LLM": python({"method": "subspec", "depth": 8}),
    "JSON": command("-sc", '{"method": "subspec", "depth": 8}'),
    "dotted": command("-sc.method", "subspec", "-sc.depth", "8"),
    "dotted, long": serve(
        "--speculative-config.method", "subspec", "--speculative-config.depth", "8"
    ),
    "method and options apart": command("--spec-method", "subspec", "-sc.depth", "8"),
    "--additional-config": command("-sc", "subspec", "--additional-config.subspec.depth", "8"),
    "twice the same": python(
        {"method": "subspec", "depth": 8}, additional_config={"subspec": {"depth": 8}}
    ),
}
SIXTEEN_NODES: dict[str, Make] = {
    "vLLM's long form": python(LONG_FORM),
    "vLLM's long form in JSON": command("-sc", json.dumps(LONG_FORM)),
    "vLLM's long form in three flags": command(
        "--spec-method", "custom_class", "--spec-model", PROPOSER, "--spec-tokens", "16"
    ),
    "max_nodes": python({"method": "subspec", "max_nodes": 16}),
    "dashes": python({"method": "subspec", "max-nodes": 16}),
    "--spec-tokens": command("--spec-method", "subspec", "--spec-tokens", "16"),
    "num_speculative_tokens": python({"method": "subspec", "num_speculative_tokens": 16}),
}
FORMS = [
    *(pytest.param(make, {}, id=f"defaults: {name}") for name, make in DEFAULTS.items()),
    *(pytest.param(make, {"depth": 8}, id=f"depth: {name}") for name, make in DEPTH_8.items()),
    *(
        pytest.param(make, {"max_nodes": 16}, id=f"nodes: {name}")
        for name, make in SIXTEEN_NODES.items()
    ),
]


def started(config: VllmConfig) -> dict[str, Any]:
    """All that tells one start from another."""
    speculative = config.speculative_config
    return {
        "speculative": speculative
        and (speculative.method, speculative.model, speculative.num_speculative_tokens),
        "worker": config.parallel_config.worker_cls,
        "additional": config.additional_config,
        "eager": config.model_config.enforce_eager,
        "hash": config.compute_hash(),
    }


@pytest.mark.parametrize(("make", "options"), FORMS)
def test_all_forms_start_the_same(make: Make, options: dict[str, Any], llama: str) -> None:
    found = started(make(llama).create_engine_config())
    settings = SubSpecConfig(**options)
    nodes = settings.node_count
    assert found["speculative"] == ("custom_class", PROPOSER, nodes)
    assert found["worker"] == WORKER
    assert found["additional"] == {"subspec": settings.to_options()}
    assert found["eager"]
    same = python({"method": "subspec", **options})(llama).create_engine_config()
    assert found["hash"] == same.compute_hash()


def test_a_yaml_file_starts_the_same(llama: str, tmp_path: Path) -> None:
    words, options = tmp_path / "words.yaml", tmp_path / "options.yaml"
    words.write_text("speculative-config: subspec\n")
    options.write_text("speculative-config:\n  method: subspec\n  depth: 8\n  stream_dir: ~/x\n")
    assert started(serve("--config", str(words))(llama).create_engine_config()) == started(
        python("subspec")(llama).create_engine_config()
    )
    config = serve("--config", str(options))(llama).create_engine_config()
    assert config.additional_config["subspec"]["depth"] == 8
    assert config.additional_config["subspec"]["stream_dir"] == str(Path.home() / "x")


def test_without_speculation_only_the_streaming_stays(llama: str) -> None:
    for make in (
        python({"method": "subspec", "speculate": False}),
        command("-sc.method", "subspec", "-sc.speculate", "false"),
    ):
        args = make(llama)
        for _ in range(2):
            found = started(args.create_engine_config())
            assert found["speculative"] is None
            assert found["worker"] == WORKER
            assert found["additional"]["subspec"]["speculate"] is False


def test_settings_reach_other_processes(llama: str) -> None:
    config = python({"method": "subspec", "stream_dir": "spill", "width": 2})(
        llama
    ).create_engine_config()
    for travelled in (
        pickle.loads(pickle.dumps(config)).additional_config,
        json.loads(json.dumps(config.additional_config)),
    ):
        settings = SubSpecConfig(**travelled["subspec"])
        assert settings == SubSpecConfig(stream_dir="spill", width=2)
        assert settings.stream_dir == Path("spill")


def test_a_second_engine_config_is_the_same(llama: str) -> None:
    given = {"method": "subspec", "depth": 4}
    args = python(given)(llama)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert started(first) == started(second)
    assert given == {"method": "subspec", "depth": 4}, "the user's own mapping was changed"


def test_other_additional_settings_stay(llama: str) -> None:
    given = {"other": 1}
    config = python("subspec", additional_config=given)(llama).create_engine_config()
    assert config.additional_config == {"other": 1, "subspec": SubSpecConfig().to_options()}
    assert given == {"other": 1}


def test_the_hash_of_the_configuration_tells_settings_apart(llama: str) -> None:
    hashes = {
        python({"method": "subspec", "bits": bits})(llama).create_engine_config().compute_hash()
        for bits in (4, 8)
    }
    assert len(hashes) == 2


def test_the_help_of_vllm_serve_still_builds() -> None:
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    assert "--speculative-config" in parser.format_usage()
    (action,) = (a for a in parser._actions if "--spec-method" in a.option_strings)
    assert "subspec" in action.choices
    assert "ngram" in action.choices
    FlexibleArgumentParser._search_keyword = "all"
    try:
        assert "--spec-method" in parser.format_help()
    finally:
        FlexibleArgumentParser._search_keyword = None


@pytest.mark.parametrize("text", ["subspek", "{'method': 'subspec'}", '{"method": '])
def test_a_wrong_word_on_the_command_line_is_named(
    text: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command("--speculative-config", text)(llama)
    assert f"{text!r} is neither 'subspec' nor JSON" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["None", ""])
def test_none_on_the_command_line_asks_for_nothing(text: str, llama: str) -> None:
    config = command("--speculative-config", text)(llama).create_engine_config()
    assert started(config)["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.additional_config == {}


# -- installed but unused --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_plugin(llama: str) -> dict[str, Any]:
    describe = runpy.run_path(str(Path(__file__).with_name("describe.py")))["describe"]
    facts: dict[str, Any] = json.loads(json.dumps(describe(llama)))
    return facts


@pytest.mark.parametrize("of", ["plain", "ngram"])
def test_unasked_every_field_is_vllms_own(
    of: str, with_plugin: dict[str, Any], without_plugin: dict[str, Any]
) -> None:
    assert len(with_plugin[of]) > 300
    assert with_plugin[of] == without_plugin[of]
    assert with_plugin[f"{of} hash"] == without_plugin[f"{of} hash"]


@pytest.mark.parametrize("fact", ["json", "no json", "method", "overridden"])
def test_unasked_command_line_and_attention_are_vllms_own(
    fact: str, with_plugin: dict[str, Any], without_plugin: dict[str, Any]
) -> None:
    assert with_plugin[fact] == without_plugin[fact]
    expected = {"no json": "refused", "overridden": []}
    assert with_plugin[fact] == expected.get(fact, with_plugin[fact])


@pytest.mark.parametrize("parameter", ["min_p", "logit_bias"])
def test_only_under_subspec_are_min_p_and_logit_bias_served(
    parameter: str, with_plugin: dict[str, Any], without_plugin: dict[str, Any], llama: str
) -> None:
    for facts in (with_plugin, without_plugin):
        assert facts[f"ngram refuses {parameter}"]
        assert not facts[f"plain refuses {parameter}"]
    ours = python("subspec")(llama).create_engine_config().speculative_config
    SamplingParams(min_p=0.1, logit_bias={3: 1.0})._validate_spec_decode(ours)


def test_registering_again_changes_nothing() -> None:
    before = EngineArgs.create_engine_config, EngineArgs.add_cli_args
    register()
    patches.apply_patches()
    assert (EngineArgs.create_engine_config, EngineArgs.add_cli_args) == before


# -- the proposer ----------------------------------------------------------------------------------


def test_without_the_plugin_the_long_form_says_so(without_plugin: dict[str, Any]) -> None:
    found = without_plugin["long form"]
    assert found.startswith("ConfigError: vllm_subspec.SubstituteProposer, by exactly this name")
    assert "works only with the plugin 'subspec'" in found
    assert "VLLM_PLUGINS" in found


def test_vllm_loads_the_proposer(llama: str) -> None:
    proposer = create_custom_proposer(python(LONG_FORM)(llama).create_engine_config())
    assert isinstance(proposer, SubstituteProposer)
    with pytest.raises(RuntimeError, match="SubSpec drafts in its runner"):
        proposer.propose([[1]], None, None)


def test_an_untranslated_proposer_refuses(llama: str) -> None:
    plain = EngineArgs(llama, skip_tokenizer_init=True).create_engine_config()
    proposer = SubstituteProposer(plain)
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        _ = proposer.propose
