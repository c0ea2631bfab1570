"""Opening, leaving and breaking: every call ends, every block returns, and errors come out as they are."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import mlx.core as mx
import pytest

from pagefork.runtime import (
    BeamSearchParams,
    BlocksLeaked,
    PageforkError,
    Runtime,
    RuntimeClosed,
    Sequence,
    SequenceClosed,
    WorkerDied,
)
from pagefork.runtime.api import opened
from pagefork.runtime.engine import EngineThread
from pagefork.runtime.supervisor import Options

from .double import Double, free, ledger, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


async def fork(rt: Runtime, seq: Sequence) -> None:
    async with (await seq.fork())[0] as child:
        await child.topk(1)


CALLS: list[Callable[[Runtime, Sequence], Awaitable[object]]] = [
    lambda rt, seq: seq.topk(1),
    fork,
    lambda rt, seq: take(seq.generate(), 200),
    lambda rt, seq: rt.beam_search(PROMPT, BeamSearchParams(width=2)),
    lambda rt, seq: seq.read_kv(0),
]


def options(build: Callable[[], Double], **changes: object) -> Options:
    given = {"blocks": 64, "block_size": 4, "max_batch": 8, "prefill_step_size": 8, "lease": 8, "shutdown_timeout": 5.0}
    return Options(build=build, **(given | changes))  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_once_joined_nothing_of_the_thread_is_left() -> None:
    """What MLX kept for it is taken down last, when Python's part of the thread has ended."""
    for _ in range(20):
        ready = threading.Event()
        thread = EngineThread(Double, lambda message: None)
        thread.start(lambda facts, error, ready=ready: ready.set())
        assert ready.wait(10)
        thread.call(lambda engine: mx.eval(mx.ones(9) + 1), lambda value, error: None)
        thread.stop()
        assert thread.join(10) and not Path(f"/proc/self/task/{thread._thread.native_id}").exists()


@pytest.mark.parametrize("depth", [1, 2])
async def test_left_in_the_middle_of_everything_it_returns_every_block(depth: int) -> None:
    double, ends = Double(depth=depth), []

    async def read(sequence: Sequence) -> None:
        try:
            async for _ in sequence.generate():
                pass
        except PageforkError as error:
            ends.append(type(error))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as readers, runtime(double, blocks=256) as rt:
            roots = [await rt.sequence([n, 1, 2]) for n in range(6)]
            for sequence in roots:
                for member in (sequence, *await sequence.fork(2)):
                    readers.start_soon(read, member)
            await take((await rt.sequence(PROMPT)).generate(), 5)
        assert double.closed and len(ends) == 18 and set(ends) <= {SequenceClosed, RuntimeClosed}


async def test_after_it_nothing_is_served_and_nothing_hangs() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate()
            await take(generation, 1)
        with pytest.raises(RuntimeClosed):
            await rt.sequence(PROMPT)
        with pytest.raises(RuntimeClosed):
            await rt.beam_search(PROMPT)
        for call in (seq.append([1]), seq.topk(1), seq.fork(), seq.truncate(0)):
            with pytest.raises(SequenceClosed):
                await call
        with pytest.raises(SequenceClosed):
            await take(generation, 20)
        await generation.aclose()
        await seq.close()
        assert seq.closed and rt.stats().sequences == 0


async def test_what_the_body_raises_comes_out_bare() -> None:
    with anyio.fail_after(20):
        with pytest.raises(ZeroDivisionError):
            async with runtime() as rt:
                await take((await rt.sequence(PROMPT)).generate(), 3)
                raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt):
            async with runtime():
                raise KeyboardInterrupt
        group = ExceptionGroup("own", [ValueError()])
        with pytest.raises(ExceptionGroup) as caught:
            async with runtime():
                raise group
        assert caught.value is group


async def test_what_building_raises_comes_out_bare() -> None:
    def broken() -> Double:
        raise LookupError("no such model")

    with anyio.fail_after(20), pytest.raises(LookupError, match="no such model"):
        async with opened(options(broken)):
            pytest.fail("opened")


async def test_cancelled_while_it_opens_it_leaves_nothing_running() -> None:
    double = Double()
    double.hold()

    def slow() -> Double:
        double.pass_gate(10)
        return double

    with anyio.move_on_after(0.05) as scope:
        async with opened(options(slow)):
            pytest.fail("opened")
    assert scope.cancelled_caught
    double.release()
    with anyio.fail_after(10):
        while not double.closed:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("depth", [1, 2])
