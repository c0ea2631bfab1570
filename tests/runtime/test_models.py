"""A routed model is the model: same greedy tokens, ragged or alone; what cannot be routed is refused."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache

from pagefork.runtime.dense import DenseKV
from pagefork.runtime.errors import InvalidRequest, ModelUnavailable, UnsupportedModel
from pagefork.runtime.models import LayerSpec, Model, load, materialise

VOCAB = 96
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "n_embd": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "sliding_window": 5,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "layer_types": None,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-windows": {"layer_types": ALTERNATING},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {},
    "cohere": {},
    "cohere2": {},
    "granite": {},
    "smollm3": {},
    "gpt2": {},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {"layer_types": ALTERNATING},
}
PROMPTS = ([5, 17, 3, 88, 41, 2, 9, 30], [7], [64, 12, 50])


def tiny(family: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model of an mlx-lm architecture with random weights, far enough from zero that every part counts."""
    name = family.partition("-")[0]
    architecture = importlib.import_module(f"mlx_lm.models.{name}")
    overrides = FAMILIES.get(family, {})
    known = {field.name: field for field in dataclasses.fields(architecture.ModelArgs)}
    config = {k: v for k, v in SIZES.items() if k in known and (v is not None or k in overrides)}
    model: nn.Module = architecture.Model(architecture.ModelArgs(**{**config, "model_type": name, **overrides}))
    mx.random.seed(7)
    model.update(
        tree_map(lambda p: (p.astype(mx.float32) + 0.1 * mx.random.normal(p.shape)).astype(dtype), model.parameters())
    )
    mx.eval(model.parameters())
    return model


def own_greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """mlx-lm's own greedy tokens."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def routed_greedy(model: Model, prompts: tuple[list[int], ...], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts, decoded together in flattened steps."""
    kv = DenseKV(model.layers)
    fresh = [list(prompt) for prompt in prompts]
    lengths = [0] * len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        tokens = [token for part in fresh for token in part]
        positions = [n + i for n, part in zip(lengths, fresh, strict=True) for i in range(len(part))]
        owners = [owner for owner, part in enumerate(fresh) for _ in part]
        last = mx.cumsum(mx.array([len(part) for part in fresh])) - 1
        logits = model(mx.array(tokens), mx.array(positions), kv.step(owners), last)
        lengths = [n + len(part) for n, part in zip(lengths, fresh, strict=True)]
        fresh = [[int(token)] for token in logits.argmax(axis=-1)]
        for answer, part in zip(answers, fresh, strict=True):
            answer += part
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_ragged_batch_equal_mlx_lms_own(family: str) -> None:
    module = tiny(family)
    own = [own_greedy(module, prompt, 10) for prompt in PROMPTS]
    model = load((module, None))
    try:
        assert routed_greedy(model, PROMPTS, 10) == own
    finally:
        model.restore()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_quantised_model_is_served_as_it_is(family: str) -> None:
    module = tiny(family)
    nn.quantize(
        module,
        group_size=32,
        bits=4,
        class_predicate=lambda _, m: m.weight.shape[-1] % 32 == 0 if isinstance(m, nn.Linear | nn.Embedding) else False,
    )
    own = [own_greedy(module, prompt, 6) for prompt in PROMPTS]
    model = load((module, None))
    assert routed_greedy(model, PROMPTS, 6) == own
    model.restore()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_passes_the_check_at_load_and_is_the_dtype_of_k_and_v(dtype: mx.Dtype) -> None:
    model = load((tiny("llama", dtype), None))
    assert model.dtype == dtype
    model.restore()


def test_layers_are_described_by_what_they_pass_to_attention() -> None:
    expected = {
        "llama": LayerSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5),
        "gpt_oss": LayerSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, window=5, sinks=True),
        "gemma2": LayerSpec(heads=4, kv_heads=2, head_dim=8, scale=8**-0.5, softcap=50.0),
        "gpt2": LayerSpec(heads=4, kv_heads=4, head_dim=8, scale=8**-0.5),
    }
    for family, spec in expected.items():
        model = load((tiny(family), None))
        model.restore()
        first = model.layers[0]
        assert dataclasses.replace(first, scale=spec.scale) == spec
        assert first.scale == pytest.approx(spec.scale)
        assert (len(model.layers), model.vocab_size) == (4, VOCAB)
    assert [layer.window for layer in load((tiny("cohere2"), None)).layers] == [5, None, 5, None]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere2"])
