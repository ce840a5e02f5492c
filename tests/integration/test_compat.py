"""The patch ledger is complete, and a vLLM that differs is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from vllm_subspec.errors import VersionError
from vllm_subspec.integration import (
    attention,
    cuda_attention,
    linear,
    metrics,
    offloader,
    patches,
    rows,
    runner,
    sampler,
    worker,
)
from vllm_subspec.integration.compat import (
    CUDA_SEAMS,
    SEAMS,
    TESTED_VLLM,
    Seam,
    check_vllm,
    seam_problem,
)
from vllm_subspec.integration.plugin import register

pytestmark = pytest.mark.engine


def test_every_seam_is_as_the_installed_vllm_has_it() -> None:
    seams = SEAMS + CUDA_SEAMS
    assert [problem for seam in seams if (problem := seam_problem(seam))] == []
    assert len({(seam.module, seam.name) for seam in seams}) == len(seams)


@pytest.mark.parametrize("patch", patches.LEDGER, ids=lambda patch: patch.target)
def test_the_ledger_says_all_of_each_patch(patch: patches.Patch) -> None:
    register()
    module, name = patch.target.split(":")
    assert (module, name) in {(seam.module, seam.name) for seam in SEAMS}
    for text in (patch.why, patch.how, patch.goes_when):
        assert len(text) > 20
    replaced: Any = importlib.import_module(module)
    for part in name.split("."):
        replaced = getattr(replaced, part)
    assert replaced.__module__ == module, "the patch does not keep the original's name"
    original = inspect.unwrap(replaced)
    assert original is not replaced, "the patch is not applied"
    owner, last = name.split(".")
    kind = inspect.getattr_static(getattr(importlib.import_module(module), owner), last)
    is_method = next(iter(inspect.signature(original).parameters)) == "self"
    assert isinstance(kind, staticmethod) is not is_method


def overrides(ours: type) -> Iterator[tuple[str, str]]:
    """Where vLLM defines the methods that one of our classes overrides."""
    for name, member in vars(ours).items():
        if not inspect.isroutine(member) or (name[:2] == "__" and name != "__init__"):
            continue
        for base in ours.__mro__[1:]:
            if name in vars(base) and base.__module__.startswith("vllm."):
                yield base.__module__, f"{base.__name__}.{name}"
                break


def test_every_override_has_a_seam() -> None:
    seams = {(seam.module, seam.name) for seam in SEAMS + CUDA_SEAMS}
    found = set()
    rooms = (attention, cuda_attention, linear, metrics, offloader, rows, runner, sampler, worker)
    for room in rooms:
        for ours in vars(room).values():
            own = inspect.isclass(ours) and ours.__module__ == room.__name__
            if own and not dataclasses.is_dataclass(ours):
                found |= set(overrides(ours))
    for mixin, base in (
        (runner.SubSpecRunnerMixin, runner.CPUModelRunner),
        (attention.TreeAttentionImpl, attention.CPUAttentionBackendImpl),
        (attention.TreeAttentionImpl, cuda_attention.TritonAttentionImpl),
        (attention.TreeAttentionImpl, cuda_attention.FlashAttentionImpl),
        (cuda_attention._EagerAttentionBuilder, cuda_attention.TritonAttentionMetadataBuilder),
        (cuda_attention._EagerAttentionBuilder, cuda_attention.FlashAttentionMetadataBuilder),
    ):
        found |= set(overrides(type("AsOne", (base,), dict(vars(mixin)))))
    assert len(found) > 15
    assert found - seams == set()


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (Seam("vllm.nowhere", "f", ()), "vllm.nowhere.f is missing (No module named"),
        (Seam("vllm.config", "VllmConfig.gone", ()), "VllmConfig.gone is missing (type object"),
        (
            Seam("vllm.engine.arg_utils", "EngineArgs.add_cli_args", ("self", "parser")),
            "EngineArgs.add_cli_args takes ('parser',), not ('self', 'parser')",
        ),
    ],
    ids=["module", "name", "signature"],
)
def test_a_broken_seam_is_explained(seam: Seam, problem: str) -> None:
    assert problem in (seam_problem(seam) or "")


def test_more_parameters_at_the_end_break_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrap_modules(self: Any, modules_generator: Any, prefix: str = "", more: int = 0) -> None:
        """A later vLLM's."""

    (seam,) = (seam for seam in SEAMS if seam.name == "BaseOffloader.wrap_modules")
    monkeypatch.setattr(f"{seam.module}.{seam.name}", wrap_modules)
    assert seam_problem(seam) is None


def ask(model: str) -> None:
    EngineArgs(
        model, speculative_config={"method": "subspec"}, skip_tokenizer_init=True
    ).create_engine_config()


def test_a_changed_signature_is_refused(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute_model(self: Any, batch: Any) -> None:
        """Another vLLM's."""

    target = "vllm.v1.worker.gpu_model_runner.GPUModelRunner.execute_model"
    monkeypatch.setattr(target, execute_model)
    monkeypatch.setenv("SUBSPEC_ALLOW_UNTESTED_VLLM", "1")
    with pytest.raises(VersionError) as refused:
        ask(llama)
    assert f"{target} takes ('self', 'batch')" in str(refused.value)
    assert str(TESTED_VLLM) in str(refused.value)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_an_untested_version_is_refused(
    version: str, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(VersionError, match=r"SUBSPEC_ALLOW_UNTESTED_VLLM=1") as refused:
        ask(llama)
    assert f"vLLM {version} is outside the tested range {TESTED_VLLM}" in str(refused.value)
    monkeypatch.setenv("SUBSPEC_ALLOW_UNTESTED_VLLM", "1")
    ask(llama)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1.dev3+gabc", "0.33.5"])
def test_a_tested_version_passes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    check_vllm()


def test_an_untested_vllm_disturbs_nobody_else(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.1")
    EngineArgs(llama, skip_tokenizer_init=True).create_engine_config()


def test_a_patch_without_its_target_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(original: Any) -> Any:
        raise AssertionError("there is nothing to replace")

    for target in ("vllm.nowhere:A.f", "vllm.config:Nothing.f", "vllm.config:VllmConfig.nothing"):
        patch = patches.Patch(target, why="", how="", goes_when="", replace=replace)
        patches._apply(patch)


def test_arguments_of_another_vllm_are_looked_at_without_harm() -> None:
    class Bare:
        """EngineArgs before spec_method and additional_config."""

    class Odd:
        speculative_config = 3
        additional_config = None

    for args in (Bare(), Odd()):
        assert not patches.asks_for_subspec(args)
