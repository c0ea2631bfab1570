"""Compares a routed model with itself at load, so that one whose logits would come out different is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pagefork.runtime.dense import DenseKV, WholeCache
from pagefork.runtime.layers import attempt
from pagefork.runtime.routing import Step, refuse

if TYPE_CHECKING:
    from pagefork.runtime.models import Model

# Root-mean-square difference of the logits, relative to their own size, that rounding may explain.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
_PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (2, 7, 1, 8, 2))
_WIDE = 512


def check(model: Model) -> None:
    """Compare the logits of short prompts with the model's own: from the start, in ragged steps, and far into the
    context, where a model whose rotation depends on more than each token's own position would differ.

    Raises UnsupportedModel where they differ by more than rounding.
    """
    prompts = [[token % model.vocab_size for token in prompt] for prompt in _PROMPTS]
    own = [model.module(mx.array([p]), cache=make_prompt_cache(model.module))[0] for p in prompts]
    _compare(model, mx.concatenate(own), attempt(model.module, lambda: _ragged(model, prompts)), "")
    tokens = mx.array(prompts[0])
    start = max(0, (model.max_context or 512) - tokens.size)
    step = Step()
    step.positions = start
    whole = [WholeCache(i, step, spec, recast=model.recast[i]) for i, spec in enumerate(model.layers)]
    far = attempt(model.module, lambda: model.module(tokens[None], cache=whole)[0])
    positions = mx.arange(start, start + tokens.size)
    routed = attempt(model.module, lambda: model(tokens, positions, DenseKV(model.layers).step([0] * tokens.size)))
    _compare(model, far, routed, f" at position {start}")
    if mx.default_device().type == mx.DeviceType.gpu:
        _run_wide(model)


def _run_wide(model: Model) -> None:
    """Run a step of as many rows as a prompt's chunk has: some of MLX's kernels take no more than so many."""
    rows = mx.zeros((_WIDE,), mx.int32)
    logits = attempt(model.module, lambda: model(rows, rows, lambda layer, q, k, v, sinks: q, mx.array([_WIDE - 1])))
    attempt(model.module, lambda: mx.eval(logits))


def _compare(model: Model, own: mx.array, routed: mx.array, where: str) -> None:
    difference = (routed - own).astype(mx.float32)
    error = math.sqrt(float(difference.square().mean()))
    size = math.sqrt(float(own.astype(mx.float32).square().mean()))
    if not error <= _TOLERANCE.get(model.dtype, 1e-1) * max(size, 1e-6):
        refuse(f"its logits change{where} when its attention is routed (by {error:.3g}, at a size of {size:.3g})")


def _ragged(model: Model, prompts: list[list[int]]) -> mx.array:
    """Logits of every position of two prompts: both in one step, then what is left of the first."""
    first, second = prompts
    kv = DenseKV(model.layers)
    head = mx.array([*first[:4], *second]), mx.array([*range(4), *range(len(second))])
    both = model(*head, kv.step([0] * 4 + [1] * len(second)))
    tail = mx.array(first[4:]), mx.arange(4, len(first))
    rest = len(first) - 4
    # The last step asks for its rows in two lots, so that picking rows is checked as well.
    order = mx.array([*range(rest - 1, -1, -1)])
    last = model(*tail, kv.step([0] * rest), order)[order]
    return mx.concatenate([both[:4], last, both[4:]])
