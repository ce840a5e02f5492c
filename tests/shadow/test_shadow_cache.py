from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hqq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_subspec.errors import ShadowCacheError, UnsupportedError
from vllm_subspec.shadow import build, packing
from vllm_subspec.shadow.build import build_shadows
from vllm_subspec.shadow.cache import ShadowCache, shadow_key, weight_digest
from vllm_subspec.shadow.formats import ShadowSettings
from vllm_subspec.shadow.linear import ShadowLinear

pytestmark = pytest.mark.usefixtures("torch_kernels")

BF16 = torch.bfloat16
RTN4, RTN8 = ShadowSettings(4, 64, "rtn"), ShadowSettings(8, 64, "rtn")


def layer(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "self_attn.o_proj": torch.randn(16, 64).to(BF16),
        "mlp.down_proj": torch.randn(32, 128).to(BF16),
    }


@pytest.fixture
def cache(tmp_path: Path) -> ShadowCache:
    return ShadowCache(tmp_path / "shadows")


def stored(cache: ShadowCache, chosen: ShadowSettings = RTN4) -> tuple[str, Path]:
    """Put ``layer()`` in the cache; its key and file."""
    build_shadows(layer(), chosen, BF16, cache, "layers.0")
    key = shadow_key(layer(), chosen, BF16)
    return key, cache.directory / f"{key}.safetensors"


def assert_same(ours: dict[str, ShadowLinear], other: dict[str, ShadowLinear]) -> None:
    assert ours.keys() == other.keys()
    for name, linear in ours.items():
        assert linear.settings == other[name].settings
        for part, tensor in linear.tensors().items():
            assert tensor.dtype == other[name].tensors()[part].dtype
            assert torch.equal(tensor, other[name].tensors()[part])


