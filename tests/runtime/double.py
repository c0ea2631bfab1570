"""An engine without a model: it remembers which (token, position) each slot holds and checks every step it is given.

Its logits are a pure function of the tokens that a row sees through its table, so a wrong table, slot, position or
copy changes what is generated, and `Double.greedy` says what a sequence must generate.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import anyio
import numpy as np
import numpy.typing as npt

from pagefork.cache.ledger import Ledger
from pagefork.runtime import Runtime, supervisor
from pagefork.runtime.api import opened
from pagefork.runtime.engine import EngineThread, Facts, StepEngine, StepPlan, StepResult
from pagefork.runtime.groups import Groups
from pagefork.runtime.messages import StepFailed

VOCAB = 32
EMPTY = -1


class Double:
    """A StepEngine in numpy. `fail_launch`, `fail_collect`: the number of the step to fail at; `eos`: end tokens.

    `windows`: for each group of layers, of how many tokens a row sees the last alone; the first group that sees most
    says what comes next. `tell`: whether the runtime knows of them. `seconds`: how long a step takes by the clock of an
    InlineThread.
    """

    def __init__(
        self,
        *,
        depth: int = 1,
        eos: Iterable[int] = (),
        max_context: int = 1 << 20,
        windows: Sequence[int | None] = (None,),
        tell: bool = True,
        seconds: float = 0.0003,
        fail_launch: int | None = None,
        fail_collect: int | None = None,
    ) -> None:
        self.facts = Facts(
            name="double",
            vocab_size=VOCAB,
            max_context=max_context,
            eos_ids=frozenset(eos),
            tokenizer=None,
            layers=len(windows),
            depth=depth,
            kv_bytes=0,
            groups=Groups(
                tuple(windows) if tell else (None,) * len(windows), tuple((group, 0) for group in range(len(windows)))
            ),
        )
        self.windows = tuple(windows)
        self.seconds, self.now = seconds, 0.0
        self.ledger: Ledger | None = None
        self.plans: list[StepPlan] = []
        self.closed = False
        self.fail_launch, self.fail_collect = fail_launch, fail_collect
        self._collected = 0
        self._gate = threading.Condition()
        self._open, self._held = True, False
        self._flights: deque[tuple[StepPlan, StepResult]] = deque()
        self._previous = np.zeros(1, np.int32)

    def bind(self, ledger: Ledger) -> None:
        """Start with an empty memory, and check who may write against the `ledger`."""
        self.ledger = ledger
        self._size = ledger.pool.block_size
        self._token = np.full(ledger.pool.num_blocks * self._size, EMPTY)
        self._position = np.full_like(self._token, EMPTY)
        self._group = np.full_like(self._token, EMPTY)

    # What a test does

    def hold(self) -> None:
        """Let no step retire until `release`."""
        with self._gate:
            self._open = False

    def release(self) -> None:
        with self._gate:
            self._open = True
            self._gate.notify_all()

    async def held(self) -> None:
        """Return once a step is being held."""
        while not self._held:
            await anyio.lowlevel.checkpoint()

    def pass_gate(self, timeout: float) -> None:
        """In the engine's thread: go on once nothing is held."""
        with self._gate:
            self._held = not self._open
            assert self._gate.wait_for(lambda: self._open, timeout), "a step was held and not released"
            self._held = False

    @staticmethod
    def logprobs(tokens: Iterable[int]) -> npt.NDArray[np.float64]:
        """The distribution after `tokens`, `[VOCAB]`."""
        seed = zlib.crc32(np.array(list(tokens), np.int32).tobytes())
        logits = np.random.default_rng(seed).normal(size=VOCAB)
        out: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
        return out

    @classmethod
    def greedy(cls, tokens: Iterable[int], count: int, window: int | None = None) -> list[int]:
        """The next `count` tokens at temperature 0."""
        given = list(tokens)
        out = given[:]
        for _ in range(count):
            out.append(int(cls.logprobs(out if window is None else out[-window:]).argmax()))
        return out[len(given) :]

    # StepEngine

    def launch(self, plan: StepPlan) -> None:
        if self.fail_launch == len(self.plans):
            raise RuntimeError("step failed to launch")
        self.plans.append(plan)
        self._check_blocks(plan)
        assert self.ledger is not None
        unheld = np.repeat(self.ledger.pool.refcounts == 0, self._size)
        self._token[unheld] = self._position[unheld] = self._group[unheld] = EMPTY
        for source, target, rows in plan.copies.tolist():
            old, new = source * self._size, target * self._size
            for memory in (self._token, self._position, self._group):
                memory[new : new + self._size] = EMPTY
                memory[new : new + rows] = memory[old : old + rows]
        tokens = plan.tokens.copy()
        fed = np.flatnonzero(plan.feed >= 0)
        tokens[fed] = self._previous[plan.feed[fed]]
        for group, slots in enumerate(plan.slots):
            self._token[slots], self._position[slots], self._group[slots] = tokens, plan.positions, group
        views = [self._visible(plan.tables[:, row], length) for row, length in enumerate(plan.lengths.tolist())]
        for part in plan.segments:
            views += [self._visible(part.tables, part.start + n + 1) for n in range(part.count)]
        rows = [self.logprobs(views[row]) for row in plan.rows.tolist()]
        self._flights.append((plan, self._choose(rows, plan)))

    def collect(self) -> StepResult:
        self.pass_gate(60)
        plan, result = self._flights.popleft()
        self._check_blocks(plan)
        if self.fail_collect == self._collected:
            raise RuntimeError("step failed")
        self._collected += 1
        self.now += self.seconds
        return result

    def read_kv(self, layer: int, table: npt.NDArray[np.int32], length: int) -> tuple[Any, Any]:
        slots = self._slots(table, length)
        k, v = self._token[slots], self._position[slots]
        return k.reshape(-1, 1, 1).astype(np.float32), v.reshape(-1, 1, 1).astype(np.float32)

    def close(self) -> None:
        self.closed = True

    # Checks

    def _check_blocks(self, plan: StepPlan) -> None:
        """P3, P4: written blocks have one holder, and everything that the step names is held until it retires."""
        assert self.ledger is not None
        refcounts = self.ledger.pool.refcounts
        assert plan.slots.shape == (len(self.windows), len(plan.tokens))
        assert len(set(plan.slots.ravel().tolist())) == plan.slots.size, "two rows write one slot"
        written = np.unique(plan.slots // self._size)
        assert (refcounts[written] == 1).all(), f"shared or free blocks written: {written[refcounts[written] != 1]}"
        assert (refcounts[plan.copies[:, :2].ravel()] >= 1).all(), "a copy's blocks are not held"
        assert not set(plan.copies[:, 0].tolist()) & set(written.tolist()), "a copy's source is written"
        rows = [(plan.tables[:, row], length, length) for row, length in enumerate(plan.lengths.tolist())]
        rows += [(part.tables, part.start + 1, part.start + part.count) for part in plan.segments]
        for tables, first, last in rows:
            for table, window in zip(tables, self.windows, strict=True):
                visible = table[self._low(first, window) // self._size : -(-last // self._size)]
                assert (refcounts[visible] >= 1).all(), "a visible block is not held"

    def _low(self, length: int, window: int | None) -> int:
        """The first position that the last of `length` sees."""
        return 0 if window is None else max(0, length - window)

    def _slots(self, table: npt.NDArray[np.int32], length: int, low: int = 0) -> npt.NDArray[np.int64]:
        places = np.arange(low, length)
        return np.asarray(table, np.int64)[places // self._size] * self._size + places % self._size

    def _visible(self, tables: npt.NDArray[np.int32], length: int) -> list[int]:
        """P5: what a row sees is its own past, position by position, and in every group the same."""
        views: list[list[int]] = []
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            low = self._low(length, window)
            slots = self._slots(table, length, low)
            assert (self._position[slots] == np.arange(low, length)).all(), "a row sees what is not its past"
            assert (self._group[slots] == group).all(), "a row sees what other layers have written"
            views.append(self._token[slots].tolist())
        widest = max(views, key=len)
        assert all(view == widest[len(widest) - len(view) :] for view in views), "groups see different tokens"
        return widest

    def _choose(self, rows: list[npt.NDArray[np.float64]], plan: StepPlan) -> StepResult:
        if not rows:
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.float32))
        logprobs = np.stack(rows)
        scores = logprobs.copy()
        for row, (temperature, key) in enumerate(zip(plan.sampling.temperature, plan.sampling.keys, strict=True)):
            if temperature > 0:
                scores[row] = scores[row] / temperature + np.random.default_rng(key.tolist()).gumbel(size=VOCAB)
        ids = scores.argmax(axis=1).astype(np.int32)
        self._previous = ids
        chosen = np.take_along_axis(logprobs, ids[:, None].astype(np.int64), axis=1)[:, 0].astype(np.float32)
        if not plan.topk:
            return StepResult(ids, chosen)
        top = np.argsort(-logprobs, axis=1)[:, : plan.topk]
        return StepResult(ids, chosen, top.astype(np.int32), np.take_along_axis(logprobs, top, axis=1))


class InlineThread(EngineThread):
    """An EngineThread that runs each step at once in the event loop, so that a schedule can be repeated exactly."""

    def start(self, ready: Callable[[Any, BaseException | None], None]) -> None:
        self._engine: Any = self._build()
        self._failed = False
        ready(self._engine.facts, None)

    def clock(self) -> float:
        return self._engine.now  # type: ignore[no-any-return]

    def step(self, plans: list[StepPlan], collect: int) -> None:
        if self._failed:
            return
        try:
            self._run_steps(self._engine, plans, collect)
        except Exception as error:
            self._failed = True
            self._post(StepFailed(error))

    def call(self, function: Callable[[StepEngine], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        done(function(self._engine), None)

    def stop(self) -> None:
        self._engine.close()

    def join(self, timeout: float) -> bool:
        return True


@asynccontextmanager
async def runtime(
    double: Double | None = None,
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_batch: int = 64,
    chunk: int = 8,
    lease: int = 8,
    shutdown_timeout: float = 10.0,
    inline: bool = False,
    patience: float = 0.0,
    prefix_cache: bool = False,
    max_queue: int | None = None,
    max_sequences: int | None = None,
) -> AsyncIterator[Runtime]:
    """A runtime over a double; on leaving, its ledger is whole and every block free, however the body ended."""
    double = Double() if double is None else double
    options = supervisor.Options(
        build=lambda: double,
        blocks=blocks,
        block_size=block_size,
        max_batch=max_batch,
        prefill_step_size=chunk,
        lease=lease,
        shutdown_timeout=shutdown_timeout,
        patience=patience,
        prefix_cache=prefix_cache,
        max_queue=max_queue,
        max_sequences=max_sequences,
    )
    thread = InlineThread if inline else supervisor.EngineThread
    try:
        with mock.patch.object(supervisor, "EngineThread", thread):
            manager = opened(options)
            rt = await manager.__aenter__()
        double.bind(ledger(rt))
        error: BaseException | None = None
        try:
            yield rt
        except BaseException as raised:
            error = raised
        double.release()
        suppressed = await manager.__aexit__(type(error) if error else None, error, None)
        ledger(rt).check()
        assert ledger(rt).available == blocks * len(double.windows), "blocks are missing after shutdown"
        if error is not None and not suppressed:
            raise error
    finally:
        double.release()


def ledger(rt: Runtime) -> Ledger:
    return rt._house.allocator.ledger


async def settled(rt: Runtime, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that the runtime brings about by itself."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def free(rt: Runtime, blocks: int) -> None:
    """Wait until so many blocks are free or kept for reuse alone, and check the ledger."""
    await settled(rt, lambda: ledger(rt).available == blocks)
    ledger(rt).check()


async def take(generation: Any, count: int) -> list[int]:
    """The next `count` tokens of a generation."""
    return [(await anext(generation)).token for _ in range(count)]
