"""The acceptance that a mixture of bits predicts, against what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_subspec.draft.tree import TreeShape
from vllm_subspec.errors import ConfigError
from vllm_subspec.plan import Sensitivity, expected_tau

LAYERS = 30


def mixture(chosen: range | list[int], bits: int | None) -> list[int | None]:
    return [bits if layer in chosen else 4 for layer in range(LAYERS)]


MEASURED = [  # SmolLM2-135M, greedy; the head in full precision
    ("all 4-bit", mixture([], 4), (4, 24), 10.2, 10.2),
    ("all 6-bit", mixture(range(30), 6), (4, 24), 17.5, 20.1),  # by kernel
    ("all 8-bit", mixture(range(30), 8), (4, 24), 21.4, 24.2),
    ("self", mixture(range(30), None), (4, 24), 23.2, 24.2),
    ("last 8 8-bit", mixture(range(22, 30), 8), (4, 24), 12.8, 12.8),
    ("first 8 8-bit", mixture(range(8), 8), (4, 24), 10.3, 10.3),
    ("both ends 8-bit", mixture([0, 1, 2, 3, 26, 27, 28, 29], 8), (4, 24), 13.2, 13.2),
    ("last 8 resident", mixture(range(22, 30), None), (4, 24), 14.1, 14.1),
    ("first 8 resident", mixture(range(8), None), (4, 24), 10.5, 10.5),
    ("4-bit chain", mixture([], 4), (1, 24), 6.5, 6.5),
    ("8-bit chain", mixture(range(30), 8), (1, 16), 14.0, 14.0),
    ("8-bit shallow", mixture(range(30), 8), (4, 16), 15.3, 15.3),
    ("4-bit deep", mixture([], 4), (6, 48), 15.5, 15.5),
    ("self deep", mixture(range(30), None), (6, 48), 40.5, 40.5),
]


@pytest.mark.parametrize(
    ("bits", "tree", "low", "high"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED]
)
def test_the_prior_is_within_an_eighth_of_every_measurement(
    bits: list[int | None], tree: tuple[int, int], low: float, high: float
) -> None:
    loss = Sensitivity.prior(LAYERS).level_loss(bits, None)
    assert 7 / 8 * low <= expected_tau(loss, TreeShape(*tree)) <= 9 / 8 * high


@pytest.mark.parametrize(
    ("kl", "tau"),
    [
        pytest.param(0.0736, 10.18, id="135M, 4 bits"),
        pytest.param(0.0097, 17.54, id="135M, 6 bits"),
        pytest.param(0.0025, 21.51, id="135M, 8 bits"),
        pytest.param(0.1198, 7.65, id="454M, 4 bits"),
        pytest.param(0.0124, 16.76, id="454M, 6 bits"),
        pytest.param(0.0037, 20.73, id="454M, 8 bits"),
    ],
)
def test_measured_divergences_predict_the_measured_length(kl: float, tau: float) -> None:
    loss = Sensitivity({4: (kl, 0.0)}).level_loss([4], None)
    assert expected_tau(loss, TreeShape(4, 24)) == pytest.approx(tau, rel=0.15)


@settings(deadline=None, max_examples=80)
@given(
    loss=st.floats(1e-4, 2),
    width=st.integers(1, 8),
    depth=st.integers(1, 48),
    cut=st.none() | st.integers(1, 400),
)
def test_tau_is_the_sum_over_levels(loss: float, width: int, depth: int, cut: int | None) -> None:
    shape = TreeShape(width, depth, cut)
    tau = expected_tau(loss, shape)
    assert 1 <= tau <= 1 + min(depth, shape.node_count)
    chain = TreeShape(1, depth)
    assert expected_tau(loss, chain) == pytest.approx(
        sum(math.exp(-loss * level) for level in range(depth + 1))
    )
    assert expected_tau(loss, TreeShape(width, depth)) >= expected_tau(loss, chain) - 1e-9
    assert expected_tau(loss, TreeShape(width, depth)) >= tau - 1e-9


@settings(deadline=None, max_examples=40)
@given(layers=st.integers(1, 80), data=st.data())
def test_more_bits_never_lose_more(layers: int, data: st.DataObject) -> None:
    prior = Sensitivity.prior(layers)
    low = data.draw(st.lists(st.sampled_from([4, 6]), min_size=layers, max_size=layers))
    high = [data.draw(st.sampled_from([bits, 8, None])) for bits in low]
    assert prior.level_loss(high, None) <= prior.level_loss(low, 4)
    *by_depth, _head = prior.kl[4]
    assert by_depth == sorted(by_depth)
    assert prior.num_layers == layers


def test_variances_add() -> None:
    sensitivity = Sensitivity({4: (0.09, 0.16, 0.0), 8: (0.0, 0.0, 0.0)})
    floor = sensitivity.level_loss([8, 8], 8)
    parts = [sensitivity.level_loss(bits, 8) - floor for bits in ([4, 8], [8, 4], [4, 4])]
    assert parts[1] / parts[0] == pytest.approx(4 / 3)
    assert parts[2] / parts[0] == pytest.approx(5 / 3)


def test_json_round_trip() -> None:
    prior = Sensitivity.prior(5)
    assert Sensitivity.from_json(json.loads(json.dumps(prior.to_json()))) == prior


@pytest.mark.parametrize(
    ("kl", "reason"),
    [
        ({}, "give, for each number of bits"),
        ({4: (0.1, 0.2), 8: (0.1,)}, r"\[1, 2\] units"),
        ({4: (0.1, -0.2)}, r"kl\[4\] is -0.2"),
        ({4: (0.1, float("nan"))}, r"kl\[4\] is nan"),
    ],
)
def test_divergences_that_make_no_sense(kl: dict[int, tuple[float, ...]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Sensitivity(kl)


def test_a_model_without_layers() -> None:
    with pytest.raises(ConfigError, match="0 layers"):
        Sensitivity.prior(0)


@pytest.mark.parametrize("value", [{}, {"kl": [1]}, {"kl": {"four": [1, 2]}}, {"kl": {}, "x": 1}])
def test_json_that_is_no_sensitivity(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="ensitivity"):
        Sensitivity.from_json(value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUBSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(folder: Path, value: float, shards: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        save_file({f"w{shard}": torch.full((4, 4), value)}, folder / f"{shard}.safetensors")
    return folder


def test_a_measured_checkpoint_is_found_again(tmp_path: Path, cache: Path) -> None:
    model = checkpoint(tmp_path / "model", 1.0)
    assert Sensitivity.load_for(model) is None
    measured = Sensitivity({4: (0.1, 0.2, 0.3), 8: (0.01, 0.02, 0.03)})
    path = measured.store_for(model)
    assert path.parent == cache / "sensitivity"
    assert Sensitivity.load_for(model) == measured
    assert Sensitivity.load_for(checkpoint(tmp_path / "copy", 1.0)) == measured


def test_a_fine_tune_is_another_checkpoint(tmp_path: Path, cache: Path) -> None:
    Sensitivity.prior(2).store_for(checkpoint(tmp_path / "model", 1.0))
    assert Sensitivity.load_for(checkpoint(tmp_path / "tuned", 1.5)) is None
    assert Sensitivity.load_for(checkpoint(tmp_path / "larger", 1.0, shards=3)) is None


@pytest.mark.usefixtures("cache")
def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 1.0)
    path = Sensitivity.prior(2).store_for(model)
    path.write_text(path.read_text()[:20])
    with pytest.raises(ConfigError, match=rf"{path} is damaged .*: delete it"):
        Sensitivity.load_for(model)


@pytest.mark.usefixtures("cache")
def test_a_measurement_that_another_could_have_written_is_not_taken(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", 1.0)
    path = Sensitivity.prior(2).store_for(model)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=rf"{path} .*mode 0600.* delete it"):
        Sensitivity.load_for(model)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{path} .*symbolic links.* delete it"):
        Sensitivity.load_for(model)


@pytest.mark.usefixtures("cache")
def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        Sensitivity.load_for(tmp_path)
