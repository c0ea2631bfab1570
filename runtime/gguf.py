"""Reads GGUF files of the llama architecture: weights, hyper-parameters, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pagefork.runtime.errors import ModelUnavailable, UnsupportedModel
from pagefork.runtime.tokenizer import FastTokenizer

GROUP_SIZE = 32
"""Weights that share a scale in Q4_0, Q4_1 and Q8_0."""

_ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
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
_CONTROL, _USER_DEFINED = 3, 4


def read(path: Path) -> GGUF:
    """Open a GGUF file.

    Raises ModelUnavailable when it is missing or damaged, UnsupportedModel for another architecture.
    """
    if not path.is_file():
        raise ModelUnavailable(f"there is no file {path}; check the path")
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelUnavailable(f"{path} cannot be read as GGUF ({error}); fetch it again") from error
    if not loaded[0]:
        raise ModelUnavailable(f"{path} holds no tensors; fetch it again")
    return GGUF(*loaded)


class GGUF:
    """The contents of one file, tensors as MLX reads them: quantised ones as weight, scales and biases."""

    def __init__(self, tensors: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        architecture = self._get("general.architecture", None)
        if architecture != "llama":
            raise UnsupportedModel(
                f"GGUF files of the {architecture} architecture are not read, only llama; use the model's MLX or "
                "safetensors release"
            )
        scaling = self._get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in tensors:
            raise UnsupportedModel(
                "this GGUF file scales its rotary frequencies, which is not read; use the model's MLX or safetensors "
                "release"
            )
        self._tensors = {_translate(name): array for name, array in tensors.items()}

    @property
    def eos_ids(self) -> frozenset[int]:
        names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return frozenset(value for name in names if (value := self._get(name, None)) is not None)

    @property
    def max_context(self) -> int | None:
        value: int | None = self._get("llama.context_length", None)
        return value

    def llama_args(self) -> dict[str, Any]:
        """Keyword arguments of mlx-lm's llama.

        GGUF stores the rows of the q and k projections of llama so that neighbours are rotated together:
        `rope_traditional`.
        """
        heads = self._get("llama.attention.head_count")
        hidden = self._get("llama.embedding_length")
        return {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": self._get("llama.block_count"),
            "intermediate_size": self._get("llama.feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("llama.attention.head_count_kv", heads),
            "head_dim": self._get("llama.attention.key_length", hidden // heads),
            "rms_norm_eps": self._get("llama.attention.layer_norm_rms_epsilon"),
            "vocab_size": self._tensors["model.embed_tokens.weight"].shape[0],
            "max_position_embeddings": self.max_context,
            "rope_theta": self._get("llama.rope.freq_base", 10000.0),
            "rope_traditional": True,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
        }

    def quantised(self) -> dict[str, dict[str, int]]:
        """Module path of every quantised tensor, with the arguments of its `to_quantized`."""
        result = {}
        for name, scales in self._tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "scales":
                bits = self._tensors[f"{module}.weight"].shape[-1] // scales.shape[-1]
                result[module] = {"group_size": GROUP_SIZE, "bits": bits}
        return result

    def weights(self, *, float32: bool) -> dict[str, mx.array]:
        """Parameters by name, lazily: all dequantised to float32, or as stored, what is not quantised in float16."""
        quantised = self.quantised()
        result = {}
        for name, array in self._tensors.items():
            module, _, leaf = name.rpartition(".")
            if module not in quantised:
                result[name] = array.astype(mx.float32 if float32 else mx.float16)
            elif not float32:
                result[name] = array
            elif leaf == "weight":
                scales = self._tensors[f"{module}.scales"].astype(mx.float32)
                biases = self._tensors[f"{module}.biases"].astype(mx.float32)
                result[name] = mx.dequantize(array, scales, biases, GROUP_SIZE, quantised[module]["bits"])
        return result

    def tokenizer(self) -> FastTokenizer:
        """The byte-level BPE tokenizer in the metadata. Raises UnsupportedModel for other kinds."""
        kind, split = self._get("tokenizer.ggml.model", None), self._get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or split not in _SPLITS:
            raise UnsupportedModel(
                f"GGUF tokenizers of kind {kind}/{split} are not read, only gpt2 with {', '.join(sorted(_SPLITS))}; "
                "use the model's MLX or safetensors release"
            )
        tokens = self._need("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self._need("tokenizer.ggml.merges")]
        try:
            bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        except Exception as error:
            raise ModelUnavailable(f"the GGUF file's tokenizer is damaged ({error}); fetch the file again") from error
        tokenizer = tokenizers.Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [*_SPLITS[split](), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self._need("tokenizer.ggml.token_type").tolist()
        tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
        tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
        bos, eos = (self._get(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos"))
        return FastTokenizer(
            tokenizer,
            eos_ids=self.eos_ids,
            bos_token=None if bos is None else tokens[bos],
            eos_token=None if eos is None else tokens[eos],
            add_bos=bool(self._get("tokenizer.ggml.add_bos_token", False)),
            chat_template=self._get("tokenizer.chat_template", None),
        )

    def _get(self, name: str, *default: Any) -> Any:
        if default and name not in self._metadata:
            return default[0]
        value = self._need(name)
        return value.item() if isinstance(value, mx.array) else value

    def _need(self, name: str) -> Any:
        if name not in self._metadata:
            raise ModelUnavailable(f"the GGUF file lacks {name}; it is incomplete or made by an old converter")
        return self._metadata[name]


# How text is cut before the byte-level split, by the name that the file gives.
_SPLITS = {
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True)],
    "gpt-2": list,
    "default": list,
}


def _translate(name: str) -> str:
    """mlx-lm's name of a tensor."""
    module, _, leaf = name.rpartition(".")
    if module in _ROOT:
        return f"{_ROOT[module]}.{leaf}"
    block, _, part = module.removeprefix("blk.").partition(".")
    if module.startswith("blk.") and block.isdigit() and part in _BLOCK:
        return f"model.layers.{block}.{_BLOCK[part]}.{leaf}"
    raise UnsupportedModel(
        f"the GGUF file has a tensor {name}, which a plain llama has not; use the model's MLX release"
    )


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    special = kind == _CONTROL
    return [AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, types, strict=True) if k == kind]