def test_rows_pick_logits_of_the_same_pass(family: str) -> None:
    model = load((tiny(family), None))
    tokens, positions = mx.array(PROMPTS[0]), mx.arange(8)
    every = model(tokens, positions, DenseKV(model.layers).step([0] * 8))
    some = model(tokens, positions, DenseKV(model.layers).step([0] * 8), mx.array([6, 0, 3]))
    model.restore()
    assert every.shape == (8, VOCAB)
    assert some.shape == (3, VOCAB)
    assert mx.allclose(some, every[mx.array([6, 0, 3])], atol=1e-5)


def test_the_output_head_runs_for_the_wanted_rows_only() -> None:
    module = tiny("llama")
    seen: list[tuple[int, ...]] = []

    class Head(type(module.model.embed_tokens)):  # type: ignore[misc]
        def as_linear(self, x: mx.array) -> mx.array:
            seen.append(x.shape)
            return super().as_linear(x)

    model = load((module, None))
    module.model.embed_tokens.__class__ = Head
    model(mx.array(PROMPTS[0]), mx.arange(8), DenseKV(model.layers).step([0] * 8), mx.array([7]))
    model.restore()
    assert seen == [(1, 1, 32)]


def test_the_users_model_still_works_while_it_is_routed_and_is_itself_again_after() -> None:
    module = tiny("gemma2")
    llama = tiny("llama")
    before = [type(part) for part in module.modules()]
    function = base.scaled_dot_product_attention
    own = own_greedy(module, PROMPTS[0], 5), own_greedy(llama, PROMPTS[0], 5)
    models = [load((module, None)), load((llama, None))]
    assert own_greedy(module, PROMPTS[0], 5) == own[0]
    assert own_greedy(llama, PROMPTS[0], 5) == own[1]
    for model in models:
        model.restore()
        model.restore()
    assert [type(part) for part in module.modules()] == before
    assert importlib.import_module("mlx_lm.models.llama").scaled_dot_product_attention is function


def test_two_models_share_one_module_and_the_first_to_leave_does_not_break_the_other() -> None:
    module = tiny("llama")
    own = [own_greedy(module, prompt, 4) for prompt in PROMPTS]
    first, second = load((module, None)), load((module, None))
    assert routed_greedy(second, PROMPTS, 4) == own
    first.restore()
    assert routed_greedy(second, PROMPTS, 4) == own
    second.restore()
    assert type(module.model).__name__ == "LlamaModel"
    assert not hasattr(type(module.model), "pagefork_call")


def test_an_error_in_attend_reaches_the_caller_and_the_next_step_is_sound() -> None:
    module = tiny("llama")
    own = [own_greedy(module, prompt, 3) for prompt in PROMPTS]
    model = load((module, None))

    def broken(*_: Any) -> mx.array:
        raise RuntimeError("no blocks")

    with pytest.raises(RuntimeError, match="no blocks"):
        model(mx.array([1, 2]), mx.array([0, 1]), broken)
    assert routed_greedy(model, PROMPTS, 3) == own
    model.restore()


def test_a_pair_made_in_one_thread_is_served_in_another() -> None:
    module = tiny("llama")
    own = own_greedy(module, PROMPTS[0], 3)
    module.update(tree_map(lambda p: p * 1.0, module.parameters()))
    materialise((module, None))
    answers: list[list[int]] = []

    def serve() -> None:
        model = load((module, None))
        answers.extend(routed_greedy(model, PROMPTS[:1], 3))
        model.restore()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(60)
    assert answers == [own]


