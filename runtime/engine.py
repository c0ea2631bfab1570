"""The one thread that touches MLX: it runs steps, in the order in which they were put."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import structlog

from pagefork import kernels
from pagefork.cache.kv import PagedKVCache
from pagefork.runtime.messages import Message, StepDone, StepFailed
from pagefork.runtime.models import Model, Progress, Source, load
from pagefork.runtime.sampling import Sampling, best, log_softmax, sample
from pagefork.runtime.tokenizer import Tokenizer

log = structlog.get_logger("pagefork")
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Segment:
    """A prompt chunk within a step: rows `[row, row + count)` stand at positions from `start` on."""

    row: int
    count: int
    start: int
    table: Ints


@dataclass(frozen=True)
class StepPlan:
    """One forward pass over `[T]` flattened tokens: first `[D]` decode rows, then the prompt chunks.

    tokens, positions, slots: int32 `[T]`. feed: int32 `[D]`, the row among the previous step's sampled ids that
    is this row's token, or -1. tables: int32 `[D, max_blocks]`; lengths: int32 `[D]`. copies: int32 `[n, 3]`.
    rows: int32 `[R]`, those that need logits; sampling: one entry for each of them. topk: how many alternatives
    to report for each of the `rows`, 0 for none.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    feed: Ints
    tables: Ints
    lengths: Ints
    segments: tuple[Segment, ...]
    copies: Ints
    rows: Ints
    sampling: Sampling
    topk: int = 0


@dataclass(frozen=True)
class StepResult:
    """ids int32 and logprobs float32 `[R]`; top_ids and top_logprobs `[R, topk]`, best first, or None."""

    ids: Ints
    logprobs: npt.NDArray[np.float32]
    top_ids: Ints | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Facts:
    """What the actors need to know of an engine. depth: steps that may be in flight; kv_bytes: those of all pools."""

    name: str
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    layers: int
    depth: int
    kv_bytes: int


class StepEngine(Protocol):
    """What the thread drives; tests put engines of their own behind it."""

    facts: Facts

    def launch(self, plan: StepPlan) -> None:
        """Queue a step on the device."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step that was not collected."""

    def read_kv(self, layer: int, table: Ints, length: int) -> tuple[Any, Any]:
        """K and V of the first `length` positions of a table, float32 `[length, kv_heads, head_dim]`."""

    def close(self) -> None:
        """Undo what loading changed outside; called last, in the thread."""


