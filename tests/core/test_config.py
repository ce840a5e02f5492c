"""Settings: what is accepted, how it travels, and what a refusal says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_subspec import SubSpecConfig
from vllm_subspec.config import PRESETS
from vllm_subspec.draft import tree
from vllm_subspec.errors import ConfigError
from vllm_subspec.shadow import formats, quantizers

OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "preset": st.sampled_from([None, *PRESETS]),
    "width": st.integers(1, 32),
    "depth": st.integers(1, 256),
    "max_nodes": st.none() | st.integers(1, 8192),
    "draft_temperature": st.floats(1e-3, 10) | st.integers(1, 10),
    "noise_coupling": st.booleans(),
    "bits": st.sampled_from([4, 8]),
    "group_size": st.sampled_from([32, 64, 128, 256]),
    "quantizer": st.sampled_from(["hqq", "rtn"]),
    "resident_layers": st.integers(0, 200),
    "stream": st.sampled_from(["auto", "disk", "host"]),
    "stream_dir": st.none() | st.sampled_from(["/a/b", "a", "~/c", "."]),
    "slots": st.integers(1, 1024),
    "emulate_link": st.none() | st.floats(1, 1e12),
    "speculate": st.booleans(),
}


def test_defaults() -> None:
    config = SubSpecConfig()
    assert (config.width, config.depth, config.max_nodes) == (4, 16, None)
    assert (config.bits, config.group_size, config.quantizer) == (4, 64, "hqq")
    assert (config.stream, config.resident_layers, config.speculate) == ("auto", 0, True)
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
            assert getattr(config, name) == value


def test_it_is_frozen() -> None:
    config = SubSpecConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.width = 3
    assert hash(config) == hash(SubSpecConfig())


WRONG: dict[str, list[Any]] = {
    "preset": ["eagle", 3],
    "width": [0, 33, 4.0, "4", True, None],
    "depth": [0, 257, 16.5, "16"],
    "max_nodes": [0, 8193, "64"],
    "draft_temperature": [0, -1, 10.5, float("nan"), float("inf"), "0.2"],
    "noise_coupling": [1, "true", None],
    "bits": [2, 3, 5, 16, "4", None],
    "group_size": [0, 16, 48, 100, 512, "64"],
    "quantizer": ["awq", "", None],
    "resident_layers": [-1, 1.5, "2"],
    "stream": ["tape", True, None],
    "stream_dir": ["", 3, "a\0b", ["a"], "~nobody-has-this-name/x"],
    "slots": [0, 1025, "3"],
    "emulate_link": [0, -1.0, float("inf"), "1G"],
    "speculate": [0, "no", None],
}


def test_every_option_has_wrong_values_here() -> None:
    assert tuple(WRONG) == SubSpecConfig.option_names()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named_with_its_reason(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        SubSpecConfig(**{name: value})
    start = f"option {name!r} = {value!r}: "
    message = str(refused.value)
    assert message.startswith(start)
    assert len(message) > len(start) + 10


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        SubSpecConfig(width=0, depht=3, bits=5)
    message = str(refused.value)
    assert "option 'width' = 0: " in message
    assert "option 'bits' = 5: " in message
    assert (
        "unknown option 'depht': did you mean 'depth'? known options are preset, width" in message
    )
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
    assert set(get_args(_annotation("bits"))) == set(formats._FORMATS)
    with pytest.raises(ConfigError):
        SubSpecConfig(max_nodes=tree.MAX_WIDTH * tree.MAX_DEPTH + 1)
    SubSpecConfig(max_nodes=tree.MAX_WIDTH * tree.MAX_DEPTH)
