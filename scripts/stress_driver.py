"""One task of the stress test: it holds a few sequences, does operation after operation and checks each."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from schedule import Digest, Load, Op, operations
from stress_acts import Acts
from stress_family import Family, Held
from stress_faults import cancelled
from stress_oracle import Oracle
from stress_report import Report

from pagefork.runtime import ContextOverflow, PoolExhausted, Runtime

FAMILY = 2
CHECK_EVERY = 2
"""After this many operations a task checks K and V of the sequences that the last one touched, in one layer."""
ALL_EVERY = 16
"""After this many, all of its sequences in all layers."""


class Driver:
    """now: the operation in progress. since: when it began, by the event loop's clock; None when all is done."""

    def __init__(
        self, rt: Runtime, report: Report, oracle: Oracle, load: Load, task: int, stop: Callable[[int], bool]
    ) -> None:
        self.digest = Digest()
        self.since: float | None = anyio.current_time()
        self.task = task
        self._family = Family(rt, report, oracle, task)
        self._acts = Acts(self._family)
        self._report = report
        self._oracle = oracle
        self._load = load
        self._stop = stop

    @property
    def now(self) -> str:
        return self._family.now

    async def run(self) -> None:
        """Operations until `stop(number)` says so. Then every sequence is checked and closed."""
        family, layers = self._family, range(self._oracle.layers)
        for number, op in enumerate(operations(self._report.seed, self.task, self._oracle.vocab, self._load)):
            if self._stop(number):
                break
            self._begin(number, op)
            end = await self._perform(op)
            self._report.ops += 1
            self._report.recent.append((self.task, number, op, end))
            if number % ALL_EVERY == ALL_EVERY - 1:
                await family.check_kv(family.held, layers)
            elif layers and number % CHECK_EVERY == 0:
                await family.check_kv(family.touched, [number // CHECK_EVERY % len(layers)])
        self._begin(None, None)
        await family.check_kv(family.held, layers)
        for held in family.held:
            await held.seq.close()
        self.since = None

    def _begin(self, number: int | None, op: Op | None) -> None:
        self.since = anyio.current_time()
        if op is None:
            self._family.now = f"task {self.task}, end"
            return
        self.digest.add(op)
        self._family.now = f"task {self.task}, operation {number}, {op.kind}"
        if op.cancel_after is not None:
            self._family.now += f" cancelled after {op.cancel_after} passes"

    async def _perform(self, op: Op) -> str:
        """Do it, cancelled where it says so; a full pool is an answer like others, and makes the task give back.

        Returns how it ended.
        """
        family, held, end = self._family, self._target(op), "done"
        family.touched = [] if held is None else [held]
        full: list[PoolExhausted | ContextOverflow] = []

        async def attempt() -> None:
            try:
                await self._acts.perform(op, held)
            except (PoolExhausted, ContextOverflow) as error:
                full.append(error)

        if op.cancel_after is None:
            await attempt()
        elif await cancelled(attempt, op.cancel_after):
            self._report.cancels += 1
            end = "cancelled"
        family.check_tokens()
        if full:
            end = type(full[0]).__name__
            self._report.exhausted += isinstance(full[0], PoolExhausted)
            await self._give_back(op)
        while len(family.held) > FAMILY:
            await family.drop(family.held[0])
        return end

    def _target(self, op: Op) -> Held | None:
        """The sequence that an operation is for; None where it opens one."""
        held = self._family.held
        return None if not held or op.kind == "open" else held[int(op.pick * len(held))]

    async def _give_back(self, op: Op) -> None:
        """What somebody does who finds the pool full: drop a sequence, or shorten it."""
        family = self._family
        if not family.held:
            return
        held = family.held[int(op.fraction * len(family.held))]
        if op.seed % 2:
            await family.drop(held)
        else:
            shortest = self._oracle.shortest
            await family.shorten(held, shortest + (len(held.shadow) - shortest) // 2)


def remains(rt: Runtime) -> str | None:
    """What is left though every sequence was closed."""
    stats = rt.stats()
    leaked = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    if not (leaked or stats.sequences or stats.jobs or stats.waiting):
        return None
    return (
        f"{leaked} blocks, {stats.sequences} sequences, {stats.jobs} jobs and {stats.waiting} waiting requests "
        "left at the end"
    )


def overdue(drivers: list[Driver], limit: float) -> list[str]:
    """Which tasks have been at one operation for longer than `limit` seconds: forgotten, or as good as."""
    now = anyio.current_time()
    return [driver.now for driver in drivers if driver.since is not None and now - driver.since > limit]
