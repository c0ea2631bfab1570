"""A tiny configuration for every architecture of mlx-lm: what docs/models.md and the tests of architectures run.

`tiny(name)` builds the model. A configuration is what `SIZES` says about the fields that the architecture has, then
what `CONFIGS` says about it alone. They are as small as the code allows and keep the published proportions that decide
whether a model can be served: windows, shared layers, widths of keys and values, which layers attend at all.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map

VOCAB = 128
WINDOW = 6
LAYERS = 4

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _EPS, _THETA = 64, 96, 4, 2, 16, 1e-5, 10000.0
_ROPE = {"rope_theta": _THETA, "rope_type": "default", "type": "default"}
_SCALED_ROPE = {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4}
_SLIDING_FIRST = ["sliding_attention", "full_attention"] * 2
_LINEAR_FIRST = ["linear_attention", "full_attention"] * 2
_KDA = {"kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4}

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "n_embd", "model_dim", "d_model", "embed_dim", "mup_base_width"), _HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "hidden_dim", "n_inner", "dense_intermediate_size"), _INNER
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), _KV_HEADS),
    **dict.fromkeys(("head_dim", "head_size"), _HEAD_DIM),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon"), _EPS),
    **dict.fromkeys(("layer_norm_epsilon", "layernorm_epsilon"), _EPS),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), _THETA),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 512),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window", "window_size"), WINDOW),
    "sliding_window_pattern": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("decoder_sparse_step", "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq"), 1),
    "routed_scaling_factor": 1.0,
    "logits_scaling": 2.0,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    "rotary_dim": 8,
    "attention_multiplier": 0.3,
    "query_pre_attn_scalar": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "mlp_only_layers": [],
    **dict.fromkeys(("norm_topk_prob", "use_qk_norm", "no_bias"), True),
    # A random model whose output head is its embedding repeats its last token, whatever it attends to.
    **dict.fromkeys(("tie_word_embeddings", "share_input_output_layers"), False),
    **dict.fromkeys(("bias", "multi_query", "attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"), False),
    **dict.fromkeys(("rope_traditional", "qk_layernorm"), False),
}
"""Values by field name, whichever architecture has the field."""

TEXT: dict[str, tuple[str, str]] = {
    "gemma3": ("gemma3_text", "ModelArgs"),
    "gemma3n": ("gemma3n", "TextConfig"),
    "gemma4": ("gemma4_text", "ModelArgs"),
    "kimi_k25": ("deepseek_v3", "ModelArgs"),
    "kimi_k3": ("kimi_k3", "TextArgs"),
    "kimi_vl": ("kimi_vl", "TextArgs"),
    "lfm2-vl": ("lfm2", "ModelArgs"),
    "llama4": ("llama4", "TextArgs"),
    "minimax_m3_vl": ("minimax_m3_vl", "TextArgs"),
    "mistral3": ("ministral3", "ModelArgs"),
    "muse_spark": ("muse_spark", "TextArgs"),
    "pixtral": ("llama", "ModelArgs"),
    "prism_hadamard_qwen35": ("qwen3_5", "TextModelArgs"),
    "qwen2_vl": ("qwen2", "ModelArgs"),
    "qwen3_5": ("qwen3_5", "TextModelArgs"),
    "qwen3_5_moe": ("qwen3_5", "TextModelArgs"),
    "qwen3_vl": ("qwen3", "ModelArgs"),
    "qwen3_vl_moe": ("qwen3_moe", "ModelArgs"),
}
"""The module and the class of the nested `text_config`, whose fields are filled in like those of a model of its own."""

_MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2}
_SSM = {"conv_kernel": 4, "n_groups": 1, "use_conv_bias": True}
_DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = {**_DELTA, "full_attention_interval": 2, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
_LONGCAT = {"expert_ffn_hidden_size": 48, "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
_INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
_LFM2 = {"conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]}
_LFM2_FFN = {
    "block_dim": 64,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
_LOW_RANK = {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8}
_MINICPM = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0}
_KIMI = {"linear_attn_config": _KDA, "num_key_value_heads": 4}
_ALTUP = {
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": _SLIDING_FIRST, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2, "tie_word_embeddings": False},
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": _KV_HEADS, "clip_qkv": 8.0, "rope_theta": _THETA},
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0}
    },
    "deepseek_v41": {
        "qk_rope_head_dim": 4,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": (0, 0, 4, 4),
        "kv_source_layer_ids": (0, 1, 2, 2),
        "index_source_layer_ids": (0, 1, 2, 2),
        "candidate_topk_blocks": 4,
        **_INDEX,
        "hc_mult": 2,
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"layer_types": _SLIDING_FIRST, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
    "gemma3n": {
        "text_config": {
            **_ALTUP,
            "layer_types": _SLIDING_FIRST,
            "num_kv_shared_layers": 2,
            "rope_local_base_freq": _THETA,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.0] * LAYERS,
            "hidden_size_per_layer_input": 8,
        }
    },
    "gemma4": {
        "text_config": {"layer_types": _SLIDING_FIRST, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
    },
    "gemma4_text": {
        "layer_types": _SLIDING_FIRST,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 32,
    },
    "glm4_moe": {"rope_scaling": None},
    "glm_moe_dsa": {**_INDEX, "rope_parameters": _ROPE},
    "gpt_oss": {"layer_types": _SLIDING_FIRST},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        **_MAMBA,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {"text_config": {**_KIMI, "hidden_act": "situ"}},
    "kimi_linear": {**_KIMI, "model_max_length": 512},
    "lfm2": {**_LFM2, **_LFM2_FFN},
    "lfm2-vl": {"text_config": {**_LFM2, **_LFM2_FFN}},
    "lfm2_moe": {**_LFM2, "use_expert_bias": True, "num_dense_layers": 1},
    "llama4": {
        "text_config": {
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": _INNER,
            "rope_scaling": None,
        }
    },
    "llama4_text": {"intermediate_size_mlp": _INNER, "no_rope_layers": [1, 1, 0, 1]},
    "longcat_flash": {**_LONGCAT, "attention_method": "MLA", "zero_expert_type": "identity"},
    "longcat_flash_ngram": {**_LONGCAT, "ngram_vocab_size_ratio": 2},
    "mamba": {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4},
    "mamba2": {
        **_SSM,
        "state_size": 8,
        "head_dim": 32,
        "intermediate_size": 128,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 4,
    },
    "mellum": {
        "layer_types": _SLIDING_FIRST,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": _THETA,
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": 4,
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
    },
    "minicpm": _MINICPM,
    "minicpm3": {
        **_MINICPM,
        "rope_scaling": {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
    "minimax_m3_vl": {
        "text_config": {
            "moe_layer_freq": [0, 1, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 2,
                "sparse_attention_freq": [0, 1, 0, 1],
            },
        }
    },
    "ministral3": {"rope_parameters": _SCALED_ROPE, "layer_types": _SLIDING_FIRST},
    "mistral3": {"text_config": {"model_type": "ministral3", "rope_parameters": _SCALED_ROPE}},
    "mistral4": {"rope_parameters": _SCALED_ROPE},
    "muse_spark": {
        "text_config": {
            "post_norm_eps": _EPS,
            "rope_parameters": _ROPE,
            "layer_rope_theta": [_THETA, _THETA, _THETA, 0.0],
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "final_logit_softcapping": 30.0,
            "output_multiplier": 1.0,
            "moe_hidden_size": 48,
            "num_shared_experts": 0,
        }
    },
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"no_op": layer == 2, "n_heads_in_group": 2}, "ffn": {"no_op": layer == 1, "ffn_mult": 1.0}}
            for layer in range(LAYERS)
        ]
    },
    "nemotron_h": {
        **_SSM,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "olmo_hybrid": {**_DELTA, "linear_allow_neg_eigval": True, "layer_types": _LINEAR_FIRST},
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [2, 2, 4, 4],
        "num_kv_heads": [1, 1, 2, 2],
        "ffn_multipliers": [1.0, 1.0, 2.0, 2.0],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "ff_intermediate_size": _INNER, "gegelu_limit": 20.0},
    "phixtral": {"num_vocab": VOCAB},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": _HEAD_DIM,
        "attention_window_size": WINDOW,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
    },
    "prism_hadamard_qwen35": {
        "text_config": {**_QWEN3_5, "head_dim": 32},
        "modules": [{"path": "model.layers.1.self_attn.o_proj", "embedding": False, "dtype": "float16", "block": 0}],
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
    },
    "qwen": {"kv_channels": 16, "num_key_value_heads": _HEADS},
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": _QWEN3_5},
    "qwen3_next": {**_DELTA, "full_attention_interval": 2},
    "recurrent_gemma": {
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "rwkv7": _LOW_RANK,
    "spark2_5": {
        "layer_types": _SLIDING_FIRST,
        "hidden_act": "gelu",
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "step3p5": {"num_attention_groups": _KV_HEADS, "layer_types": _SLIDING_FIRST, "share_expert_dim": 48},
}
"""What an architecture needs beside `SIZES`, or against it."""

NEEDS: dict[str, str] = {
    "bitnet": "Metal",
    "muse_spark": "Metal",
    "olmo": "the package ai2-olmo",
}
"""What mlx-lm's own code of an architecture does not run without, wherever it is served."""


