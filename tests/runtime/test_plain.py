"""Plain layers: four products with their norms, gate and sums, and the same numbers as the model's own code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRALinear

from pagefork import kernels
from pagefork.runtime.dense import DenseKV, by_whole
from pagefork.runtime.models import Model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from architectures import tiny

TOKENS = [5, 6, 7]


@pytest.fixture(autouse=True)
def as_where_products_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU `kernels.linear` is MLX's own operations, so that the layers computed with it can be looked at."""
    monkeypatch.setattr(kernels, "can_multiply", lambda case, rows, inputs, outputs: rows <= 4)


@pytest.fixture
def opened() -> Iterator[Any]:
    models: list[Model] = []

    def open_model(module: nn.Module) -> Model:
        models.append(Model(module, name="tiny"))
        return models[-1]

    yield open_model
    for model in models:
        model.restore()


def logits(model: Model, whole: bool, rows: int = len(TOKENS)) -> mx.array:
    """Of `rows` positions in one step, by the model's own layers or, where they are plain, by `plain.multiply`."""
    positions, attend = mx.arange(rows), DenseKV(model.layers).step([0] * rows)
    tokens = mx.array((TOKENS * rows)[:rows])
    return model(tokens, positions, attend, attend_whole=by_whole(attend, model.layers, positions) if whole else None)


def plain_layers(model: Model) -> int:
    return sum(cache.plain for cache in model._caches)


def in_sixteen_bits(name: str, spike: float = 0.0) -> nn.Module:
    """`spike`: of the embeddings of the tokens that layers are tried with, as some models have for a first token."""
    module = tiny(name)
    module.model.embed_tokens.weight[1:3, 0] += spike
    module.update(tree_map(lambda array: array.astype(mx.bfloat16), module.parameters()))
    return module


def count(model: Model, monkeypatch: pytest.MonkeyPatch, rows: int = len(TOKENS)) -> int:
    """How many products one step takes from `kernels.linear`."""
    calls: list[tuple[int, ...]] = []
    original = kernels.linear

    def counted(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        calls.append(x.shape)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(kernels, "linear", counted)
    logits(model, True, rows)
    monkeypatch.setattr(kernels, "linear", original)
    return len(calls)


LIKE_LLAMA = ["llama", "qwen2", "smollm3", "helium", "internlm3", "mimo", "seed_oss", "nemotron-nas", "deepseek"]
OTHERS = ["granite", "minicpm", "qwen3", "ministral3", "gemma2", "gemma4_text", "olmo2", "mixtral", "phi3", "cohere"]


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_plain_layers_give_the_same_logits(opened: Any, name: str) -> None:
    model = opened(tiny(name))
    assert plain_layers(model) > 0
    assert mx.allclose(logits(model, True), logits(model, False), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "smollm3"])
def test_llamas_are_plain(opened: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = opened(tiny(name))
    rotated = sum(rope is not None for rope in model.rotations)
    assert count(model, monkeypatch) == 4 * rotated > 0
    assert any(product.bias for product in model.products) == (name == "qwen2")


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_do_more_are_not(opened: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = opened(tiny(name))
    assert count(model, monkeypatch) == 0 and model.products == []


@pytest.mark.parametrize("spike", [0.0, 300.0])
@pytest.mark.parametrize("name", ["granite", "minicpm", "llama", "qwen2"])
def test_sixteen_bits_do_not_hide_what_a_layer_does(opened: Any, name: str, spike: float) -> None:
    assert plain_layers(opened(in_sixteen_bits(name, spike))) == (4 if name in LIKE_LLAMA else 0)


def test_steps_of_many_rows_are_the_models_own(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(tiny("llama"))
    assert count(model, monkeypatch, rows=5) == 0
    assert count(model, monkeypatch, rows=4) == 16


@pytest.mark.parametrize("part", ["input_layernorm", "o_proj", "gate_proj", "down_proj"])
def test_weights_that_come_later_are_used(opened: Any, part: str) -> None:
    model = opened(tiny("llama"))
    assert plain_layers(model) == 4
    before, layer = logits(model, True), model.module.layers[1]
    holder = next(holder for holder in (layer, layer.self_attn, layer.mlp) if part in holder)
    holder[part].weight = holder[part].weight * 2
    assert not mx.allclose(logits(model, True), before, atol=1e-3)
    assert mx.allclose(logits(model, True), logits(model, False), atol=1e-4)


def test_an_adapter_that_comes_later_is_used(opened: Any) -> None:
    model = opened(tiny("llama"))
    assert plain_layers(model) == 4
    before, mlp = logits(model, True), model.module.layers[2].mlp
    mlp.down_proj = LoRALinear.from_base(mlp.down_proj, r=4)
    mlp.down_proj.lora_b = mx.random.normal(mlp.down_proj.lora_b.shape, key=mx.random.key(1))
    assert not mx.allclose(logits(model, True), before, atol=1e-3)
    assert mx.allclose(logits(model, True), logits(model, False), atol=1e-4)


def test_a_layer_of_two_dtypes_is_the_models_own(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("llama")
    module.layers[0].input_layernorm.weight = module.layers[0].input_layernorm.weight.astype(mx.float16)
    assert count(opened(module), monkeypatch) == 12


def test_a_kernel_that_does_not_run_is_not_met_before_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.linear

    def linear(*args: Any, backend: str | None = None, **options: Any) -> mx.array:
        if backend != "reference":
            raise RuntimeError("no such instruction")
        return original(*args, **options, backend=backend)

    monkeypatch.setattr(kernels, "linear", linear)
    model = Model(tiny("llama"), name="tiny")
    assert plain_layers(model) == 4
    model.restore()


def test_layers_are_called_by_others_as_before(opened: Any) -> None:
    model = opened(tiny("llama"))
    layer, x = model.module.layers[0], mx.random.normal((1, 3, 64), key=mx.random.key(0))
    assert mx.array_equal(layer(x=x), layer(x))


def test_a_closed_model_has_its_own_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("llama")
    kind = type(module.layers[0])
    model, again = Model(module, name="one"), Model(module, name="two")
    model.restore()
    assert count(again, monkeypatch) == 16
    again.restore()
    assert type(module.layers[0]) is kind
