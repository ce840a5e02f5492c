"""Calibration of a streamed model, against its own inputs as transformers computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_subspec.errors import UnsupportedError
from vllm_subspec.shadow import ShadowLinear
from vllm_subspec.tools import calibrate

pytestmark = pytest.mark.engine

EXTENSION = "vllm_subspec.integration.calibration.CalibrationExtension"
SUBSPEC = {"width": 2, "depth": 8, "stream": "disk", "bits": 4, "quantizer": "rtn"}
BITS = 4
HEAD_BITS = 8
INPUTS = {  # a name in vLLM and in transformers
    "layers.0.self_attn.o_proj": "model.layers.0.self_attn.o_proj",
    "layers.2.mlp.down_proj": "model.layers.2.mlp.down_proj",
    "lm_head": "lm_head",
}


def shadows(engine: Any) -> dict[str, ShadowLinear]:
    found = {
        name: module.quant_method.shadow
        for name, module in engine.runner.model.named_modules()
        if getattr(getattr(module, "quant_method", None), "shadow", None) is not None
    }
    return {name.removeprefix("model."): shadow for name, shadow in found.items()}


def drafted(engine: Any, prompts: tuple[str, ...]) -> tuple[Any, float]:
    """Answers, and committed tokens per pass."""
    before = engine.statistics()
    answers = engine.singly([(prompt, {"max_tokens": 32}) for prompt in prompts])
    after = engine.statistics()
    committed, passes = (
        after[name] - before[name] for name in ("committed_tokens", "target_passes")
    )
    return answers, committed / passes


@pytest.fixture(scope="module")
def own_cache(subspec_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In the common one calibrated shadows would win for all engines that start later."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("calibrated-cache")
        patch.setenv("SUBSPEC_CACHE", str(directory))
        yield directory


@pytest.fixture(scope="module")
def calibrated(
    open_engine: Any, own_cache: Path, lively_model_dir: Path, prompts: tuple[str, ...]
) -> dict[str, Any]:
    """An engine before and after, and another one that starts later."""
    with open_engine(lively_model_dir, SUBSPEC, worker_extension_cls=EXTENSION) as engine:
        tokenizer = engine.llm.get_tokenizer()
        told = [tokenizer.encode(prompt) for prompt in prompts]
        written = engine.batch([(tokens, {"max_tokens": 64}) for tokens in told])
        sequences = [
            [*tokens, *answer.tokens] for tokens, answer in zip(told, written, strict=True)
        ]
        plain, before = shadows(engine), drafted(engine, prompts[:3])
        (num_files,) = engine.llm.collective_rpc(
            "subspec_calibrate", args=(sequences, (BITS, HEAD_BITS))
        )
        made, after = shadows(engine), drafted(engine, prompts[:3])
    with open_engine(lively_model_dir, SUBSPEC | {"stream": "off"}) as engine:
        served = shadows(engine)
    return {
        "sequences": sequences,
        "num_files": num_files,
        "shadows": (plain, made, served),
        "drafted": (before, after),
    }


@torch.inference_mode()
def test_made_of_the_models_own_inputs(calibrated: dict[str, Any], lively_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(lively_model_dir, dtype=torch.float32)
    plain, made, _ = calibrated["shadows"]
    for name, theirs in INPUTS.items():
        linear, seen = model.get_submodule(theirs), []
        hook = linear.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][0]))
        for tokens in calibrated["sequences"]:
            model(torch.tensor([tokens]))
        hook.remove()
        x = torch.cat(seen)

        def loss(shadow: ShadowLinear, x: torch.Tensor = x, linear: Any = linear) -> float:
            return float((x @ (shadow.dequantize() - linear.weight).T).square().sum())

        assert loss(made[name]) < 0.9 * loss(plain[name]), name


def test_outputs_stay_and_more_of_a_draft_is_accepted(calibrated: dict[str, Any]) -> None:
    (answers, tau), (same, better) = calibrated["drafted"]
    assert same == answers
    assert better > tau


def test_a_later_start_finds_what_calibration_left(calibrated: dict[str, Any]) -> None:
    plain, made, served = calibrated["shadows"]
    assert calibrated["num_files"] == 2 * 5  # of each bits: four layers and the head
    assert made.keys() == served.keys() == plain.keys()
    for name, shadow in made.items():
        assert shadow.settings.bits == (HEAD_BITS if name == "lm_head" else BITS)
        assert torch.equal(shadow.packed, served[name].packed)
        assert torch.equal(shadow.scales, served[name].scales)
        assert not torch.equal(shadow.packed, plain[name].packed)


def test_weights_that_stay_are_refused() -> None:
    from vllm_subspec.integration.calibration import CalibrationExtension

    worker = CalibrationExtension()
    worker.model_runner = SimpleNamespace(
        subspec_config=None, offloader=SimpleNamespace(streamer=None)
    )
    with pytest.raises(UnsupportedError, match="stream = 'disk'"):
        worker.subspec_calibrate([[1, 2, 3]], (4,))


class FakeLLM:
    """Writes the prompt's first letter, twice."""

    options: dict[str, Any]
    params: Any
    asked: tuple[Any, ...]

    def __init__(self, model: str, **options: Any) -> None:
        FakeLLM.options = options

    def chat(self, chats: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        FakeLLM.params = params
        letters = [ord(chat[0]["content"][0]) for chat in chats]
        return [
            SimpleNamespace(prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[n, n])])
            for n in letters
        ]

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[int]:
        FakeLLM.asked = (method, *args)
        return [12]


def test_the_command_calibrates_on_what_the_model_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_subspec.integration import offline

    monkeypatch.setattr(offline, "LLM", FakeLLM)
    assert calibrate.calibrate_shadows(Path("model"), [4, 6], ["a", "b"]) == 12
    sequences = [[1, ord(letter), ord(letter)] for letter in "abababab"]
    assert FakeLLM.asked == ("subspec_calibrate", sequences, [4, 6])
    assert [params.temperature for params in FakeLLM.params] == [0.0] * 4 + [1.0] * 4
    assert FakeLLM.options["speculative_config"]["stream"] == "disk"
    assert FakeLLM.options["worker_extension_cls"] == EXTENSION