def names() -> list[str]:
    """The Python modules of mlx-lm's models, architectures and helpers alike."""
    return sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))


def is_model(name: str) -> bool:
    """Whether the module defines an architecture; the others are helpers. One that needs what is missing does."""
    if name in NEEDS:
        return True
    architecture = _architecture(name)
    return hasattr(architecture, "Model") and hasattr(architecture, "ModelArgs")


def configuration(name: str) -> dict[str, Any]:
    """What the tiny model's config.json would hold."""
    overrides = dict(CONFIGS.get(name, {}))
    if name in TEXT:
        module, kind = TEXT[name]
        inner = {**CONFIGS.get(module, {}), **overrides.get("text_config", {})}
        overrides["text_config"] = _filled(getattr(_architecture(module), kind), module, inner)
    return _filled(_architecture(name).ModelArgs, name, overrides)


def tiny(name: str, seed: int = 0) -> nn.Module:
    """A model of the architecture with random float32 weights, far enough from their first values that each counts."""
    architecture = _architecture(name)
    arguments = architecture.ModelArgs
    config = configuration(name)
    mx.random.seed(seed)
    model: nn.Module = architecture.Model(
        arguments.from_dict(config) if hasattr(arguments, "from_dict") else arguments(**config)
    )
    leaves: Any = tree_flatten(model.parameters())
    if sum(array.size for _, array in leaves) > 2_000_000:
        raise ValueError(f"the configuration of {name} is not tiny: a size has the architecture's default")
    model.update(tree_map(_stirred, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _architecture(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


def _filled(arguments: Any, name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(arguments)}
    sizes = {key: value for key, value in SIZES.items() if key in known}
    return {"model_type": name, **sizes, **overrides}


def _stirred(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array.astype(mx.float32) + 0.15 * mx.random.normal(array.shape)
