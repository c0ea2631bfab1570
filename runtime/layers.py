"""How each layer of a model attends, read from what it passes to the attention call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from pagefork.runtime.errors import UnsupportedModel
from pagefork.runtime.groups import Groups, grouped
from pagefork.runtime.routing import Mask, Probe, refuse


@dataclass(frozen=True)
class LayerSpec:
    """How one layer attends.

    `head_dim`: of queries and keys; narrower values are padded with zeros.
    `window`: a query at position i sees the positions j with `i - window < j <= i`, or all `j <= i` where it is None.
    `sinks`: the layer passes a logit per head that takes part in the softmax and has no value.
    `softcap`: scores are `softcap * tanh(score / softcap)` before masking, where it is not None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of a token's K, and of its V: (kv_heads, head_dim)."""
        return self.kv_heads, self.head_dim


def grouped_layers(layers: Sequence[LayerSpec]) -> Groups:
    """Those that they share the pools in."""
    return grouped([layer.window for layer in layers], [layer.shape for layer in layers])


def layer_spec(probe: Probe) -> LayerSpec:
    """What a layer passed to attention, as far as the kernels can do it; raises UnsupportedModel where they cannot."""
    call = probe.call
    if call is None:
        refuse(f"layer {probe.layer} never calls attention with its cache")
    heads, (_, kv_heads, _, head_dim) = call["heads"], call["keys"].shape
    _, value_heads, _, value_dim = call["values"].shape
    if value_dim > head_dim:
        refuse(f"layer {probe.layer} has values of {value_dim} dimensions, wider than its keys of {head_dim}")
    if value_heads != kv_heads or heads % kv_heads:
        refuse(f"layer {probe.layer} has {heads} query heads, {kv_heads} key heads and {value_heads} value heads")
    window = call["window"]
    if probe.max_size is not None and (window is None or window > probe.max_size):
        # mlx-lm's own answers would depend on how the prompt was cut, and a short prompt would not show it.
        refuse(f"layer {probe.layer} masks at {window or 'no'} positions but its cache keeps only {probe.max_size}")
    return LayerSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=call["scale"],
        window=window,
        sinks=call["sinks"],
        softcap=call["softcap"],
    )


def trunks(module: nn.Module) -> list[nn.Module]:
    """The modules that may end right below the output head, innermost first: those that hold a list of layers."""
    return [
        part
        for name, part in module.named_modules()
        if part is not module
        and any(isinstance(v, list) and v and isinstance(v[0], nn.Module) for v in part.values())
        and not any(piece.isdigit() for piece in name.split("."))
    ]


def attempt(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Run the model with our caches; whatever its code cannot do with them is a reason to refuse it."""
    try:
        return run()
    except Exception as error:
        if any(getattr(part, "kv_lora_rank", None) for part in module.modules()):
            refuse("it uses multi-head latent attention, which caches compressed states instead of keys and values")
        if isinstance(error, UnsupportedModel):
            raise
        if Mask.__name__ in str(error) or "scaled_dot_product_attention()" in str(error):
            refuse("it uses the attention mask elsewhere than in mlx-lm's scaled_dot_product_attention")
        refuse(f"its code does not run with a cache per token ({brief(error)})")


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
