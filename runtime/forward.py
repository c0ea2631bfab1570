"""Runs a step's plan on a model and its block pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from pagefork import kernels
from pagefork.cache.kv import KVError, PagedKVCache, UnsupportedDtype
from pagefork.runtime.engine import Facts, Ints, StepPlan, StepResult
from pagefork.runtime.errors import InvalidRequest, KernelMismatch, UnsupportedModel
from pagefork.runtime.layers import widest_window
from pagefork.runtime.log import log
from pagefork.runtime.memory import blocks_that_fit
from pagefork.runtime.models import Model, Progress, Source, load
from pagefork.runtime.sampling import choose

Blocks = int | Literal["auto"]


class Engine:
    """A model and its block pools. `depth`: how many steps may be in flight, see Worker.

    With more than one, a decode step's graph is traced by `mx.compile` once for each shape that comes again: building
    it anew costs Python more time than small models take to compute it.
    """

    def __init__(self, model: Model, kv: PagedKVCache, depth: int) -> None:
        self.facts = Facts(
            name=model.name,
            vocab_size=model.vocab_size,
            max_context=model.max_context or 1 << 30,
            eos_ids=model.eos_ids,
            tokenizer=model.tokenizer,
            layers=len(model.layers),
            depth=depth,
            kv_bytes=kv.nbytes,
            blocks=kv.num_blocks,
            window=widest_window(model.layers),
        )
        self._model = model
        self._kv = kv
        self._flights: deque[tuple[tuple[mx.array, ...], list[mx.array]]] = deque()
        self._previous = mx.zeros((1,), dtype=mx.int32)
        self._traces: dict[int, Callable[..., Any]] | None = {} if depth > 1 else None

    def launch(self, plan: StepPlan) -> None:
        arrays = Arrays(plan, self._previous)
        if self._traces is not None and plan.only_decodes:
            logits = self._decode(arrays)
        else:
            rows = arrays.rows if len(plan.rows) else None
            logits = self._model(arrays.tokens, arrays.positions, self._attend(plan, arrays), rows)
        out: tuple[mx.array, ...] = ()
        if len(plan.rows):
            out = choose(logits, plan.sampling, plan.topk)
            self._previous = out[0]
        pending = self._kv.pending()
        mx.async_eval(*out, *pending)
        self._flights.append((out, pending[-1:]))

    def collect(self) -> StepResult:
        out, last = self._flights.popleft()
        if not out:
            mx.eval(last)
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.float32))
        return StepResult(*(np.array(array) for array in out))

    def read_kv(self, layer: int, table: Ints, length: int) -> tuple[Any, Any]:
        k, v = self._kv.read(layer, mx.array(table), length)
        return np.array(k.astype(mx.float32)), np.array(v.astype(mx.float32))

    def close(self) -> None:
        self._model.restore()

    def _decode(self, given: Arrays) -> mx.array:
        """Logits of a step of decodes alone, from a trace. The pools are constants of it: they are written in place."""
        assert self._traces is not None
        width = given.tables.shape[1]
        if width not in self._traces:
            self._traces[width] = mx.compile(self._traced(width * self._kv.block_size))
        arrays = (given.tokens, given.positions, given.slots, given.tables, given.lengths)
        logits: mx.array
        logits, orders = self._traces[width](*arrays, self._kv.orders())
        self._kv.set_orders(orders)
        return logits

    def _traced(self, longest: int) -> Callable[..., Any]:
        def step(
            tokens: mx.array,
            positions: mx.array,
            slots: mx.array,
            tables: mx.array,
            lengths: mx.array,
            orders: list[mx.array],
        ) -> tuple[mx.array, list[mx.array]]:
            self._kv.set_orders(orders)

            def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
                self._kv.write(layer, k, v, slots)
                return self._kv.attend(layer, q, tables, lengths, max_length=longest, **self._options(layer, sinks))

            def attend_whole(layer: int, qkv: mx.array, rope: kernels.Rope, sinks: mx.array | None) -> mx.array:
                heads = self._model.layers[layer].heads
                q = self._kv.rope_and_write(layer, qkv, slots, positions, heads=heads, rope=rope)
                return self._kv.attend(layer, q, tables, lengths, max_length=longest, **self._options(layer, sinks))

            return self._model(tokens, positions, attend, attend_whole=attend_whole), self._kv.orders()

        return step

    def _options(self, layer: int, sinks: mx.array | None) -> dict[str, Any]:
        spec = self._model.layers[layer]
        return {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap, "sinks": sinks}

    def _attend(self, plan: StepPlan, arrays: Arrays) -> Callable[..., mx.array]:
        kv, decodes = self._kv, len(plan.lengths)
        slots, tables, lengths = arrays.slots, arrays.tables, arrays.lengths
        copies = arrays.copies if len(plan.copies) else None
        if copies is not None and self.facts.depth == 1:
            kv.copy_blocks(copies)
            copies = None
        longest = int(plan.lengths.max()) if decodes else 0
        segments = list(zip(plan.segments, arrays.segments, strict=True))

        def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
            options = self._options(layer, sinks)
            kv.write(layer, k, v, slots, copies)
            parts = []
            if decodes:
                parts.append(kv.attend(layer, q[:decodes], tables, lengths, max_length=longest, **options))
            for segment, table in segments:
                chunk = q[segment.row : segment.row + segment.count]
                parts.append(kv.prefill(layer, chunk, table, segment.start, **options))
            return parts[0] if len(parts) == 1 else mx.concatenate(parts)

        return attend


class Arrays:
    """A plan's arrays on the device, by one copy: what a kernel reads from the host's memory, it reads slowly."""

    def __init__(self, plan: StepPlan, previous: mx.array) -> None:
        """`previous`: the ids that the step before sampled."""
        given = (plan.tokens, plan.positions, plan.slots, plan.tables, plan.lengths, plan.copies, plan.rows, plan.feed)
        self.tokens, self.positions, self.slots, self.tables, self.lengths, self.copies, self.rows, feed, *tables = (
            _on_device([*given, *(segment.table for segment in plan.segments)])
        )
        self.segments = tables
        if (plan.feed >= 0).any():
            decodes = len(plan.feed)
            fed = mx.where(feed >= 0, previous[mx.maximum(feed, 0)], self.tokens[:decodes])
            self.tokens = mx.concatenate([fed, self.tokens[decodes:]]) if decodes < len(plan.tokens) else fed


def _on_device(arrays: list[Ints]) -> list[mx.array]:
    stops = list(accumulate(array.size for array in arrays))
    whole = mx.array(np.concatenate([array.ravel() for array in arrays]))
    if mx.cuda.is_available():
        whole = whole + 0  # by the device, so into its memory
    parts = (whole[stop - array.size : stop] for array, stop in zip(arrays, stops, strict=True))
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def build(source: Source, blocks: Blocks, block_size: int, progress: Progress | None, strict: bool) -> Engine:
    """Load a model, allocate its pools and compile its kernels; call it in the engine's thread."""
    model = load(source, progress=progress)
    if blocks == "auto":
        blocks = blocks_that_fit(model, block_size)
    try:
        kv = PagedKVCache(blocks, block_size, [(s.kv_heads, s.head_dim) for s in model.layers], model.dtype)
    except UnsupportedDtype as error:
        raise UnsupportedModel(f"{model.name}: {error}") from error
    except KVError as error:
        raise InvalidRequest(str(error)) from error
    depth = _prepare_kernels(model, block_size, progress, strict)
    log.info(
        "model_loaded",
        model=model.name,
        layers=len(model.layers),
        weights_mb=round(model.weight_bytes / 1e6),
        kv_mb=round(kv.nbytes / 1e6),
        device=str(mx.default_device()),
        fused_kernels=depth > 1,
    )
    return Engine(model, kv, depth)


def _prepare_kernels(model: Model, block_size: int, progress: Progress | None, strict: bool) -> int:
    """Compile and self-test every variant that the model needs; returns how many steps may be in flight."""
    cases: list[kernels.Attention | kernels.Rotation] = [
        kernels.Attention(
            dtype=model.dtype,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            window=spec.window is not None,
            sinks=spec.sinks,
            softcap=spec.softcap is not None,
        )
        for spec in model.layers
    ]
    cases += [
        kernels.Rotation(
            dtype=model.dtype,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            dims=rope.dims,
            traditional=rope.traditional,
            freqs=rope.freqs is not None,
        )
        for spec, rope in zip(model.layers, model.rotations, strict=True)
        if rope is not None
    ]
    cases = list(dict.fromkeys(cases))
    if mx.default_device().type == mx.DeviceType.gpu:
        tell = progress or (lambda stage, fraction: None)
        try:
            kernels.prepare(cases, strict=strict, progress=lambda done, total, _: tell("kernels", done / total))
        except kernels.KernelMismatch as error:
            raise KernelMismatch(str(error)) from error
    return 2 if kernels.in_place(cases) else 1