async def test_cancelled_from_outside_the_body_still_cleans_up_and_every_block_returns(depth: int) -> None:
    cleaned = False
    with anyio.fail_after(20), anyio.CancelScope() as scope:
        async with runtime(Double(depth=depth)) as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate()
            await take(generation, 3)
            scope.cancel()
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    assert len(await seq.topk(2)) == 2
                    assert len(await seq.fork(2)) == 2
                    await seq.close()
                    cleaned = True
    assert cleaned and scope.cancelled_caught


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_timeouts_and_cancelled_tasks_leave_it_as_it_was() -> None:
    with anyio.fail_after(20):
        double = Double()
        async with runtime(double) as rt, await rt.sequence(PROMPT) as seq:
            double.hold()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await take(seq.generate(), 5)
            task = asyncio.ensure_future(seq.topk(1))
            await asyncio.sleep(0)
            task.cancel()
            double.release()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await take(seq.generate(), 5) == Double.greedy(PROMPT, 5)

        async def whole() -> None:
            async with runtime() as inner:
                await take((await inner.sequence(PROMPT)).generate(), 2)
                await asyncio.Event().wait()

        task = asyncio.ensure_future(whole())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_fails_every_call_and_hangs_none(where: str, step: int, depth: int) -> None:
    double, errors = Double(depth=depth, **{f"fail_{where}": step}), []

    async def fails(call: Callable[[Runtime, Sequence], Awaitable[object]], rt: Runtime, seq: Sequence) -> None:
        with pytest.raises(WorkerDied) as caught:
            while True:
                await call(rt, seq)
        errors.append(caught.value)

    with anyio.fail_after(20):
        async with runtime(double) as rt:
            async with anyio.create_task_group() as group:
                for call in CALLS:
                    group.start_soon(fails, call, rt, await rt.sequence(PROMPT))
            assert len(errors) == len(CALLS)
            late = await rt.sequence(PROMPT)
            for call in CALLS:
                with pytest.raises(WorkerDied):
                    await call(rt, late)
        assert double.closed


@pytest.mark.parametrize(
    ("where", "depth", "tokens"), [("collect", 1, 5), ("collect", 2, 5), ("launch", 1, 5), ("launch", 2, 4)]
)
async def test_a_step_that_fails_among_others_takes_no_token_of_those_before_it(
    where: str, depth: int, tokens: int
) -> None:
    """Five steps before it, of which with a depth of 2 one is still on the device when the sixth is launched."""
    double = Double(depth=depth, seconds=0.0001, **{f"fail_{where}": 5})
    with anyio.fail_after(20):
        async with runtime(double, lease=32, inline=True) as rt:
            got: list[int] = []
            with pytest.raises(WorkerDied):
                async for step in (await rt.sequence([1])).generate():
                    got.append(step.token)
    assert got == Double.greedy([1], tokens)


async def test_each_task_gets_an_error_of_its_own() -> None:
    """One object raised in all of them would keep the tracebacks of all: 32 readers once printed 19,000 lines."""
    errors: list[BaseException] = []

    async def read(seq: Sequence) -> None:
        with pytest.raises(WorkerDied) as caught:
            async for _ in seq.generate():
                pass
        errors.append(caught.value)

    with anyio.fail_after(20):
        async with runtime(Double(fail_collect=1)) as rt, anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(read, await rt.sequence(PROMPT))
    assert len({id(error) for error in errors}) == 5 and len({str(error) for error in errors}) == 1
    assert all(error.__cause__ is errors[0].__cause__ is not None for error in errors)
    errors[0].add_note("of one task")
    assert not any(getattr(error, "__notes__", []) for error in errors[1:])
    for error in errors:
        assert [frame.name for frame in traceback.extract_tb(error.__traceback__)].count("read") == 1


async def test_a_generation_dropped_when_the_engine_has_failed_says_so_later() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(fail_collect=2), lease=2) as rt:
            seq = await rt.sequence(PROMPT)
            with pytest.raises(WorkerDied):
                async for _ in seq.generate():
                    pass
            for call in CALLS:
                with pytest.raises(WorkerDied):
                    await call(rt, seq)


async def test_a_crash_in_a_sequence_closes_that_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            seq, other = await rt.sequence(PROMPT), await rt.sequence(PROMPT)
            (child,) = await seq.fork()
            generation = seq.generate()
            await take(generation, 2)

            def crash(count: int) -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(seq._actor, "_fork", crash)
            with pytest.raises(SequenceClosed, match="crashed and was closed: ZeroDivisionError"):
                await seq.fork()
            assert seq.closed
            with pytest.raises(SequenceClosed):
                await take(generation, 20)
            for sequence in (other, child):
                assert await take(sequence.generate(), 3) == Double.greedy(PROMPT, 3)
                await sequence.close()
            await free(rt, 64)


async def test_a_leak_is_reported_when_it_is_left() -> None:
    with anyio.fail_after(20):
        with pytest.raises(BlocksLeaked, match="2 of 64 blocks"):
            async with opened(options(Double)) as rt:
                ledger(rt).reserve(999, 8)
        with pytest.raises(ZeroDivisionError):
            async with opened(options(Double)) as rt:
                ledger(rt).reserve(999, 8)
                raise ZeroDivisionError
        with pytest.raises(PageforkError):
            async with opened(options(Double)) as rt:
                ledger(rt).pool.allocate(1)


async def test_a_step_that_never_ends_does_not_keep_the_runtime_open() -> None:
    double = Double()
    with anyio.fail_after(10):
        async with opened(options(lambda: double, shutdown_timeout=0.2)) as rt:
            double.bind(ledger(rt))
            seq = await rt.sequence(PROMPT)
            double.hold()
            with anyio.move_on_after(0.05):
                await take(seq.generate(), 1)
        assert ledger(rt).pool.num_free == 64
    double.release()
