"""Settings: what is accepted, how it travels, and what a refusal says."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from subspec_kernels import lowbit_linear

from vllm_subspec import SubSpecConfig
from vllm_subspec.config import PRESETS
from vllm_subspec.draft import tree
from vllm_subspec.errors import ConfigError
from vllm_subspec.shadow import formats, quantizers

AUTO = st.sampled_from([None, "auto"])
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    # mlspecqd has MXFP4, which goes with no budget and with one size of groups.
    "preset": st.sampled_from([None, *sorted(PRESETS.keys() - {"mlspecqd"})]),
    "memory_budget": AUTO | st.sampled_from(["8GiB", "70%"]) | st.floats(0, 1) | st.integers(0),
    "width": AUTO | st.integers(1, 32),
    "depth": AUTO | st.integers(1, 256),
    "max_nodes": AUTO | st.integers(1, 8192),
    "draft_temperature": st.floats(1e-3, 10) | st.integers(1, 10),
    "noise_coupling": st.booleans(),
    "adaptive_depth": st.booleans(),
    "post_speculation": st.booleans(),
    "share_layers": st.booleans(),
    "share_kv": st.booleans(),
    "bits": AUTO | st.sampled_from([4, 6, 8]),
    "group_size": st.sampled_from([32, 64, 128, 256]),
    "quantizer": st.sampled_from(["hqq", "rtn"]),
    "resident_layers": AUTO | st.integers(0, 200),
    "stream": st.sampled_from(["auto", "disk", "host"]),
    "stream_dir": st.none() | st.sampled_from(["/a/b", "a", "~/c", "."]),
    "slots": AUTO | st.integers(1, 1024),
    "emulate_link": st.none() | st.floats(1, 1e12),
    "speculate": st.booleans(),
    "unmeasured_cuda": st.booleans(),
}
PLANNED = ("width", "depth", "max_nodes", "bits", "resident_layers", "slots")


def test_defaults() -> None:
    config = SubSpecConfig()
    assert [getattr(config, name) for name in PLANNED] == [None] * len(PLANNED)
    assert config.memory_budget is None
    assert (config.group_size, config.quantizer, config.draft_temperature) == (64, "hqq", 0.2)
    assert (config.stream, config.speculate, config.post_speculation) == ("auto", True, True)
    assert all(field.description for field in SubSpecConfig.model_fields.values())


def test_every_option_has_a_strategy_here() -> None:
    assert tuple(OPTIONS) == SubSpecConfig.option_names()


@settings(deadline=None, max_examples=80)
@given(st.fixed_dictionaries({}, optional=OPTIONS))
def test_options_travel_and_come_back(options: dict[str, Any]) -> None:
    config = SubSpecConfig(**options)
    sent = config.to_options()
    assert tuple(sent) == SubSpecConfig.option_names()
    assert SubSpecConfig(**json.loads(json.dumps(sent))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    for name, value in options.items():
        if name != "stream_dir":
            planned = name in PLANNED and value == "auto"
            assert getattr(config, name) == (None if planned else value)


@pytest.mark.parametrize("name", PLANNED)
def test_auto_leaves_an_option_to_the_plan(name: str) -> None:
    assert SubSpecConfig(**{name: "auto"}) == SubSpecConfig(**{name: None}) == SubSpecConfig()


@pytest.mark.parametrize("name", ["quantizer", "group_size", "speculate", "draft_temperature"])
def test_other_options_are_not_planned(name: str) -> None:
    with pytest.raises(ConfigError, match=f"option '{name}' = 'auto': "):
        SubSpecConfig(**{name: "auto"})


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 64),
        ({"width": 3}, 48),
        ({"depth": 5}, 20),
        ({"width": 3, "depth": 5}, 15),
        ({"max_nodes": 9}, 9),
        ({"max_nodes": 900}, 64),
        ({"width": 2, "depth": 3, "max_nodes": 6}, 6),
        ({"preset": "specexec"}, 64),
    ],
)
def test_node_count_is_the_most_that_verification_sees(options: Any, count: int) -> None:
    assert SubSpecConfig(**options).node_count == count


def test_it_is_frozen() -> None:
    config = SubSpecConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.width = 3
    assert hash(config) == hash(SubSpecConfig())


WRONG: dict[str, list[Any]] = {
    "preset": ["eagle", 3],
    "memory_budget": [["8GiB"], b"8GiB", True, float("nan"), float("inf")],
    "width": [0, 33, 4.0, "4", True, "Auto"],
    "depth": [0, 257, 16.5, "16"],
    "max_nodes": [0, 8193, "64"],
    "draft_temperature": [0, -1, 10.5, float("nan"), float("inf"), "0.2"],
    "noise_coupling": [1, "true", None],
    "adaptive_depth": [0, "no", None],
    "post_speculation": [1, "yes", None],
    "share_layers": ["yes", 1],
    "share_kv": ["no", 0],
    "bits": [1, 5, 16, "4", "fp4", True],
    "group_size": [0, 16, 48, 100, 512, "64"],
    "quantizer": ["awq", "", None],
    "resident_layers": [-1, 1.5, "2"],
    "stream": ["tape", True, None],
    "stream_dir": ["", 3, "a\0b", ["a"], "~nobody-has-this-name/x"],
    "slots": [0, 1025, "3"],
    "emulate_link": [0, -1.0, float("inf"), "1G"],
    "speculate": [0, "no", None],
    "unmeasured_cuda": [1, "yes", None],
}


def test_every_option_has_wrong_values_here() -> None:
    assert tuple(WRONG) == SubSpecConfig.option_names()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named_with_its_reason(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        SubSpecConfig(**{name: value})
    # One reason for each type that the option may have, where it may have several.
    start = re.match(rf"option '{name}(\.\w+)?' = {re.escape(repr(value))}: ", str(refused.value))
    assert start
    assert len(str(refused.value)) > start.end() + 10


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        SubSpecConfig(width=0, depht=3, bits=5)
    message = str(refused.value)
    assert "option 'width' = 0: " in message
    assert "option 'bits' = 5: " in message
    assert "unknown option 'depht': did you mean 'depth'? known options are preset, " in message
    assert message.count("; ") == 2


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        SubSpecConfig(zebra=1)
    assert "did you mean" not in str(refused.value)
    for name in SubSpecConfig.option_names():
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"speculate": False, "stream": "off"}, "leaves nothing to do"),
        ({"stream": "off", "stream_dir": "a"}, "stream_dir would have no effect"),
        (
            {"stream": "off", "stream_dir": "a", "emulate_link": 1e9},
            "stream_dir and emulate_link would have no effect",
        ),
    ],
)
def test_options_that_cancel_out(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as refused:
        SubSpecConfig(**options)
    assert "stream" in str(refused.value)


def test_the_spill_folder_is_a_path_as_users_write_them() -> None:
    assert SubSpecConfig(stream_dir="~/x").stream_dir == Path.home() / "x"
    assert SubSpecConfig(stream_dir=Path("x")).stream_dir == Path("x")
    assert SubSpecConfig(stream_dir=".").to_options()["stream_dir"] == "."


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_defaults(name: str) -> None:
    config = SubSpecConfig(preset=name)
    for option, value in PRESETS[name].items():
        assert getattr(config, option) == value
    assert SubSpecConfig(preset=name, width=2, depth=3).width == 2
    assert SubSpecConfig(**config.to_options()) == config
    assert set(PRESETS) | {None} == {*get_args(get_args(_annotation("preset"))[0]), None}


@pytest.mark.parametrize("bits", [2, 3, "mxfp4"])
def test_bits_without_a_kernel_are_taken_when_asked_for_and_not_planned(bits: Any) -> None:
    config = SubSpecConfig(bits=bits, group_size=32)
    assert SubSpecConfig(**json.loads(json.dumps(config.to_options()))) == config
    with pytest.raises(ConfigError, match=f"bits = {bits!r} .*memory_budget.* 4, 6 or 8"):
        SubSpecConfig(bits=bits, group_size=32, memory_budget="8GiB")


def test_mxfp4_has_groups_of_32() -> None:
    with pytest.raises(ConfigError, match=r"mxfp4.* not 64: set group_size to 32"):
        SubSpecConfig(bits="mxfp4")


def _annotation(name: str) -> Any:
    return SubSpecConfig.model_fields[name].annotation


def test_ranges_are_those_of_the_rooms_that_use_them() -> None:
    """The settings are checked before any room is imported, so each limit stands twice."""
    limits = {
        name: next(m.le for m in SubSpecConfig.model_fields[name].metadata if hasattr(m, "le"))
        for name in ("width", "depth")
    }
    assert limits == {"width": tree.MAX_WIDTH, "depth": tree.MAX_DEPTH}
    assert get_args(_annotation("group_size")) == formats.GROUP_SIZES
    assert set(get_args(_annotation("quantizer"))) == set(quantizers._QUANTIZERS)
    bits, nothing = get_args(_annotation("bits"))
    assert (set(get_args(bits)), nothing) == (set(lowbit_linear.BITS), type(None))
    with pytest.raises(ConfigError):
        SubSpecConfig(max_nodes=tree.MAX_WIDTH * tree.MAX_DEPTH + 1)
    SubSpecConfig(max_nodes=tree.MAX_WIDTH * tree.MAX_DEPTH)
