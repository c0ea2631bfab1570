"""Joint projections: the same numbers from fewer products, and nothing kept twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import ministral3
from mlx_lm.tuner.lora import LoRALinear

from pagefork.cache.kv import PagedKVCache
from pagefork.kernels import Rope
from pagefork.runtime.dense import DenseKV, by_whole
from pagefork.runtime.models import Model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from architectures import configuration, tiny

TOKENS, POSITIONS = mx.array([5, 6, 7, 8]), mx.arange(4)


@pytest.fixture
def module() -> nn.Module:
    return tiny("llama")


@pytest.fixture
def model(module: nn.Module) -> Iterator[Model]:
    model = Model(module, name="llama")
    yield model
    model.restore()


def logits(model: Model) -> mx.array:
    return model(TOKENS, POSITIONS, DenseKV(model.layers).step([0] * 4))


def logits_by_whole(model: Model, positions: mx.array = POSITIONS) -> mx.array:
    """The same where layers that can attend to their joint projection do."""
    attend = DenseKV(model.layers).step([0] * 4)
    return model(TOKENS, positions, attend, attend_whole=by_whole(attend, model.layers, positions))


def weights(attention: Any) -> list[mx.array]:
    return [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]


def test_the_parts_keep_their_weights(module: nn.Module) -> None:
    attention = module.layers[0].self_attn
    before, of_gate = weights(attention), module.layers[0].mlp.gate_proj.weight
    model = Model(module, name="llama")
    assert all(map(mx.array_equal, before, weights(attention)))
    assert mx.array_equal(of_gate, module.layers[0].mlp.gate_proj.weight)
    model.restore()
    assert all(map(mx.array_equal, before, weights(attention)))


def test_no_weight_is_kept_twice() -> None:
    module = tiny("llama")
    mx.eval(module.parameters())
    held = mx.get_active_memory()
    model = Model(module, name="llama")
    mx.clear_cache()
    largest = max(part.weight.nbytes for part in module.modules() if isinstance(part, nn.Linear))
    assert mx.get_active_memory() - held < 2 * largest
    model.restore()


def test_a_step_computes_one_product_for_three(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = nn.Linear.__call__

    def counted(self: nn.Linear, x: mx.array) -> mx.array:
        calls.append(self.weight.shape[0])
        return original(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", counted)
    logits(model)
    layers = len(model.layers)
    assert len(calls) == 4 * layers + 1  # QKV, output, gate and up, down; and the head


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_weights_that_come_later_are_used(model: Model, name: str, factor: float) -> None:
    before = logits(model)
    projection = model.module.layers[1].self_attn[name]
    projection.weight = projection.weight * factor
    after = logits(model)
    assert mx.allclose(before, after, atol=1e-5) == (factor == 1.0)
    assert mx.allclose(logits_by_whole(model), after, atol=1e-4)
    again = Model(model.module, name="again")
    assert mx.allclose(logits(again), after, atol=1e-4)
    again.restore()


def test_an_adapter_that_comes_later_is_used(model: Model) -> None:
    before, attention = logits(model), model.module.layers[1].self_attn
    attention.q_proj = LoRALinear.from_base(attention.q_proj, r=4)
    attention.q_proj.lora_b = mx.random.normal(attention.q_proj.lora_b.shape, key=mx.random.key(1))
    after = logits(model)
    assert not mx.allclose(before, after, atol=1e-3)
    assert mx.allclose(logits_by_whole(model), after, atol=1e-4)


def test_a_closed_model_may_be_changed_in_place_and_opened_again(module: nn.Module) -> None:
    model = Model(module, name="llama")
    before = logits(model)
    model.restore()
    projection = module.layers[0].self_attn.q_proj
    assert not hasattr(projection, "joint") and not hasattr(projection, "place")
    projection.weight += 0.5
    again = Model(module, name="llama")
    assert not mx.allclose(before, logits(again), atol=1e-3)
    again.restore()


def test_loading_draws_no_random_numbers(module: nn.Module) -> None:
    mx.random.seed(0)
    expected = mx.random.uniform(shape=(4,))
    mx.random.seed(0)
    Model(module, name="llama").restore()
    assert mx.array_equal(mx.random.uniform(shape=(4,)), expected)


def test_projections_with_biases_of_different_dtypes_stay_apart(module: nn.Module) -> None:
    attention = module.layers[0].self_attn
    for name, dtype in (("q_proj", mx.float16), ("k_proj", mx.float32), ("v_proj", mx.float32)):
        attention[name].bias = mx.zeros((attention[name].weight.shape[0],), dtype)
    model = Model(module, name="llama")
    assert not hasattr(attention.q_proj, "joint") and attention.q_proj.bias.dtype == mx.float16
    assert [rope is not None for rope in model.rotations] == [False, True, True, True]
    model.restore()


@pytest.mark.parametrize(("longest", "alike"), [(200, True), (512, False)])
def test_a_scale_that_begins_far_into_the_context_is_found(longest: int, alike: bool) -> None:
    """Ministral 3 scales its queries by their position; without YaRN nothing else would tell."""
    config = configuration("ministral3")
    config["rope_parameters"] = config["rope_parameters"] | {"original_max_position_embeddings": 256}
    module = ministral3.Model(ministral3.ModelArgs.from_dict(config))
    mx.eval(module.parameters())
    model = Model(module, name="ministral3", max_context=longest)
    assert [rope is not None for rope in model.rotations] == [alike] * len(model.layers)
    model.restore()


def test_rotations_are_found_in_a_long_context(module: nn.Module) -> None:
    model = Model(module, name="llama", max_context=131_072)
    assert None not in model.rotations
    model.restore()


def test_two_runtimes_of_one_model_share_the_joint_weights(model: Model) -> None:
    attention = model.module.layers[0].self_attn
    joint = attention.q_proj.joint
    other = Model(model.module, name="other")
    assert attention.q_proj.joint is joint
    model.restore()
    assert mx.allclose(logits(other), logits(model))
    other.restore()
    assert type(attention.q_proj) is nn.Linear


ROTATED = {"llama": True, "qwen2": True, "phi3": False, "qwen3": False, "gemma2": True, "gemma3_text": False}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", ROTATED)
def test_only_layers_that_do_nothing_but_rotate_attend_to_the_whole(name: str, quantised: bool) -> None:
    module = tiny(name)
    if quantised:
        nn.quantize(module, group_size=32, bits=4)
    model = Model(module, name=name)
    assert [rope is not None for rope in model.rotations] == [ROTATED[name]] * len(model.layers)
    model.restore()


def test_layers_that_rotate_alike_share_one_rotation(model: Model) -> None:
    assert len({id(rope) for rope in model.rotations}) == 1


def test_scaled_queries_are_not_taken_for_rotated_ones(module: nn.Module) -> None:
    class Scaled(nn.RoPE):
        def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
            return super().__call__(x, offset) * 1.02

    module.layers[2].self_attn.rope.__class__ = Scaled
    model = Model(module, name="scaled")
    assert [rope is not None for rope in model.rotations] == [True, True, False, True]
    model.restore()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_attention_to_the_whole_is_attention_to_its_parts(name: str) -> None:
    model = Model(tiny(name), name=name)
    expected = logits(model)
    kv = PagedKVCache(4, 8, [(s.kv_heads, s.head_dim) for s in model.layers], model.dtype)
    slots, tables, lengths = mx.arange(16, 20), mx.full((4, 1), 2), mx.arange(1, 5)
    taken = []

    def attend(layer: int, *_: Any) -> mx.array:
        raise AssertionError(f"layer {layer} was given parts")

    def attend_whole(layer: int, qkv: mx.array, rope: Rope, sinks: mx.array | None) -> mx.array:
        taken.append(layer)
        q = kv.rope_and_write(layer, qkv, slots, POSITIONS, heads=model.layers[layer].heads, rope=rope)
        return kv.attend(layer, q, tables, lengths, scale=model.layers[layer].scale)

    found = model(TOKENS, POSITIONS, attend, attend_whole=attend_whole)
    assert mx.allclose(found, expected, atol=1e-4)
    assert taken == list(range(len(model.layers)))
    model.restore()


def test_positions_that_a_model_has_no_place_for_are_not_looked_up() -> None:
    """Nothing says how long the context of this one may be, and MLX reads past the table of its positions unchecked:
    the process would not live through these."""
    for _ in range(20):
        Model(tiny("gpt2"), name="gpt2").restore()