@contextmanager
def full_disk(limit: int = 512) -> Iterator[None]:
    """Writing a file past ``limit`` bytes fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("chosen", [RTN4, RTN8, ShadowSettings(4, 32, "hqq")], ids=str)
def test_round_trip_is_bit_exact(
    cache: ShadowCache, chosen: ShadowSettings, dtype: torch.dtype
) -> None:
    made, from_cache = build_shadows(layer(), chosen, dtype, cache, "layers.0")
    assert not from_cache
    again, from_cache = build_shadows(layer(), chosen, dtype, cache, "layers.0")
    assert from_cache
    assert_same(made, again)
    x = torch.randn(3, 64).to(dtype)
    assert torch.equal(made["self_attn.o_proj"](x), again["self_attn.o_proj"](x))


def test_a_hit_does_not_quantize(cache: ShadowCache, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(cache)
    monkeypatch.delattr(build, "quantize_linear")
    assert build_shadows(layer(), RTN4, BF16, cache, "layers.0")[1]


def test_without_a_cache_nothing_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        shadows, from_cache = build_shadows(layer(), RTN4, BF16, None, "layers.0")
        assert shadows.keys() == layer().keys()
        assert not from_cache
    assert not list(tmp_path.iterdir())


def test_an_absent_key_is_none(cache: ShadowCache) -> None:
    assert cache.load("0" * 64, RTN4, BF16) is None


def test_files_are_private_and_whole(cache: ShadowCache) -> None:
    _, path = stored(cache)
    assert list(cache.directory.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ShadowCacheError, match="SUBSPEC_CACHE"):
        ShadowCache(tmp_path / "link")


def test_every_part_of_the_recipe_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    hqq4 = ShadowSettings(4, 64, "hqq")
    weights = layer()
    first = weights["mlp.down_proj"]
    altered = first.clone()
    altered[0, 0] += 1
    keys = [
        shadow_key(weights, hqq4, BF16),
        shadow_key(weights, hqq4, torch.float16),
        shadow_key(weights, RTN4, BF16),
        shadow_key(weights, RTN8, BF16),
        shadow_key(weights, ShadowSettings(4, 32, "hqq"), BF16),
        shadow_key(weights | {"mlp.down_proj": altered}, hqq4, BF16),
        shadow_key(weights | {"mlp.down_proj": first.view(128, 32)}, hqq4, BF16),
        shadow_key(weights | {"mlp.down_proj": first.view(torch.float16)}, hqq4, BF16),
        shadow_key(weights | {"mlp.up_proj": first}, hqq4, BF16),
        shadow_key({"o": weights["self_attn.o_proj"], "mlp.down_proj": first}, hqq4, BF16),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_int4_layout", lambda: "another processor's")
        keys.append(shadow_key(weights, hqq4, BF16))
    with monkeypatch.context() as patch:
        patch.setattr(hqq, "__version__", "999")
        keys.append(shadow_key(weights, hqq4, BF16))
    assert len(set(keys)) == len(keys)


def test_a_key_depends_on_nothing_else() -> None:
    weights = layer()
    key = shadow_key(weights, RTN4, BF16)
    assert key == shadow_key(dict(reversed(weights.items())), RTN4, BF16)
    assert key == shadow_key({n: weight_digest(w) for n, w in weights.items()}, RTN4, BF16)
    strided = {name: weight.T.contiguous().T for name, weight in weights.items()}
    assert key == shadow_key(strided, RTN4, BF16)
    # 8 bits have neither groups nor a quantizer to choose.
    assert shadow_key(weights, RTN8, BF16) == shadow_key(
        weights, ShadowSettings(8, 32, "hqq"), BF16
    )


@given(data=st.data())
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_flipped_bit_anywhere_is_an_error(cache: ShadowCache, data: st.DataObject) -> None:
    key, path = stored(cache)
    good = path.read_bytes()
    # Half of them in the header, which is the smaller part.
    end = data.draw(st.sampled_from([8 + int.from_bytes(good[:8], "little"), len(good)]))
    bad = bytearray(good)
    bad[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    try:
        with pytest.raises(ShadowCacheError, match=r"\.safetensors"):
            cache.load(key, RTN4, BF16)
    finally:
        path.write_bytes(good)


def test_a_link_is_not_followed(cache: ShadowCache, tmp_path: Path) -> None:
    key, path = stored(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShadowCacheError, match="symbolic links"):
        cache.load(key, RTN4, BF16)
    made, from_cache = build_shadows(layer(), RTN4, BF16, cache, "layers.0")
    assert not from_cache
    assert not path.is_symlink()
    assert made.keys() == layer().keys()


@pytest.mark.parametrize("allowed", [0o620, 0o602])
def test_a_file_that_another_could_have_written_is_not_taken(
    cache: ShadowCache, allowed: int
) -> None:
    key, path = stored(cache)
    path.chmod(allowed)
    with pytest.raises(ShadowCacheError, match="mode 0600"):
        cache.load(key, RTN4, BF16)


HUGE = 1 << 60


@pytest.mark.parametrize(
    "header",
    [
        None,  # the header itself is said to be huge
        {"w": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}},
        {"w": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, 8]}},
        {"w": {"dtype": "F32", "shape": [1 << 32, 1 << 32], "data_offsets": [0, 8]}},
        {"w": {"dtype": "U8", "shape": [8], "data_offsets": [HUGE, HUGE + 8]}},
    ],
    ids=["header", "tensor", "shape", "overflow", "offset"],
)
def test_a_size_that_is_not_there_is_an_error_before_it_is_allocated(
    cache: ShadowCache, header: dict[str, object] | None
) -> None:
    key, path = stored(cache)
    text = json.dumps(header).encode()
    length = HUGE if header is None else len(text)
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ShadowCacheError, match="cannot be read"):
        cache.load(key, RTN4, BF16)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -4096, -1])
def test_a_truncated_file_is_an_error(cache: ShadowCache, keep: int) -> None:
    key, path = stored(cache)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ShadowCacheError, match="cannot be read"):
        cache.load(key, RTN4, BF16)


def test_a_longer_file_is_an_error(cache: ShadowCache) -> None:
    key, path = stored(cache)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ShadowCacheError, match="cannot be read"):
        cache.load(key, RTN4, BF16)


@pytest.mark.parametrize(
    ("chosen", "dtype"),
    [(RTN8, BF16), (ShadowSettings(4, 32, "rtn"), BF16), (RTN4, torch.float16)],
    ids=str,
)
def test_a_file_of_other_settings_is_an_error(
    cache: ShadowCache, chosen: ShadowSettings, dtype: torch.dtype
) -> None:
    key, _ = stored(cache)
    with pytest.raises(ShadowCacheError, match="other weights or settings"):
        cache.load(key, chosen, dtype)


def test_a_file_of_other_weights_is_an_error(cache: ShadowCache) -> None:
    _, path = stored(cache)
    other = shadow_key(layer(seed=1), RTN4, BF16)
    path.rename(cache.directory / f"{other}.safetensors")
    with pytest.raises(ShadowCacheError, match="other weights or settings"):
        cache.load(other, RTN4, BF16)


def test_a_file_from_another_processor_is_an_error(
    cache: ShadowCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = stored(cache)
    monkeypatch.setattr(packing, "_int4_layout", lambda: "another processor's")
    with pytest.raises(ShadowCacheError, match="other weights or settings"):
        cache.load(key, RTN4, BF16)


def test_a_loaded_shadow_outlives_its_file(cache: ShadowCache) -> None:
    key, path = stored(cache)
    loaded = cache.load(key, RTN4, BF16)
    assert loaded is not None
    before = loaded["mlp.down_proj"].packed.clone()
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded["mlp.down_proj"].packed, before)


def test_a_damaged_file_is_reported_once_and_replaced(
    cache: ShadowCache, caplog: pytest.LogCaptureFixture
) -> None:
    key, path = stored(cache)
    good = cache.load(key, RTN4, BF16)
    assert good is not None
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        made, from_cache = build_shadows(layer(), RTN4, BF16, cache, "layers.7")
    assert not from_cache
    assert_same(made, good)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "layers.7" in record.getMessage()
    assert "damaged" in record.getMessage()
    assert build_shadows(layer(), RTN4, BF16, cache, "layers.7")[1]
    assert len(caplog.records) == 1


def test_a_full_disk_is_reported_and_does_without(
    cache: ShadowCache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), full_disk():
        shadows, from_cache = build_shadows(layer(), RTN4, BF16, cache, "layers.7")
    assert not from_cache
    assert_same(shadows, build_shadows(layer(), RTN4, BF16, None, "layers.7")[0])
    (record,) = caplog.records
    assert "layers.7" in record.getMessage()
    assert "cannot be cached" in record.getMessage()
    assert not list(cache.directory.iterdir())


def test_a_failed_store_keeps_what_was_there(cache: ShadowCache) -> None:
    key, path = stored(cache)
    before = path.read_bytes()
    other, _ = build_shadows(layer(seed=1), RTN4, BF16, None, "layers.0")
    with pytest.raises(OSError, match="too large"), full_disk():
        cache.store(key, other)
    assert path.read_bytes() == before
    assert list(cache.directory.iterdir()) == [path]


def test_errors_name_layer_and_linear(cache: ShadowCache) -> None:
    weights = layer() | {"mlp.gate": torch.zeros(24, 64)}
    with pytest.raises(UnsupportedError, match=r"layers\.3\.mlp\.gate"):
        build_shadows(weights, RTN4, BF16, cache, "layers.3")
    assert not list(cache.directory.iterdir())
