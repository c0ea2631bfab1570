"""How the layers of one step attend: write what is new into the blocks, then read each row's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from pagefork import kernels
from pagefork.cache.kv import PagedKVCache
from pagefork.runtime.engine import Ints, Segment, StepPlan
from pagefork.runtime.layers import LayerSpec
from pagefork.runtime.transfer import Transfer


class Arrays(NamedTuple):
    """A plan on the device, see StepPlan; its tokens are those that the step before sampled where it says so."""

    tokens: mx.array
    positions: mx.array
    slots: mx.array
    tables: mx.array
    lengths: mx.array
    rows: mx.array | None = None
    """None where all are wanted."""
    segments: Sequence[mx.array] = ()
    """The tables of the prompt chunks."""


def arrays_of(plan: StepPlan, previous: mx.array, transfer: Transfer) -> Arrays:
    """The plan's arrays; `previous`: the ids that the step before sampled, int32 `[R]`."""
    given = [plan.positions, plan.slots, plan.tables, plan.lengths]
    if not plan.only_decodes:
        given += [plan.rows, *(segment.table for segment in plan.segments)]
    fed = _fed(plan, previous)
    sent = transfer.send([*fed, *given])
    tokens, (positions, slots, tables, lengths, *rest) = sent[: len(fed)], sent[len(fed) :]
    rows, segments = (None, ()) if plan.only_decodes else (rest[0], rest[1:])
    if len(tokens) == 2:
        tokens = [mx.concatenate([tokens[0], previous])[tokens[1]]]
    return Arrays(tokens[0] if tokens else previous, positions, slots, tables, lengths, rows, segments)


def _fed(plan: StepPlan, previous: mx.array) -> list[Ints]:
    """The plan's tokens; where some are among the ids of the step before, also where to find each in both together.

    Nothing where those ids serve as they are, since the same rows go on: with steps in flight that is most often.
    """
    if not len(plan.feed):
        return [plan.tokens]
    index = np.arange(len(plan.tokens), dtype=np.int32)
    if plan.only_decodes and len(index) == previous.size and (plan.feed == index).all():
        return []
    decodes = len(plan.feed)
    index[:decodes] = np.where(plan.feed >= 0, len(plan.tokens) + plan.feed, index[:decodes])
    return [plan.tokens, index]


class StepAttention:
    """The `Attend` and `AttendWhole` of one step: first the rows that decode, then the prompt chunks.

    `longest`: an upper bound of the lengths that the host knows. `copies`: int32 `[n, 3]`, done with the writes.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        layers: Sequence[LayerSpec],
        arrays: Arrays,
        longest: int,
        segments: Sequence[Segment] = (),
        copies: mx.array | None = None,
    ) -> None:
        self._kv = kv
        self._layers = layers
        self._arrays = arrays
        self._longest = longest
        self._segments = list(zip(segments, arrays.segments, strict=True))
        self._copies = copies

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
        self._kv.write(layer, k, v, self._arrays.slots, self._copies)
        return self._read(layer, q, sinks)

    def attend_whole(self, layer: int, qkv: mx.array, rope: kernels.Rope, sinks: mx.array | None) -> mx.array:
        """For steps without copies."""
        heads, arrays = self._layers[layer].heads, self._arrays
        q = self._kv.rope_and_write(layer, qkv, arrays.slots, arrays.positions, heads=heads, rope=rope)
        return self._read(layer, q, sinks)

    def _read(self, layer: int, q: mx.array, sinks: mx.array | None) -> mx.array:
        kv, spec, tables, lengths = self._kv, self._layers[layer], self._arrays.tables, self._arrays.lengths
        options: dict[str, Any] = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "sinks": sinks}
        decodes, parts = lengths.shape[0], []
        if decodes:
            parts.append(kv.attend(layer, q[:decodes], tables, lengths, max_length=self._longest, **options))
        for segment, table in self._segments:
            chunk = q[segment.row : segment.row + segment.count]
            parts.append(kv.prefill(layer, chunk, table, segment.start, **options))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)
