"""Layers that are attention and a gated MLP, each normed before and added to what went in: as four products.

A step of few rows costs a GPU little more than to read the weights once and to start each kernel. So where
`kernels.linear` is one launch, with the norm before it and the gate or the sum after it, such a layer is nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from pagefork import kernels
from pagefork.runtime.dense import by_whole
from pagefork.runtime.routing import LayerCache, Patch, Step, running

if TYPE_CHECKING:
    from pagefork.runtime.models import Model

_TRIAL_TOKENS = 2
_TOLERANCE = 5e-3
"""Of what a layer adds, in float32. MLX multiplies that in TF32 on CUDA, by either way to compute a layer."""


class Trial(NamedTuple):
    """A layer that may be plain: what went in, what came out, and what `multiply` made of it, in float32."""

    layer: nn.Module
    cache: LayerCache
    x: mx.array
    out: mx.array
    multiplied: mx.array


def find(model: Model, patch: Patch) -> list[kernels.Linear]:
    """Try out the layers that may be plain, tell their caches which are, and return the products that those take.

    A layer that does more (scales what it adds, gates by another function) comes out different. Trials are in float32:
    in 16 bits what a layer adds may be less than what its input is rounded by.
    """
    offered = [layer for layer in model.module.modules() if _fused(layer, 1, model.dtype)]
    if not offered:
        return []
    for layer in offered:
        patch.swap(layer, compute)
    trials: list[Trial] = []
    positions = mx.arange(_TRIAL_TOKENS)
    model(positions + 1, positions, _queries, None, by_whole(_queries, model.layers, positions), trials)
    # One after another: in float32 all layers together would take twice the memory of the weights, twice.
    alike = [(trial, bool(_alike(trial.x, trial.out, trial.multiplied))) for trial in trials]
    products: list[kernels.Linear] = []
    for cache in {trial.cache: None for trial in trials}:
        tried = [(trial, same) for trial, same in alike if trial.cache is cache]
        cache.plain = all(same for _, same in tried) and not model.layers[cache.layer].sinks
        if cache.plain:
            products += [product for trial, _ in tried for product in _cases(trial.layer)]
    return list(dict.fromkeys(products))


def compute(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A `Patch.swap` call for layers: what is plain is multiplied, in a step of few rows."""
    step, x = running(), args[0] if args else None
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, LayerCache)), None)
    if (
        step is None
        or step.attend_whole is None
        or cache is None
        or cache.rope is None
        or not (cache.plain or step.trials is not None)
        or not isinstance(x, mx.array)
        or not _fused(layer, x.shape[0], x.dtype)
    ):
        return original(layer, *args, **kwargs)
    if step.trials is None:
        return multiply(layer, x, step, cache)
    wide = x.astype(mx.float32)
    out = original(layer, wide, *args[1:], **kwargs)
    if isinstance(out, mx.array):
        # The kernels themselves are tested before they are used, but not before this.
        step.trials.append(Trial(layer, cache, wide, out, multiply(layer, wide, step, cache, "reference")))
    return original(layer, *args, **kwargs)


def multiply(layer: Any, x: mx.array, step: Step, cache: LayerCache, backend: str | None = None) -> mx.array:
    """A plain layer of `x` `[T, 1, hidden]`."""
    assert step.attend_whole is not None and cache.rope is not None
    of_qkv, of_output, of_gate, of_down = _linears(layer)

    def product(linear: Any, x: mx.array, norm: Any = None, **options: Any) -> mx.array:
        if norm is not None:
            options |= {"gain": norm.weight, "eps": norm.eps}
        return kernels.linear(x, linear.weight, bias=linear.get("bias"), **options, backend=backend)

    hidden = x.squeeze(1)
    qkv = product(of_qkv, hidden, norm=layer.input_layernorm)
    step.stored[cache] = qkv, qkv
    attended = step.attend_whole(cache.layer, qkv, cache.rope, None).reshape(x.shape[0], -1).astype(x.dtype)
    hidden = product(of_output, attended, add=hidden)
    gated = product(of_gate, hidden, norm=layer.post_attention_layernorm, glu=True)
    return product(of_down, gated, add=hidden)[:, None]


def _queries(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
    """Attention that answers with its queries: enough to tell layers apart."""
    return q


def _looks_plain(layer: Any) -> bool:
    """Whether it has the parts of a plain layer, with all projections that can be joint."""
    attention, mlp = layer.get("self_attn"), layer.get("mlp")
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        return False
    joints = [getattr(attention.get("q_proj"), "joint", None), getattr(mlp.get("gate_proj"), "joint", None)]
    norms = [layer.get("input_layernorm"), layer.get("post_attention_layernorm")]
    linears = [*(joint and joint.whole for joint in joints), attention.get("o_proj"), mlp.get("down_proj")]
    return (
        all(joint is not None and joint.intact() for joint in joints)
        and all(type(norm) is nn.RMSNorm for norm in norms)
        and all(type(linear) is nn.Linear for linear in linears)
    )


def _linears(layer: Any) -> tuple[Any, Any, Any, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj.joint.whole, attention.o_proj, mlp.gate_proj.joint.whole, mlp.down_proj


def _cases(layer: Any) -> list[kernels.Linear]:
    """Of `multiply`."""
    hidden = layer.input_layernorm.weight.size
    around: list[dict[str, Any]] = [{"norm": hidden}, {"add": True}, {"norm": hidden, "glu": True}, {"add": True}]
    pairs = zip(_linears(layer), around, strict=True)
    return [kernels.Linear(linear.weight.dtype, bias="bias" in linear, **options) for linear, options in pairs]


def _fused(layer: Any, rows: int, dtype: mx.Dtype) -> bool:
    """Whether a layer looks plain, as it is now, and each of its products is one launch for so many rows."""
    # The least there is: soon answered.
    if not kernels.can_multiply(kernels.Linear(dtype), rows, 8, 16) or not _looks_plain(layer):
        return False
    linears, cases = _linears(layer), _cases(layer)
    gains = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    return all(array.dtype == dtype for array in (*gains, *(a for linear in linears for a in linear.values()))) and all(
        kernels.can_multiply(case, rows, linear.weight.shape[1], linear.weight.shape[0])
        for case, linear in zip(cases, linears, strict=True)
    )


def _alike(x: mx.array, out: mx.array, multiplied: mx.array) -> mx.array:
    """Whether in every row two outputs of a layer differ by no more than how they were computed."""
    return (_size(out - multiplied) <= _TOLERANCE * _size(out - x)).all()


def _size(rows: mx.array) -> mx.array:
    return mx.sqrt(mx.mean(rows * rows, axis=-1))
