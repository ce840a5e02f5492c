"""Which kernels a module's shadows use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_subspec.shadow import formats


@pytest.fixture(scope="module")
def torch_kernels() -> Iterator[None]:
    """As on a machine without a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_native_kernel", lambda: ("", "no C++ compiler is on PATH"))
        yield


@pytest.fixture(scope="module")
def native_kernels() -> None:
    """As everywhere else; built here where they are not yet."""
    assert formats.kernel_status().startswith("native")
