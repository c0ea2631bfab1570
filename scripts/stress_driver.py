"""One task of the stress test: it owns a few sequences, does one operation after another and checks what comes of each.

Beside every sequence stands a shadow: the plain list of tokens that it ought to hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.lowlevel
import numpy as np
import toy_model
from schedule import Digest, Op, operations

from pagefork.runtime import (
    ContextOverflow,
    Generation,
    PageforkError,
    PoolExhausted,
    Runtime,
    SamplingParams,
    Sequence,
    SequenceClosed,
)

FAMILY = 2
LONGEST = 64
ALL_EVERY = 8
"""After this many operations a task checks all of its sequences in all layers; else those it touched, in one layer."""


@dataclass
class Report:
    """What all tasks together have seen."""

    seed: int
    ops: int = 0
    sequences: int = 0
    forks: int = 0
    cancels: int = 0
    exhausted: int = 0
    kv_rows: int = 0
    content_errors: int = 0
    failures: list[str] = field(default_factory=list)

    def wrong(self, where: str, what: str) -> None:
        """A sequence is not what it should be."""
        self.content_errors += 1
        self.failures.append(f"seed {self.seed}, {where}: {what}")


@dataclass(eq=False)
class Held:
    """A sequence and its shadow."""

    seq: Sequence
    shadow: list[int]


class Driver:
    def __init__(self, rt: Runtime, report: Report, task: int, stop: Callable[[int], bool]) -> None:
        self.digest = Digest()
        self.held: list[Held] = []
        self.now: str = f"task {task}, not begun"
        self._rt = rt
        self._report = report
        self._task = task
        self._stop = stop
        self._touched: list[Held] = []

    async def run(self) -> None:
        """Operations until `stop(number)` says so. Then every sequence is checked and closed."""
        for number, op in enumerate(operations(self._report.seed, self._task, toy_model.VOCAB)):
            if self._stop(number):
                break
            self.digest.add(op)
            self.now = f"task {self._task}, operation {number}, {op.kind}"
            if op.cancel_after is not None:
                self.now += f" cancelled after {op.cancel_after} passes"
            await self._perform(op)
            self._report.ops += 1
            if number % ALL_EVERY == ALL_EVERY - 1:
                await self._check_kv(list(self.held), range(toy_model.LAYERS))
            else:
                await self._check_kv(self._touched, [number % toy_model.LAYERS])
        self.now = f"task {self._task}, end"
        await self._check_kv(self.held, range(toy_model.LAYERS))
        for held in self.held:
            await held.seq.close()

    async def _perform(self, op: Op) -> None:
        """Do it, cancelled where it says so; a full pool is an answer like others, and makes the task give back."""
        held = self._target(op)
        act = getattr(self, f"_{_possible(op.kind, held)}")
        self._touched = [held] if held is not None and held in self.held else []
        full: list[PoolExhausted | ContextOverflow] = []

        async def attempt() -> None:
            try:
                await act(op, held)
            except (PoolExhausted, ContextOverflow) as error:
                full.append(error)

        if op.cancel_after is None:
            await attempt()
        else:
            self._report.cancels += await cancelled(attempt, op.cancel_after)
        self._check_tokens()
        if full:
            self._report.exhausted += isinstance(full[0], PoolExhausted)
            await self._give_back(op)
        while len(self.held) > FAMILY:
            await self._drop(self.held[0])

    def _target(self, op: Op) -> Held | None:
        """The sequence that an operation is for; None where it opens one."""
        if not self.held or op.kind == "open":
            return None
        return self.held[int(op.pick * len(self.held))]

    async def _give_back(self, op: Op) -> None:
        """What somebody does who finds the pool full: drop a sequence, or shorten it."""
        if not self.held:
            return
        held = self.held[int(op.fraction * len(self.held))]
        if op.seed % 2:
            await self._drop(held)
        else:
            await self._shorten(held, len(held.shadow) // 2)

    async def _drop(self, held: Held) -> None:
        self.held.remove(held)
        if held in self._touched:
            self._touched.remove(held)
        await held.seq.close()

    async def _shorten(self, held: Held, length: int) -> None:
        with self._either(held, held.shadow[:length]):
            await held.seq.truncate(length)

    def _add(self, seq: Sequence, shadow: Iterable[int]) -> None:
        held = Held(seq, list(shadow))
        self.held.append(held)
        self._touched.append(held)
        self._report.sequences += 1

    # Operations. What they leave in `held` and in shadows must be right however they end.

    async def _open(self, op: Op, _: Held | None) -> None:
        self._add(await self._rt.sequence(op.tokens), op.tokens)

    async def _append(self, op: Op, held: Held) -> None:
        with self._either(held, [*held.shadow, *op.tokens]):
            await held.seq.append(op.tokens)

    async def _truncate(self, op: Op, held: Held) -> None:
        length = int(op.fraction * (len(held.shadow) + 1))
        with self._either(held, held.shadow[:length]):
            await held.seq.truncate(length)

    async def _close(self, op: Op, held: Held) -> None:
        self._forget(held)
        await held.seq.close()

    async def _topk(self, op: Op, held: Held) -> None:
        top = await held.seq.topk(op.count)
        logprobs = toy_model.logprobs(held.shadow)
        if [token for token, _ in top] != toy_model.best(held.shadow, op.count):
            self._wrong(held, f"topk gave {top}, not {toy_model.best(held.shadow, op.count)}")
        elif any(abs(logprob - logprobs[token]) > toy_model.TOLERANCE for token, logprob in top):
            self._wrong(held, f"topk gave {top}, not the log-probabilities {[logprobs[token] for token, _ in top]}")

    async def _fork(self, op: Op, held: Held) -> None:
        count = 1 + op.count % 3
        kids = await held.seq.fork(count)
        self._report.forks += count
        for kid in kids:
            self._add(kid, held.shadow)

    async def _generate(self, op: Op, held: Held) -> None:
        """Greedy; half of the readers leave early."""
        params = SamplingParams(seed=op.seed, max_tokens=op.count, stop_tokens=op.tokens[:1])
        await self._read(held, held.seq.generate(params), params, _length(op))

    async def _sample(self, op: Op, held: Held) -> None:
        params = SamplingParams(seed=op.seed, max_tokens=op.count, temperature=1.0)
        await self._read(held, held.seq.generate(params), params, _length(op))

    async def _fork_running(self, op: Op, held: Held) -> None:
        """Fork in the middle of a generation, which goes on."""
        params = SamplingParams(seed=op.seed, max_tokens=op.count)
        generation = held.seq.generate(params)
        read = await self._read(held, generation, params, int(op.fraction * op.count))
        await self._fork(op, held)
        await self._read(held, generation, params, op.count, read)

    async def _close_running(self, op: Op, held: Held) -> None:
        """Close under a reader: it finds SequenceClosed, or had finished."""
        params = SamplingParams(seed=op.seed, max_tokens=op.count)

        async def read() -> None:
            with suppress(PoolExhausted, SequenceClosed):
                await self._read(held, held.seq.generate(params), params, op.count)

        self._forget(held)
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            try:
                await passes(int(op.fraction * 40))
            finally:
                await held.seq.close()

    async def _race(self, op: Op, held: Held) -> None:
        """Two appends and a fork at once: they take effect one after another, in some order."""
        halves = op.tokens[: len(op.tokens) // 2], op.tokens[len(op.tokens) // 2 :]
        before = list(held.shadow)
        states = [
            before + list(itertools.chain(*order)) for n in range(3) for order in itertools.permutations(halves, n)
        ]
        full: list[PoolExhausted] = []

        async def attempt(act: Callable[[], Awaitable[None]]) -> None:
            try:
                await act()
            except PoolExhausted as error:
                full.append(error)

        async def fork() -> None:
            for kid in await held.seq.fork():
                self._report.forks += 1
                self._add(kid, self._among(kid, states))

        try:
            async with anyio.create_task_group() as group:
                for act in (partial(held.seq.append, halves[0]), fork, partial(held.seq.append, halves[1])):
                    group.start_soon(attempt, act)
        except BaseException:
            held.shadow = self._among(held.seq, states)
            raise
        held.shadow = self._among(held.seq, states if full else states[-2:])
        if full:
            raise full[0]

    async def _read(self, held: Held, generation: Generation, params: SamplingParams, stop: int, read: int = 0) -> int:
        """Take tokens until `stop` of them were read, each checked against what the model must say; returns how many.

        A token belongs to the sequence from the moment it was taken, whatever happens next.
        """
        while read < stop:
            step = await anext(generation, None)
            if step is None:
                self._wrong(held, f"the generation ended after {read} of {params.max_tokens} tokens")
                break
            logprobs = toy_model.logprobs(held.shadow)
            expected = toy_model.best(held.shadow, 1)[0]
            held.shadow.append(step.token)
            read += 1
            finish = "stop" if step.token in params.stop_tokens else "length" if read == params.max_tokens else None
            if params.temperature == 0 and step.token != expected:
                self._wrong(held, f"generated {step.token} at {len(held.shadow) - 1}, not {expected}")
            elif not math.isclose(step.logprob, logprobs[step.token], abs_tol=toy_model.TOLERANCE):
                self._wrong(held, f"log-probability {step.logprob} of {step.token}, not {logprobs[step.token]}")
            elif step.finish_reason != finish and not held.seq.closed:
                self._wrong(held, f"finish reason {step.finish_reason} of token {read}, not {finish}")
            if step.finish_reason is not None:
                break
        return read

    # Shadows

    @contextmanager
    def _either(self, held: Held, after: list[int]) -> Iterator[None]:
        """The sequence becomes `after`, or raising stays as it was; cancelled, whichever of the two it says."""
        before = held.shadow
        try:
            yield
        except PageforkError:
            raise
        except BaseException:
            held.shadow = self._among(held.seq, [before, after])
            raise
        else:
            held.shadow = after

    def _among(self, seq: Sequence, states: list[list[int]]) -> list[int]:
        """What the sequence holds, which should be one of `states`."""
        tokens = seq.tokens
        if tokens not in states:
            self._report.wrong(self.now, f"{seq!r} holds {tokens}, none of {states}")
        return tokens

    def _forget(self, held: Held) -> None:
        self.held.remove(held)
        self._touched.remove(held)

    def _wrong(self, held: Held, what: str) -> None:
        self._report.wrong(self.now, f"{held.seq!r}: {what}; its tokens should be {held.shadow}")

    def _check_tokens(self) -> None:
        for held in self._touched:
            if held.seq.tokens != held.shadow or len(held.seq) != len(held.shadow):
                self._wrong(held, f"it holds {held.seq.tokens}")
                held.shadow = held.seq.tokens

    async def _check_kv(self, several: Iterable[Held], layers: Iterable[int]) -> None:
        """Every row of K and V that the sequences claim to have computed."""
        for held, layer in itertools.product(several, layers):
            found = await held.seq.read_kv(layer)
            rows = len(found[0])
            if rows > len(held.shadow):
                self._wrong(held, f"K and V of {rows} tokens in layer {layer}")
                continue
            self._report.kv_rows += rows
            for name, got, expected in zip("KV", found, toy_model.expected_kv(held.shadow[:rows], layer), strict=True):
                if not np.array_equal(got, expected):
                    row = int(np.flatnonzero((got != expected).any(axis=(1, 2)))[0])
                    self._wrong(
                        held, f"{name} of layer {layer} at {row} is {got[row].tolist()}, not {expected[row].tolist()}"
                    )


def _possible(kind: str, held: Held | None) -> str:
    """What is done instead where an operation makes no sense."""
    if held is None:
        return "open"
    if kind in ("append", "race") and len(held.shadow) > LONGEST:
        return "truncate"
    if kind in ("generate", "sample", "topk", "fork_running", "close_running") and not held.shadow:
        return "append"
    return kind


def _length(op: Op) -> int:
    """How many tokens a reader takes; half of them leave early."""
    return op.count if op.seed % 2 else 1 + int(op.fraction * (op.count - 1))


async def passes(count: int) -> None:
    """Let the event loop go round `count` times."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def cancelled(act: Callable[[], Awaitable[None]], after: int) -> bool:
    """Run `act`, cancelled after some passes of the event loop; whether that came before its end."""

    async def cancel(scope: anyio.CancelScope) -> None:
        await passes(after)
        scope.cancel()

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(cancel, scope)
            await act()
        group.cancel_scope.cancel()
    return scope.cancelled_caught
