"""The native low-bit linear against its plain torch reference, and how it is built."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subspec_kernels import native as library
from subspec_kernels.lowbit_linear import reference
from subspec_kernels.native import KernelBuildError

from vllm_subspec import envs
from vllm_subspec.shadow.formats import kernel_status

BITS, GROUP_SIZES = reference.NATIVE_BITS, (32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# fp32 sums in another order; the output, rounded from either side, may be one step off.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert kernel_status().startswith("native")


def make_weight(
    out_features: int, in_features: int, bits: int, group_size: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes that use all levels, unpacked, and scales."""
    torch.manual_seed(seed)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    pair = (2,) if bits == 4 else ()
    shape = (out_features // 16, in_features // group_size, *pair, 16)
    return codes, torch.randn(shape).mul(0.01).half()


def rounded_product(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    """What the native op computes: the reference of activations rounded to int8."""
    rounded = reference.round_activations(x, group_size)
    return reference.lowbit_linear(rounded, packed, scales, bits, group_size)


def native(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.subspec.lowbit_linear(x, packed, scales, bits, group_size)
    return y


@given(
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from(GROUP_SIZES),
    blocks=st.integers(1, 6),
    groups=st.integers(1, 5),
    rows=st.integers(1, 33),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_native_equals_reference(
    bits: int,
    group_size: int,
    blocks: int,
    groups: int,
    rows: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    codes, scales = make_weight(16 * blocks, group_size * groups, bits, group_size, seed)
    packed = reference.pack_codes(codes, bits, group_size)
    x = torch.randn(rows, group_size * groups).to(dtype)
    expected = rounded_product(x, packed, scales, bits, group_size)
    y = native(x, packed, scales, bits, group_size)
    assert y.dtype == dtype
    allowed = TOLERANCE[dtype] * expected.float().abs().max()
    assert (y.float() - expected.float()).abs().max() <= allowed


@pytest.mark.parametrize("bits", BITS)
def test_two_threads_compute_what_one_does(bits: int) -> None:
    # Large enough to be split, activations included.
    codes, scales = make_weight(512, 4096, bits, 64, seed=0)
    packed, x = reference.pack_codes(codes, bits, 64), torch.randn(17, 4096)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native(x, packed, scales, bits, 64)
        torch.set_num_threads(2)
        assert torch.equal(native(x, packed, scales, bits, 64), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", BITS)
def test_result_is_near_the_dequantized_product(bits: int) -> None:
    codes, scales = make_weight(64, 512, bits, 64, seed=0)
    packed, x = reference.pack_codes(codes, bits, 64), torch.randn(5, 512)
    expected = x @ reference.dequantize(packed, scales, bits, 64).T
    off = native(x, packed, scales, bits, 64) - expected
    assert off.norm() < 0.015 * expected.norm()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_codes_are_laid_out_as_documented(bits: int, group_size: int) -> None:
    codes, _ = make_weight(32, 2 * group_size, bits, group_size, seed=1)
    packed = reference.pack_codes(codes, bits, group_size)
    assert torch.equal(reference.unpack_codes(packed, bits, group_size), codes)
    memory = packed.flatten().tolist()
    for channel, k in ((0, 0), (5, 6), (15, 19), (16, group_size + 13), (31, 2 * group_size - 1)):
        group, inside = divmod(k, group_size)
        start = (channel // 16 * 2 + group) * 2 * group_size * bits
        quad, lane = inside // 4, channel % 16 * 4 + inside % 4
        if bits == 8:
            code = memory[start + quad * 64 + lane]
        else:
            code = memory[start + quad // 2 * 64 + lane] >> quad % 2 * 4 & 15
        if bits == 6:
            high = start + 8 * group_size + quad // 4 * 64
            code |= (memory[high + lane] >> quad % 4 * 2 & 3) << 4
        assert code == codes[channel, k]


@pytest.mark.parametrize("bits", BITS)
def test_zero_tiny_and_huge_groups(bits: int) -> None:
    codes, scales = make_weight(32, 256, bits, 64, seed=2)
    packed, x = reference.pack_codes(codes, bits, 64), torch.randn(4, 256)
    x[0], x[1, :64], x[2, 64:128], x[3, 128:] = 0, 0, 1e-37, 1e30
    y = native(x, packed, scales, bits, 64)
    expected = rounded_product(x, packed, scales, bits, 64)
    assert (y[0] == 0).all()
    assert ((y - expected).abs().amax(1) <= 2e-6 * expected.abs().amax(1)).all()


@pytest.mark.parametrize("bits", BITS)
def test_non_finite_activations_stay_in_their_row(bits: int) -> None:
    codes, scales = make_weight(32, 128, bits, 64, seed=3)
    packed, x = reference.pack_codes(codes, bits, 64), torch.randn(4, 128)
    clean = native(x, packed, scales, bits, 64)
    x[1, 5], x[2, 7] = torch.inf, torch.nan
    y = native(x, packed, scales, bits, 64)
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert not y[1].isfinite().any()


def test_strided_empty_and_meta_inputs() -> None:
    codes, scales = make_weight(32, 128, 6, 64, seed=4)
    packed, x = reference.pack_codes(codes, 6, 64), torch.randn(3, 256)[:, ::2]
    assert torch.equal(native(x, packed, scales, 6, 64), native(x.clone(), packed, scales, 6, 64))
    assert native(x[:0], packed, scales, 6, 64).shape == (0, 32)
    traced = native(x.to("meta"), packed.to("meta"), scales.to("meta"), 6, 64)
    assert traced.shape == (3, 32)
    assert traced.dtype == x.dtype
    torch.library.opcheck(
        torch.ops.subspec.lowbit_linear.default, (x.contiguous(), packed, scales, 6, 64)
    )


def test_what_does_not_fit_together_is_refused() -> None:
    codes, scales = make_weight(32, 128, 4, 64, seed=5)
    packed, x = reference.pack_codes(codes, 4, 64), torch.randn(3, 128)
    for bad in (
        (x, packed, scales, 5, 64),
        (x, packed, scales, 6, 64),
        (x, packed, scales, 4, 32),
        (x, packed, scales, 4, 0),
        (x[:, :64], packed, scales, 4, 64),
        (x[0], packed, scales, 4, 64),
        (x.double(), packed, scales, 4, 64),
        (x, packed[:24], scales, 4, 64),
        (x, packed, scales[:1], 4, 64),
        (x, packed, scales.float(), 4, 64),
        (x, packed.float(), scales, 4, 64),
    ):
        with pytest.raises(RuntimeError):
            native(*bad)


PLAIN = """
import sys, torch
from pathlib import Path
from subspec_kernels import native
from subspec_kernels.lowbit_linear import reference
native._FLAGS = tuple(flag for flag in native._FLAGS if flag != "-march=native")
print(native.load(Path(sys.argv[1])))
torch.manual_seed(0)
for bits in (4, 6, 8):
    for rows in (1, 3, 8, 11):
        packed = reference.pack_codes(torch.randint(0, 2**bits, (48, 192)).byte(), bits, 64)
        shape = (3, 3, 2, 16) if bits == 4 else (3, 3, 16)
        scales = torch.randn(shape).half()
        x = torch.randn(rows, 192)
        y = torch.ops.subspec.lowbit_linear(x, packed, scales, bits, 64)
        rounded = reference.round_activations(x, 64)
        expected = reference.lowbit_linear(rounded, packed, scales, bits, 64)
        assert (y - expected).abs().max() <= 2e-6 * expected.abs().max(), (bits, rows)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def test_plain_path_equals_reference() -> None:
    """What a processor without AVX-512 VNNI runs; kept beside the native library once built."""
    done = run_python(PLAIN, str(envs.cache_dir() / "kernels"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "plain C++"


DAMAGED = """
import sys
from pathlib import Path
from subspec_kernels import native
native.build = lambda directory: directory / "bad.so"
try:
    native.load(Path(sys.argv[1]))
except native.KernelBuildError as error:
    print(error)
"""


def test_a_damaged_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"\x7fELF damaged")
    done = run_python(DAMAGED, str(tmp_path))
    assert "bad.so cannot be loaded" in done.stdout
    assert "delete it" in done.stdout


@pytest.mark.parametrize("way", ["0o770", "0o702", "link", "owner"])
def test_a_library_that_another_could_have_written_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """To load it would run its code."""
    (tmp_path / "real").touch(0o700)
    there = tmp_path / "subspec.so"
    if way == "link":
        there.symlink_to(tmp_path / "real")
    else:
        (tmp_path / "real").rename(there)
        there.chmod(0o700 if way == "owner" else int(way, 8))
    if way == "owner":
        owner = os.geteuid()
        monkeypatch.setattr(library.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    monkeypatch.setattr(library, "build", lambda directory: there)
    monkeypatch.setattr(library.torch.ops, "load_library", pytest.fail)
    with pytest.raises(KernelBuildError, match="others than this user may have written it"):
        library.load(tmp_path)


def test_a_built_library_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "empty.cpp"
    source.write_text("\n")
    monkeypatch.setattr(library, "_SOURCES", [source])
    umask = os.umask(0)
    try:
        made = library.build(tmp_path)
    finally:
        os.umask(umask)
    assert made.stat().st_mode & 0o777 == 0o700


def test_without_a_compiler_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler .*g\+\+"):
        library.build(tmp_path)


def test_a_failed_build_tells_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("#error deliberately broken\n")
    monkeypatch.setattr(library, "_SOURCES", [source])
    cached = tmp_path / "cache"
    cached.mkdir()
    with pytest.raises(KernelBuildError, match="deliberately broken"):
        library.build(cached)
    assert not list(cached.iterdir())


def test_builders_at_once_leave_one_whole_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Barrier(4)

    def compile_together(compiler: str, directory: Path) -> Path:
        together.wait(timeout=10)
        made = directory / "subspec.so"
        made.write_bytes(b"whole" * 1000)
        return made

    monkeypatch.setattr(library, "_compile", compile_together)
    with ThreadPoolExecutor(4) as pool:
        (made,) = set(pool.map(library.build, [tmp_path] * 4))
    assert list(tmp_path.iterdir()) == [made]
    assert made.read_bytes() == b"whole" * 1000


def test_another_processor_or_torch_gets_its_own_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_nothing(compiler: str, directory: Path) -> Path:
        (directory / "subspec.so").touch()
        return directory / "subspec.so"

    monkeypatch.setattr(library, "_compile", compile_nothing)
    libraries = [library.build(tmp_path), library.build(tmp_path)]
    monkeypatch.setattr(torch, "__version__", "9.9")
    libraries.append(library.build(tmp_path))
    monkeypatch.setattr(library, "_processor", lambda: "another")
    libraries.append(library.build(tmp_path))
    assert libraries[0] == libraries[1]
    assert len(set(libraries)) == 3
