"""Runs a step's plan on a model and its block pools."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from pagefork import kernels
from pagefork.cache.kv import KVError, PagedKVCache, UnsupportedDtype
from pagefork.runtime.attention import Arrays, StepAttention, arrays_of
from pagefork.runtime.engine import Facts, Ints, StepPlan, StepResult
from pagefork.runtime.errors import InvalidRequest, KernelMismatch, UnsupportedModel
from pagefork.runtime.log import log
from pagefork.runtime.memory import blocks_that_fit
from pagefork.runtime.models import Model, Progress, Source, load
from pagefork.runtime.sampling import choose
from pagefork.runtime.transfer import Arrival, transfer

Blocks = int | Literal["auto"]


class Engine:
    """A model and its block pools. `depth`: how many steps may be on the device.

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
            blocks=kv.num_blocks // len(model.groups.windows),
            groups=model.groups,
        )
        self._model = model
        self._kv = kv
        self._transfer = transfer(depth)
        self._flights: deque[tuple[Arrival | None, list[mx.array]]] = deque()
        self._previous = mx.zeros((1,), dtype=mx.int32)
        self._traces: dict[int, Callable[..., Any]] | None = {} if depth > 1 else None

    def launch(self, plan: StepPlan) -> None:
        self._transfer.begin()
        arrays = arrays_of(plan, self._previous, self._transfer)
        logits = self._decode(arrays) if self._traces is not None and plan.only_decodes else self._run(plan, arrays)
        arrival = None
        if len(plan.rows):
            out = choose(logits, plan.sampling, plan.topk, self._transfer)
            self._previous = out[0]
            arrival = self._transfer.receive(out)
        pending = self._kv.pending()
        mx.async_eval(*(arrival.pending if arrival else ()), *pending)
        self._flights.append((arrival, pending[-self.facts.groups.pools :]))  # what each pool waits for

    def collect(self) -> StepResult:
        arrival, last = self._flights.popleft()
        if arrival is None:
            mx.eval(last)
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.float32))
        return StepResult(*arrival.read())

    def read_kv(self, layer: int, table: Ints, length: int) -> tuple[Any, Any]:
        _, pool = self.facts.groups.places[layer]
        k, v = self._kv.read(pool, mx.array(table), length)
        return np.array(k.astype(mx.float32)), np.array(v.astype(mx.float32))

    def close(self) -> None:
        self._model.restore()
        self._transfer.close()

    def _decode(self, given: Arrays) -> mx.array:
        """Logits of a step of decodes alone, from a trace. The pools are constants of it: they are written in place."""
        assert self._traces is not None
        width = given.tables[0].shape[1]
        if width not in self._traces:
            self._traces[width] = mx.compile(self._traced(width * self._kv.block_size))
        logits: mx.array
        logits, orders = self._traces[width](*given[:5], self._kv.orders(len(given.lengths)))
        self._kv.set_orders(orders)
        return logits

    def _traced(self, longest: int) -> Callable[..., Any]:
        def step(
            tokens: mx.array,
            positions: mx.array,
            lengths: mx.array,
            slots: list[mx.array],
            tables: list[mx.array],
            orders: list[mx.array],
        ) -> tuple[mx.array, list[mx.array]]:
            self._kv.set_orders(orders)
            arrays = Arrays(tokens, positions, lengths, slots, tables)
            how = StepAttention(self._kv, self._model.layers, self.facts.groups, arrays, longest)
            logits = self._model(tokens, positions, how.attend, attend_whole=how.attend_whole)
            return logits, self._kv.orders(lengths.shape[0])

        return step

    def _run(self, plan: StepPlan, arrays: Arrays) -> mx.array:
        """Logits of any step, its graph built anew."""
        copies = None
        if len(plan.copies) and self.facts.depth == 1:
            self._kv.copy_blocks(plan.copies)
        elif len(plan.copies):
            copies = mx.array(plan.copies)
        longest = int(plan.lengths.max(initial=0))
        layers, groups, alone = self._model.layers, self.facts.groups, self.facts.depth == 1
        how = StepAttention(self._kv, layers, groups, arrays, longest, plan.segments, copies, waits=alone)
        rows = arrays.rows if len(plan.rows) else None
        whole = how.attend_whole if copies is None else None
        return self._model(arrays.tokens, arrays.positions, how.attend, rows, whole)


def build(source: Source, blocks: Blocks, block_size: int, progress: Progress | None, strict: bool) -> Engine:
    """Load a model, allocate its pools and compile its kernels; call it in the engine's thread."""
    model = load(source, progress=progress)
    if blocks == "auto":
        blocks = blocks_that_fit(model, block_size)
    groups = len(model.groups.windows)
    try:
        kv = PagedKVCache(blocks * groups, block_size, model.pools, model.dtype)
    except UnsupportedDtype as error:
        raise UnsupportedModel(f"{model.name}: {error}") from error
    except KVError as error:
        raise InvalidRequest(str(error)) from error
    depth = _prepare_kernels(model, block_size, progress, strict)
    log.info(
        "model_loaded",
        model=model.name,
        layers=len(model.layers),
        groups=groups,
        weights_mb=round(model.weight_bytes / 1e6),
        kv_mb=round(kv.nbytes / 1e6),
        device=str(mx.default_device()),
        fused_kernels=depth > 1,
    )
    return Engine(model, kv, depth)


def _prepare_kernels(model: Model, block_size: int, progress: Progress | None, strict: bool) -> int:
    """Compile and self-test every variant that the model needs; returns how many steps may be on the device."""
    cases: list[kernels.Attention | kernels.Rotation | kernels.Linear] = []
    ropes: list[kernels.Rope | None] = []
    for spec, rope in zip(model.layers, model.rotations, strict=True):
        shape = (model.dtype, spec.heads, spec.kv_heads, spec.head_dim, block_size)
        features = (spec.window is not None, spec.sinks, spec.softcap is not None)
        cases.append(kernels.Attention(*shape, *features))
        if rope is not None:
            rotation = kernels.Rotation(*shape, rope.dims, rope.traditional, rope.freqs is not None)
            if kernels.can_rotate(rotation):
                cases.append(rotation)
            else:
                rope = None
        ropes.append(rope)
    model.take_rotations(tuple(ropes))
    cases = [*dict.fromkeys(cases), *model.products]
    if mx.default_device().type == mx.DeviceType.gpu:
        tell = progress or (lambda stage, fraction: None)
        try:
            kernels.prepare(cases, strict=strict, progress=lambda done, total, _: tell("kernels", done / total))
        except kernels.KernelMismatch as error:
            raise KernelMismatch(str(error)) from error
    return 2 if kernels.in_place(cases) else 1
