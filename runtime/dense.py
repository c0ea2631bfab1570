"""Attention over plain per-sequence K/V arrays: what `Model` is checked against at load, and in tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from pagefork.kernels import Rope
from pagefork.kernels.reference import rotate
from pagefork.runtime.layers import LayerSpec
from pagefork.runtime.routing import Attend, AttendWhole, LayerCache, Step


class DenseKV:
    """K and V of any number of sequences, kept as whole arrays that grow; slow, simple and right."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        self._kept: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    def step(self, owners: Sequence[int]) -> Attend:
        """The `attend` of one step whose row r belongs to sequence `owners[r]`; a sequence's rows stand in order.

        Layers that share keys and values call it more than once with one layer's number; the first call stores them.
        """
        rows: dict[int, list[int]] = defaultdict(list)
        for row, owner in enumerate(owners):
            rows[owner].append(row)
        written: set[int] = set()

        def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
            order: list[int] = []
            parts: list[mx.array] = []
            for owner, own in rows.items():
                index = mx.array(own)
                if layer not in written:
                    self._append(layer, owner, k[index], v[index])
                keys, values = self._kept[layer, owner]
                parts.append(attention(q[index], keys, values, self._layers[layer], sinks))
                order += own
            written.add(layer)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            return mx.concatenate(parts)[mx.array(inverse)]

        return attend

    def _append(self, layer: int, owner: int, k: mx.array, v: mx.array) -> None:
        old = self._kept.get((layer, owner))
        if old is not None:
            k, v = mx.concatenate([old[0], k]), mx.concatenate([old[1], v])
        self._kept[layer, owner] = k, v


def by_whole(attend: Attend, layers: Sequence[LayerSpec], positions: mx.array) -> AttendWhole:
    """The `attend_whole` of a step at int32 `[T]` positions: it rotates, then attends by `attend`."""

    def attend_whole(layer: int, qkv: mx.array, rope: Rope, sinks: mx.array | None) -> mx.array:
        spec = layers[layer]
        return attend(layer, *rotate(qkv, positions, rope, spec.heads, spec.kv_heads, spec.head_dim), sinks)

    return attend_whole


class WholeCache(LayerCache):
    """The cache of one layer for one row of several tokens from any position on, with nothing before them.

    `step.positions` is the first token's position, an int.
    """

    def __init__(self, layer: int, step: Step, spec: LayerSpec, *, recast: bool) -> None:
        super().__init__(layer, step, recast=recast)
        self._spec = spec

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """`queries` `[1, heads, n, head_dim]`, `keys` and `values` `[1, kv_heads, n, head_dim]`."""
        keys, values = self._take(keys, values)
        q, k, v = (array[0].transpose(1, 0, 2) for array in (queries, keys, values))
        return attention(q, k, v, self._spec, sinks).transpose(1, 0, 2)[None]


def attention(q: mx.array, k: mx.array, v: mx.array, spec: LayerSpec, sinks: mx.array | None) -> mx.array:
    """Causal attention of the last `n` positions of one sequence.

    `q` `[n, heads, head_dim]`; `k`, `v` `[length, kv_heads, head_dim]` with `length >= n`; `sinks` `[heads]` or None.
    Returns `[n, heads, head_dim]` in `q`'s dtype; computed in float32.
    """
    n, length = q.shape[0], k.shape[0]
    groups = spec.heads // spec.kv_heads
    keys = mx.repeat(k.astype(mx.float32), groups, axis=1).transpose(1, 2, 0)
    values = mx.repeat(v.astype(mx.float32), groups, axis=1).transpose(1, 0, 2)
    scores = (q.astype(mx.float32).transpose(1, 0, 2) @ keys) * spec.scale
    if spec.softcap is not None:
        scores = mx.tanh(scores / spec.softcap) * spec.softcap
    rows = mx.arange(length - n, length)[:, None]
    columns = mx.arange(length)[None]
    visible = columns <= rows
    if spec.window is not None:
        visible = visible & (columns > rows - spec.window)
    scores = mx.where(visible, scores, -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (spec.heads, n, 1))
        weights = mx.softmax(mx.concatenate([scores, extra], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    return (weights @ values).transpose(1, 0, 2).astype(q.dtype)
