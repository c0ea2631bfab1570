"""Parts of mlx-lm's models that do by hand what the routing must see: written anew for our caches alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from pagefork.runtime.routing import LayerCache


def gemma2_attention(
    original: Callable[..., mx.array], module: Any, x: mx.array, mask: Any = None, cache: Any = None
) -> mx.array:
    """Gemma 2's attention with the scores left to the cache; calls without our cache run the model's own code."""
    if not isinstance(cache, LayerCache):
        return original(module, x, mask, cache)
    batch, length, _ = x.shape

    def heads(projected: mx.array, count: int) -> mx.array:
        return projected.reshape(batch, length, count, module.head_dim).transpose(0, 2, 1, 3)

    queries = module.rope(heads(module.q_proj(x), module.n_heads), offset=cache.offset)
    keys = module.rope(heads(module.k_proj(x), module.n_kv_heads), offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, heads(module.v_proj(x), module.n_kv_heads))
    output = cache.attend(
        queries, keys, values, scale=module.scale, mask=mask, softcap=float(module.attn_logit_softcapping)
    )
    projected: mx.array = module.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, length, -1))
    return projected


def gpt_bigcode_trunk(original: Callable[..., mx.array], module: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """GPT BigCode's layers with position embeddings looked up by each token's own position, not by one offset."""
    if not (cache and isinstance(cache[0], LayerCache)):
        return original(module, inputs, cache)
    positions = mx.array(cache[0].offset).reshape(-1, 1) + mx.arange(inputs.shape[1])
    hidden = module.wte(inputs) + module.wpe(positions)
    mask = cache[0].make_mask(inputs.shape[1])
    for layer, layer_cache in zip(module.h, cache, strict=True):
        hidden = layer(hidden, mask, cache=layer_cache)
    normed: mx.array = module.ln_f(hidden)
    return normed


REWRITES: dict[tuple[str, str], Callable[..., mx.array]] = {
    ("mlx_lm.models.gemma2", "Attention"): gemma2_attention,
    ("mlx_lm.models.gpt_bigcode", "GPTBigCodeModel"): gpt_bigcode_trunk,
}
"""Replacements for `Patch.swap`, by the module and the name of the class whose `__call__` they stand in for."""