class Engine:
    """A model and its block pools. `depth`: how many steps may be in flight, see Worker."""

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
        )
        self._model = model
        self._kv = kv
        self._flights: deque[tuple[mx.array, ...]] = deque()
        self._previous = mx.zeros((1,), dtype=mx.int32)

    def launch(self, plan: StepPlan) -> None:
        tokens = self._tokens(plan)
        rows = mx.array(plan.rows) if len(plan.rows) else None
        logits = self._model(tokens, mx.array(plan.positions), self._attend(plan), rows)
        out: tuple[mx.array, ...] = ()
        if rows is not None:
            logprobs = log_softmax(logits)
            ids = sample(logprobs, plan.sampling)
            self._previous = ids
            out = (ids, mx.take_along_axis(logprobs, ids[:, None], axis=-1)[:, 0])
            if plan.topk:
                out += best(logprobs, plan.topk)
        mx.async_eval(*out, *self._kv.pending())  # type: ignore[no-untyped-call]
        self._flights.append(out)

    def collect(self) -> StepResult:
        out = self._flights.popleft()
        if not out:
            mx.eval(*self._kv.pending())
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.float32))
        return StepResult(*(np.array(array) for array in out))

    def read_kv(self, layer: int, table: Ints, length: int) -> tuple[Any, Any]:
        k, v = self._kv.read(layer, mx.array(table), length)
        return np.array(k.astype(mx.float32)), np.array(v.astype(mx.float32))

    def close(self) -> None:
        self._model.restore()

    def _tokens(self, plan: StepPlan) -> mx.array:
        tokens = mx.array(plan.tokens)
        if not (plan.feed >= 0).any():
            return tokens
        feed = mx.array(np.concatenate([plan.feed, np.full(len(plan.tokens) - len(plan.feed), -1, np.int32)]))
        return mx.where(feed >= 0, self._previous[mx.maximum(feed, 0)], tokens)

    def _attend(self, plan: StepPlan) -> Callable[..., mx.array]:
        kv, decodes = self._kv, len(plan.lengths)
        slots = mx.array(plan.slots)
        copies = mx.array(plan.copies) if len(plan.copies) else None
        tables, lengths = mx.array(plan.tables), mx.array(plan.lengths)
        longest = int(plan.lengths.max()) if decodes else 0
        segments = [(s, mx.array(s.table)) for s in plan.segments]

        def attend(layer: int, q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> mx.array:
            spec = self._model.layers[layer]
            options: dict[str, Any] = {
                "scale": spec.scale,
                "window": spec.window,
                "softcap": spec.softcap,
                "sinks": sinks,
            }
            kv.write(layer, k, v, slots, copies)
            parts = []
            if decodes:
                parts.append(kv.attend(layer, q[:decodes], tables, lengths, max_length=longest, **options))
            for segment, table in segments:
                chunk = q[segment.row : segment.row + segment.count]
                parts.append(kv.prefill(layer, chunk, table, segment.start, **options))
            return parts[0] if len(parts) == 1 else mx.concatenate(parts)

        return attend


@dataclass(frozen=True)
class _Call:
    function: Callable[[StepEngine], Any]
    done: Callable[[Any, BaseException | None], None]


class EngineThread:
    """Runs an engine in a thread of its own. `post` brings messages back; it must be safe to call from there.

    `build` makes the engine inside the thread, since MLX streams belong to the thread that made them.
    """

    def __init__(self, build: Callable[[], StepEngine], post: Callable[[Message], None]) -> None:
        self._build = build
        self._post = post
        self._queue: queue.SimpleQueue[StepPlan | _Call | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pagefork-engine", daemon=True)

    def start(self, ready: Callable[[Any, BaseException | None], None]) -> None:
        """Start the thread; `ready(facts, error)` is called in it once `build` has returned or failed."""
        self._ready = ready
        self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        self._queue.put(plan)

    def collect(self) -> None:
        """Post the StepDone of the oldest launched step as soon as it has retired."""
        self._queue.put("collect")

    def call(self, function: Callable[[StepEngine], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `function(engine)` after what was put before; `done(value, error)` is called in the thread."""
        self._queue.put(_Call(function, done))

    def stop(self) -> None:
        """Ask the thread to end after what was put before."""
        self._queue.put("stop")

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds. Blocks: not for the event loop."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._build_and_serve()
        finally:
            # A stream that outlives its thread can abort the process when Python exits (mlx 0.32).
            mx.synchronize()
            mx.clear_streams()

    def _build_and_serve(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._ready(None, error)
            return
        self._ready(engine.facts, None)
        try:
            self._serve(engine)
        except BaseException as error:
            log.error("engine_failed", error=repr(error))
            self._post(StepFailed(error))
            self._refuse_calls(error)
        finally:
            engine.close()

    def _serve(self, engine: StepEngine) -> None:
        while True:
            command = self._queue.get()
            if command == "stop":
                return
            if command == "collect":
                self._post(StepDone(engine.collect()))
            elif isinstance(command, _Call):
                try:
                    value = command.function(engine)
                except Exception as error:
                    command.done(None, error)
                else:
                    command.done(value, None)
            elif isinstance(command, StepPlan):
                engine.launch(command)

    def _refuse_calls(self, error: BaseException) -> None:
        """After a failure: every call, past or future, gets the error, until the stop."""
        while (command := self._queue.get()) != "stop":
            if isinstance(command, _Call):
                command.done(None, error)


def build(source: Source, blocks: int, block_size: int, progress: Progress | None, strict: bool) -> Engine:
    """Load a model, allocate its pools and compile its kernels; call it in the engine's thread."""
    model = load(source, progress=progress)
    kv = PagedKVCache(blocks, block_size, [(s.kv_heads, s.head_dim) for s in model.layers], model.dtype)
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
    cases = [
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
    cases = list(dict.fromkeys(cases))
    if mx.default_device().type == mx.DeviceType.gpu:
        tell = progress or (lambda stage, fraction: None)
        kernels.prepare(cases, strict=strict, progress=lambda done, total, _: tell("kernels", done / total))
    return 2 if kernels.in_place(cases) else 1
