"""How the layers of one step attend: write what is new into the blocks, then read each row's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from pagefork import kernels
from pagefork.cache.kv import PagedKVCache
from pagefork.runtime.engine import Ints, Segment, StepPlan
from pagefork.runtime.groups import Groups
from pagefork.runtime.layers import LayerSpec
from pagefork.runtime.transfer import Transfer


class Arrays(NamedTuple):
    """A plan on the device, see StepPlan; its tokens are those that the step before sampled where it says so.

    slots, tables: one for each group of layers.
    """

    tokens: mx.array
    positions: mx.array
    lengths: mx.array
    slots: Sequence[mx.array]
    tables: Sequence[mx.array]
    rows: mx.array | None = None
    """None where all are wanted."""
    segments: Sequence[Sequence[mx.array]] = ()
    """The tables of the prompt chunks, one for each group."""


def arrays_of(plan: StepPlan, previous: mx.array, transfer: Transfer) -> Arrays:
    """The plan's arrays; `previous`: the ids that the step before sampled, int32 `[R]`."""
    given = [plan.positions, plan.lengths, *plan.slots, *plan.tables]
    if not plan.only_decodes:
        given += [plan.rows, *(table for segment in plan.segments for table in segment.tables)]
    fed = _fed(plan, previous)
    sent, groups = iter(transfer.send([*fed, *given])), len(plan.slots)
    tokens = list(islice(sent, len(fed)))
    positions, lengths = islice(sent, 2)
    slots, tables = list(islice(sent, groups)), list(islice(sent, groups))
    rows = None if plan.only_decodes else next(sent)
    if len(tokens) == 2:
        tokens = [mx.concatenate([tokens[0], previous])[tokens[1]]]
    segments = [list(islice(sent, groups)) for _ in plan.segments]
    return Arrays(tokens[0] if tokens else previous, positions, lengths, slots, tables, rows, segments)


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

    `longest`: an upper bound of the lengths that the host knows. `copies`: int32 `[n, 3]`, done with the first write to
    each pool. `waits`: whether a pool is written in place only while nothing unevaluated names it, so that the layers
    which share one compute after each other.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        layers: Sequence[LayerSpec],
        groups: Groups,
        arrays: Arrays,
        longest: int,
        segments: Sequence[Segment] = (),
        copies: mx.array | None = None,
        waits: bool = False,
    ) -> None:
        self._kv = kv
        self._layers = layers
        self._places = groups.places
        self._waits = waits and len(groups.windows) > 1
        self._arrays = arrays
        self._longest = longest
        self._segments = list(zip(segments, arrays.segments, strict=True))
        self._copies = copies
        self._copied: set[int] = set()

    def attend(self, layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
        group, pool = self._places[layer]
        copies = None if pool in self._copied else self._copies
        self._copied.add(pool)
        self._kv.write(pool, k, v, self._arrays.slots[group], copies)
        return self._read(layer, q, sinks)

    def attend_whole(self, layer: int, qkv: mx.array, rope: kernels.Rope, sinks: mx.array | None) -> mx.array:
        """For steps without copies."""
        heads, arrays, (group, pool) = self._layers[layer].heads, self._arrays, self._places[layer]
        q = self._kv.rope_and_write(pool, qkv, arrays.slots[group], arrays.positions, heads=heads, rope=rope)
        return self._read(layer, q, sinks)

    def _read(self, layer: int, q: mx.array, sinks: mx.array | None) -> mx.array:
        kv, spec, lengths = self._kv, self._layers[layer], self._arrays.lengths
        group, pool = self._places[layer]
        options: dict[str, Any] = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "sinks": sinks}
        decodes, parts = lengths.shape[0], []
        if decodes:
            parts.append(
                kv.attend(pool, q[:decodes], self._arrays.tables[group], lengths, max_length=self._longest, **options)
            )
        for segment, tables in self._segments:
            chunk = q[segment.row : segment.row + segment.count]
            parts.append(kv.prefill(pool, chunk, tables[group], segment.start, **options))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        if self._waits:
            mx.eval(out)
        return out