class HandMade(nn.Module):
    """One layer of attention around a choice of faults; everything else is as mlx-lm has it."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.embed = nn.Embedding(VOCAB, 16)
        self.project = nn.Linear(16, 48)
        self.rope = nn.RoPE(8)
        self.layers = [nn.Identity()]

    def make_cache(self) -> list[Any]:
        return [RotatingKVCache(64) if self.fault == "masks wider than its cache" else KVCache()]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        h = self.embed(tokens)
        batch, length, _ = h.shape
        q, k, v = (p.reshape(batch, length, 2, 8).transpose(0, 2, 1, 3) for p in mx.split(self.project(h), 3, axis=-1))
        wide = 65 if self.fault == "masks wider than its cache" else None
        mask = base.create_attention_mask(h, cache[0], window_size=wide)
        q, k = self.rope(q, offset=cache[0].offset), self.rope(k, offset=cache[0].offset)
        if self.fault == "rotates by the length":
            q = q * (1 + cache[0].offset // 9) if isinstance(cache[0].offset, int) else q
        if self.fault == "narrow":
            v = v[..., :4]
        k, v = cache[0].update_and_fetch(k, v)
        if self.fault == "changes keys after storing them":
            k = k * 2
        if self.fault == "casts keys after storing them":
            q, k = q.astype(mx.float32), k.astype(mx.float32)
        if self.fault == "has a mask of its own":
            mask = "causal" if length > 1 else None
        if self.fault == "attends in two ways":
            q = q + scaled_dot_product_attention(q, k, v, cache[0], scale=0.5, mask=mask)
        if self.fault == "none, attends twice":
            q = q + scaled_dot_product_attention(q, k, v, None, scale=1.0, mask=mask)
        if self.fault == "narrow values":
            v = v[..., :4]
        out = scaled_dot_product_attention(q, k, v, cache[0], 1.0, mask)
        out = mx.pad(out, [(0, 0)] * 3 + [(0, 8 - out.shape[-1])])
        return self.embed.as_linear(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


FAULTS = {
    "changes keys after storing them": "other keys and values",
    "has a mask of its own": "a mask of its own",
    "masks wider than its cache": "masks at 65 positions but its cache keeps only 64",
    "attends in two ways": "in different ways",
    "narrow values": "other keys and values",
    "rotates by the length": "its logits change at position",
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items())
def test_a_layer_that_would_be_run_wrong_is_refused(fault: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load((HandMade(fault), None))


@pytest.mark.parametrize("fault", ["none", "none, attends twice", "casts keys after storing them", "narrow"])
def test_the_hand_made_layer_without_a_fault_is_served(fault: str) -> None:
    module = HandMade(fault)
    own = [own_greedy(module, prompt, 4) for prompt in PROMPTS]
    model = load((module, None))
    assert routed_greedy(model, PROMPTS, 4) == own
    model.restore()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (
        {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
        "does not go through",
    ),
    "deepseek_v3": (
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 4,
        },
        "latent attention",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_without_keys_and_values_are_refused_with_the_reason(family: str) -> None:
    overrides, reason = REFUSED[family]
    architecture = importlib.import_module(f"mlx_lm.models.{family}")
    known = {field.name for field in dataclasses.fields(architecture.ModelArgs)}
    config = {k: v for k, v in SIZES.items() if k in known and v is not None}
    module = architecture.Model(architecture.ModelArgs(**{**config, "model_type": family, **overrides}))
    with pytest.raises(UnsupportedModel, match=reason):
        load((module, None))
    assert all(not hasattr(type(part), "pagefork_call") for part in module.modules())


def test_sources_that_make_no_sense_are_told_apart() -> None:
    with pytest.raises(InvalidRequest, match="pair"):
        load(("smollm2-135m", None))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="name, a path"):
        load(42)  # type: ignore[arg-type]
    with pytest.raises(ModelUnavailable, match="check the path"):
        load("/nowhere/model.gguf")
    with pytest.raises(ModelUnavailable, match="cannot load"):
        load("/nowhere/folder")


def test_weight_bytes_counts_every_parameter() -> None:
    module = tiny("qwen3")
    model = load((module, None))
    model.restore()
    assert model.weight_bytes == sum(array.nbytes for _, array in tree_flatten(module.parameters()))
