"""Builds and loads the native kernels, every op's ``.cpp``, for the processor they run on."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
from pathlib import Path

import torch

from subspec_kernels.temporary import temporary_directory

_SOURCES = sorted(Path(__file__).parent.glob("*/*.cpp"))
_COMPILERS = ("g++", "clang++", "c++")
_BUILD_SECONDS = 600
# OpenMP when compiling only: the loaded library must share torch's own runtime, hence its threads.
_FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp")


class KernelBuildError(RuntimeError):
    """The native kernels cannot be built or loaded here."""


def is_loaded() -> bool:
    """Whether ``torch.ops.subspec`` is there."""
    return hasattr(torch.ops.subspec, "lowbit_linear")


def load(directory: Path) -> str:
    """Register ``torch.ops.subspec``, built on the first call on a machine (20 s).

    Each operator is its op's reference for CPU tensors.

    Args:
        directory: where libraries are kept, this user's alone, since what lies there is executed.
            Processes may share it.

    Returns:
        The instruction set that low-bit linears use: "AVX-512 VNNI", or "plain C++", which is
        slow.

    Raises:
        KernelBuildError: there is no compiler, or it failed, or the library cannot be loaded, or
            others than this user may have written it.
        OSError: ``directory`` cannot be written.
    """
    if not is_loaded():
        library = build(directory)
        _check_owner(library)
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise KernelBuildError(
                f"{library} cannot be loaded ({error}); delete it to have it built again"
            ) from error
    isa: str = torch.ops.subspec.lowbit_isa()
    return isa


def build(directory: Path) -> Path:
    """The kernels' library in ``directory``, compiled where it is missing.

    Its name holds a digest of the sources, torch, the compiler and the processor. It appears under
    that name whole. Errors are those of ``load``.
    """
    compiler = _find_compiler()
    version = _run([compiler, "--version"]).partition("\n")[0]
    sources = (source.read_text() for source in _SOURCES)
    parts = (*sources, torch.__version__, version, _processor(), *_FLAGS)
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    library = directory / f"subspec-{digest}.so"
    if not library.exists():
        with temporary_directory(directory) as temporary:
            os.replace(_compile(compiler, temporary), library)
    return library


def _check_owner(library: Path) -> None:
    """Raise unless only this user can have written what will be executed."""
    info = library.lstat()
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise KernelBuildError(
            f"{library} is {stat.filemode(info.st_mode)} of user id {info.st_uid}: others than "
            "this user may have written it, so it is not run; delete it to have it built again"
        )


def _compile(compiler: str, directory: Path) -> Path:
    torch_root = Path(torch.__file__).parent
    library = directory / "subspec.so"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    include = f"-I{torch_root / 'include'}"
    objects = []
    for source in _SOURCES:
        objects.append(directory / f"{source.stem}.o")
        _run([compiler, *_FLAGS, abi, include, "-c", str(source), "-o", str(objects[-1])])
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    _run([compiler, "-shared", *map(str, objects), "-o", str(library), *libraries])
    library.chmod(0o700)  # whatever the umask: see `_check_owner`
    with library.open("rb") as file:
        os.fsync(file.fileno())
    return library


def _find_compiler() -> str:
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise KernelBuildError(f"no C++ compiler is on PATH; install one of: {', '.join(_COMPILERS)}")


def _processor() -> str:
    """What ``-march=native`` depends on."""
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = information.read_text().partition("\n\n")[0].splitlines()
    named = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(line for line in lines if line.startswith(named))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=_BUILD_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise KernelBuildError(f"`{' '.join(command)}` failed: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(
            f"`{' '.join(command)}` took over {_BUILD_SECONDS} s; free the machine and start again"
        ) from error
    return done.stdout
