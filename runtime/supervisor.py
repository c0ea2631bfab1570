"""Starts allocator, worker and sequences in this order, stops them in reverse, and sees that no block is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
from msgspec import Struct

from pagefork.runtime.actor import Actor, Reply
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.engine import EngineThread, Facts, Ints, StepEngine
from pagefork.runtime.errors import BlocksLeaked, PageforkError, WorkerDied
from pagefork.runtime.groups import longest, window_of
from pagefork.runtime.house import House
from pagefork.runtime.log import log
from pagefork.runtime.messages import Audit, Close
from pagefork.runtime.sequence import SequenceActor
from pagefork.runtime.worker import Worker

Caller = Callable[..., None]

_TEARDOWN = 10.0
"""Seconds that an engine thread gets to end after its model could not be loaded."""


class Options(Struct, frozen=True, kw_only=True):
    """The arguments of `Runtime.open` that matter here. `build` makes the engine, in the engine's thread."""

    build: Callable[[], StepEngine]
    blocks: int
    block_size: int
    max_batch: int
    prefill_step_size: int
    lease: int
    patience: float = 30.0
    prefix_cache: bool = True
    max_queue: int | None = None
    max_sequences: int | None = None
    shutdown_timeout: float


@asynccontextmanager
async def running(options: Options) -> AsyncIterator[House]:
    """Everything started on entry; on exit everything stopped and every block returned, or BlocksLeaked is raised."""
    call = _caller()
    engine, facts = await _start_engine(options.build, call, lambda message: call(worker.post, message))
    windows, size = facts.groups.windows, options.block_size
    blocks = (facts.blocks or options.blocks) * len(windows)
    window = window_of(windows, blocks, size, options.prefill_step_size)
    alone = longest(window, len(windows), blocks, size)
    allocator = Allocator(
        blocks,
        size,
        prefix=options.prefix_cache,
        max_queue=options.max_queue,
        windows=[None if each is None or window is None else window.size for each in windows],
        preempt=lambda owner: house.preempt(owner),
    )
    worker = Worker(
        engine,
        allocator.post,
        block_size=size,
        max_batch=options.max_batch,
        chunk=options.prefill_step_size,
        depth=facts.depth,
        groups=len(windows),
    )
    failure: BaseException | None = None
    leak: PageforkError | None = None
    sequences, servants = Shelter(), Shelter()
    with anyio.CancelScope() as leaving:
        async with anyio.create_task_group() as actors:
            async with anyio.create_task_group() as nursery:

                def spawn(actor: SequenceActor, nursery: anyio.abc.TaskGroup = nursery) -> None:
                    nursery.start_soon(sequences.run, actor.run, name=actor.name)

                house = House(
                    allocator,
                    worker,
                    facts,
                    block_size=size,
                    lease=options.lease,
                    max_context=facts.max_context if alone is None else min(facts.max_context, alone),
                    patience=options.patience,
                    max_sequences=options.max_sequences,
                    window=window,
                    spawn=spawn,
                    read_kv=_reader(engine, call),
                )
                for actor in (allocator, worker):
                    actors.start_soon(servants.run, partial(_guard, actor), name=f"pagefork {actor.name}")
                try:
                    yield house
                except BaseException as error:  # raised below: the task groups would wrap it
                    failure = error
                leaving.shield = True
                house.shut()
                await _close_sequences(house, options.shutdown_timeout)
                sequences.cancel()
            leak = await _audit(allocator, options.shutdown_timeout)
            servants.cancel()
        engine.stop()
        if not await anyio.to_thread.run_sync(engine.join, options.shutdown_timeout):
            log.warning("engine_still_running", note="a step did not end in time; its thread is left behind")
    if failure is not None:
        if leak is not None:
            log.error("lost_on_the_way_out", error=str(leak), raised=repr(failure))
        raise failure
    if leak is not None:
        raise leak


async def _start_engine(
    build: Callable[[], StepEngine], call: Caller, post: Callable[[Any], None]
) -> tuple[EngineThread, Facts]:
    """Start the engine's thread and wait until the model is loaded; raises what loading raises."""
    engine = EngineThread(build, post)
    ready = Reply()
    engine.start(lambda facts, error: call(_settle, ready, facts, error))
    try:
        await ready.settled()
        facts: Facts = ready.result()
    except BaseException:
        engine.stop()
        if ready.done:
            # A process that ends while MLX takes down the thread's streams is aborted.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(engine.join, _TEARDOWN)
        raise
    return engine, facts


class Shelter:
    """Tasks that a cancellation from outside does not reach: whoever leaves still needs them for it."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()

    async def run(self, function: Callable[[], Awaitable[None]]) -> None:
        with anyio.CancelScope(shield=True) as scope:
            self._scopes.add(scope)
            try:
                await function()
            finally:
                self._scopes.discard(scope)

    def cancel(self) -> None:
        for scope in self._scopes:
            scope.cancel()


async def _guard(actor: Actor) -> None:
    """Run an actor; when it crashes, all that waits for it has failed already, and the program goes on."""
    try:
        await actor.run()
    except Exception as error:
        log.error("actor_crashed", actor=actor.name, error=repr(error))


async def _close_sequences(house: House, timeout: float) -> None:
    """Ask every sequence to close and wait for it. What a step holds up after `timeout` waits for it no longer."""
    with anyio.move_on_after(timeout) as patience:
        for sequence in list(house.sequences.values()):
            sequence.post(Close())
        for sequence in list(house.sequences.values()):
            await sequence.gone.wait()
    if patience.cancelled_caught:
        house.worker.die(WorkerDied(f"a step did not end within {timeout} s; open another runtime"))


async def _audit(allocator: Allocator, timeout: float) -> PageforkError | None:
    """After the last release: None if every block came back, else what to raise."""
    try:
        free = await allocator.ask(Audit(), deadline=timeout)
    except PageforkError as error:
        log.error("no_audit", error=str(error))
        return error
    total = allocator.ledger.pool.num_blocks
    if free == total:
        return None
    return BlocksLeaked(f"{total - free} of {total} blocks were not returned at shutdown; please report this")


def _caller() -> Caller:
    """`call(function, *args)` for other threads: runs it in this event loop soon; drops it once the loop is gone."""
    native: Any = anyio.lowlevel.current_token().native_token
    soon = native.run_sync_soon if hasattr(native, "run_sync_soon") else native.call_soon_threadsafe

    def call(function: Callable[..., Any], *args: Any) -> None:
        try:
            soon(function, *args)
        except Exception as error:
            log.debug("event_loop_gone", error=repr(error))

    return call


def _settle(reply: Reply, value: Any, error: BaseException | None) -> None:
    if error is not None:
        reply.fail(error)
    else:
        reply.set(value)


def _reader(engine: EngineThread, call: Caller) -> Callable[[int, Ints, int], Awaitable[Any]]:
    async def read(layer: int, table: Ints, length: int) -> Any:
        reply = Reply()
        engine.call(
            lambda engine: engine.read_kv(layer, table, length),
            lambda value, error: call(_settle, reply, value, error),
        )
        await reply.settled()
        return reply.result()

    return read
