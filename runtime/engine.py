"""The one thread that touches MLX: it runs steps, in the order in which they were put."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pagefork.runtime.errors import WorkerDied
from pagefork.runtime.groups import Groups
from pagefork.runtime.log import log
from pagefork.runtime.messages import Message, StepDone, StepFailed
from pagefork.runtime.sampling import Sampling
from pagefork.runtime.tokenizer import Tokenizer

Ints = npt.NDArray[np.int32]

HELD_BACK = 0.001
"""Seconds, looked at whenever a step ends, that its tokens may wait for those of the next: a thread is woken once for
both."""


@dataclass(frozen=True)
class Segment:
    """A prompt chunk within a step: rows `[row, row + count)` stand at positions from `start` on.

    tables: int32 `[groups, max_blocks]`.
    """

    row: int
    count: int
    start: int
    tables: Ints


class StepPlan(Struct, frozen=True):
    """One forward pass over `[T]` flattened tokens: first `[D]` decode rows, then the prompt chunks.

    Its arrays may be another plan's too: only read them. Groups of layers have slots and tables of their own, see
    Groups.

    tokens, positions: int32 `[T]`. slots: int32 `[groups, T]`. feed: int32 `[D]`, the row among the previous step's
    sampled ids that is this row's token, or -1; empty where no step is in flight. tables: int32
    `[groups, D, max_blocks]`; lengths: int32 `[D]`. copies: int32 `[n, 3]`, of blocks of any group. rows: int32 `[R]`,
    those that need logits; sampling: one entry for each of them. topk: how many alternatives to report for each of the
    `rows`, 0 for none.
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

    @property
    def only_decodes(self) -> bool:
        """No prompt chunks, no copies, and every row wants logits."""
        return len(self.tokens) == len(self.lengths) == len(self.rows) and not len(self.copies)


class StepResult(Struct, frozen=True):
    """ids int32 and logprobs float32 `[R]`; top_ids and top_logprobs `[R, topk]`, best first, or None."""

    ids: Ints
    logprobs: npt.NDArray[np.float32]
    top_ids: Ints | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Facts:
    """What the actors need to know of an engine.

    depth: steps that may be on the device. kv_bytes: those of all pools. blocks: how many it made where that was its to
    decide: as many for each group of layers.
    """

    name: str
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    layers: int
    depth: int
    kv_bytes: int
    blocks: int | None = None
    groups: Groups = field(default_factory=Groups)


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


@dataclass(frozen=True)
class _Call:
    function: Callable[[StepEngine], Any]
    done: Callable[[Any, BaseException | None], None]


class EngineThread:
    """Runs an engine in a thread of its own. `post` brings messages back; it must be safe to call from there.

    Steps go in and come out several at a time where they are short, since a thread that sleeps is dear to wake: often
    dearer than what it is woken for.

    `build` makes the engine inside the thread, since MLX streams belong to the thread that made them.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, build: Callable[[], StepEngine], post: Callable[[Message], None]) -> None:
        self._build = build
        self._post = post
        self._queue: queue.SimpleQueue[tuple[list[StepPlan], int] | _Call | None] = queue.SimpleQueue()
        self._on_device = 0
        self._landed = 0.0
        self._thread = threading.Thread(target=self._run, name="pagefork-engine", daemon=True)

    def start(self, ready: Callable[[Any, BaseException | None], None]) -> None:
        """Start the thread; `ready(facts, error)` is called in it once `build` has returned or failed."""
        self._ready = ready
        self._thread.start()

    def step(self, plans: list[StepPlan], collect: int) -> None:
        """Run the plans, and post what the `collect` oldest steps give: in one StepDone, or in several where they take
        longer than HELD_BACK."""
        self._queue.put((plans, collect))

    def call(self, function: Callable[[StepEngine], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `function(engine)` after what was put before; `done(value, error)` is called in the thread."""
        self._queue.put(_Call(function, done))

    def stop(self) -> None:
        """Ask the thread to end after what was put before."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within `timeout` seconds. Blocks: not for the event loop.

        Before Python 3.13 the system's thread goes on after Python's: MLX takes down what it kept for it, and on CUDA
        that may break what another thread has MLX do just then. On Linux it is waited for.
        """
        if self._thread.ident is None:
            return True
        end = time.monotonic() + timeout
        self._thread.join(timeout)
        left = Path(f"/proc/self/task/{self._thread.native_id}")
        while not self._thread.is_alive() and left.exists() and time.monotonic() < end:
            time.sleep(0.001)
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
        while (command := self._queue.get()) is not None:
            if isinstance(command, _Call):
                try:
                    value = command.function(engine)
                except Exception as error:
                    command.done(None, error)
                else:
                    command.done(value, None)
                continue
            self._run_steps(engine, *command)

    def _run_steps(self, engine: StepEngine, plans: list[StepPlan], collect: int) -> None:
        waiting, results, begin = deque(plans), list[StepResult](), self.clock()
        # What is on the device may have been done for long: no step takes longer than from the last one's end.
        since = self._landed if self._on_device else begin

        def post() -> None:
            nonlocal results, begin, since
            self._post(StepDone(results, (self._landed - since) / len(results)))
            results, begin, since = [], self._landed, self._landed

        try:
            while waiting or collect:
                while waiting and (self._on_device < engine.facts.depth or not collect):
                    engine.launch(waiting.popleft())
                    self._on_device += 1
                if collect:
                    results.append(engine.collect())
                    self._on_device -= 1
                    collect -= 1
                    self._landed = self.clock()
                if collect and self._landed - begin >= HELD_BACK:
                    post()
        finally:
            if results:  # also where a later step fails
                post()

    def _refuse_calls(self, error: BaseException) -> None:
        """After a failure every call fails, until the stop."""
        died = WorkerDied(f"the engine failed: {error!r}; leave this runtime and open another")
        while (command := self._queue.get()) is not None:
            if isinstance(command, _Call):
                command.done(None, died)
