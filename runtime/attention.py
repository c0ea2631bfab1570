"""How the layers of one step attend: write what is new into the blocks, then read each row's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from pagefork import kernels
from pagefork.cache.kv import PagedKVCache
from pagefork.runtime.engine import Segment, StepPlan
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
    decodes, fed = len(plan.feed), plan.feed >= 0
    given = [plan.positions, plan.slots, plan.tables, plan.lengths]
    given += [] if plan.only_decodes else [plan.rows, *(segment.table for segment in plan.segments)]
    # The ids of the step before serve as they are where the same rows go on, which is most often.
    same = plan.only_decodes and decodes == previous.size and bool((plan.feed == np.arange(decodes)).all())
    index = np.arange(len(plan.tokens), dtype=np.int32)
    index[:decodes] = np.where(fed, len(plan.tokens) + plan.feed, index[:decodes])
    given += [] if same else [plan.tokens, index] if fed.any() else [plan.tokens]
    positions, slots, tables, lengths, *rest = transfer.send(given)
    tokens = previous if same else rest.pop() if not fed.any() else mx.concatenate([rest.pop(-2), previous])[rest.pop()]
    rows, segments = (None, ()) if plan.only_decodes else (rest[0], rest[1:])
    return Arrays(tokens, positions, slots, tables, lengths, rows, segments)


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
