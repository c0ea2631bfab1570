"""Joint projections: the same numbers from fewer products, and nothing kept twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from pagefork.cache.kv import PagedKVCache
from pagefork.kernels import Rope
from pagefork.runtime.dense import DenseKV
from pagefork.runtime.models import Model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from architectures import tiny

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


def test_weights_that_come_later_are_used(model: Model) -> None:
    before = logits(model)
    projection = model.module.layers[1].self_attn.k_proj
    projection.weight = projection.weight * 2
    assert not mx.allclose(before, logits(model))
    again = Model(model.module, name="again")
    assert mx.allclose(logits(again), logits(model), atol=1e-5)
    again.restore()


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
