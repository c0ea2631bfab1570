"""Who is let in when sequences or blocks are short: in which order, for how long, and what a refusal leaves behind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pagefork.runtime import (
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    PoolExhausted,
    Runtime,
    SamplingParams,
    Sequence,
    SequenceClosed,
)
from pagefork.runtime.errors import RuntimeClosed
from pagefork.runtime.messages import Close

from .double import Double, free, ledger, runtime, settled, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5]
LONG = 1000.0
"""Seconds of patience that no test has."""


@asynccontextmanager
async def full_pool(rt: Runtime) -> AsyncIterator[Sequence]:
    """A generation that goes before everybody holds all of 8 blocks of 4 until it is closed."""
    async with await rt.sequence([7] * 29, priority=100) as hog:
        generation = hog.generate(SamplingParams(max_tokens=3))
        await take(generation, 1)
        assert hog._actor._work.held.entries == 8
        yield hog


async def waits(rt: Runtime, count: int = 1) -> None:
    await settled(rt, lambda: rt.stats().waiting == count)


async def turns(count: int) -> None:
    for _ in range(count):
        await checkpoint()


# Blocks


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt:
            with pytest.raises(ContextOverflow):
                await rt.sequence([7] * 33)
            async with await rt.sequence(PROMPT) as seq:
                with pytest.raises(ContextOverflow):
                    await seq.append([7] * 28)
                assert seq.tokens == PROMPT and rt.stats().waiting == 0


async def test_a_full_queue_refuses_at_once_and_keeps_those_that_wait() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG, max_queue=1) as rt:
            first, second = await rt.sequence(), await rt.sequence()
            async with anyio.create_task_group() as group, full_pool(rt):
                group.start_soon(first.append, PROMPT)
                await waits(rt)
                with pytest.raises(PoolExhausted):
                    await second.append(PROMPT)
            assert (first.tokens, second.tokens) == (PROMPT, [])


async def test_a_sequence_waits_no_longer_than_its_own_deadline_says() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt, full_pool(rt):
            with pytest.raises(PoolExhausted):
                await rt.sequence(PROMPT, deadline=0.01)
            await settled(rt, lambda: rt.stats().sequences == 1)


async def test_an_append_waits_no_longer_than_it_was_told() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt, await rt.sequence() as seq, full_pool(rt):
            with pytest.raises(PoolExhausted):
                await seq.append(PROMPT, deadline=0.01)
            assert seq.tokens == []


async def test_the_deadline_of_one_operation_is_not_that_of_the_next() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt, await rt.sequence() as seq:
            await seq.append(PROMPT, deadline=0)
            async with anyio.create_task_group() as group, full_pool(rt):
                group.start_soon(seq.topk, 1)
                await waits(rt)


async def test_those_that_wait_are_served_in_the_order_of_their_coming_higher_priorities_first() -> None:
    served: list[str] = []
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt:
            sequences = {
                "first": await rt.sequence(),
                "second": await rt.sequence(),
                "urgent": await rt.sequence(priority=2.0),
                "meek": await rt.sequence(priority=-1.0),
                "third": await rt.sequence(),
            }

            async def fill(name: str) -> None:
                await sequences[name].append([1] * 32)
                served.append(name)

            async with anyio.create_task_group() as group, full_pool(rt):
                for count, name in enumerate(["meek", "first", "second", "urgent", "third"], start=1):
                    group.start_soon(fill, name)
                    await waits(rt, count)
            assert served == ["urgent", "first", "second", "third", "meek"]


async def test_an_operation_that_was_refused_keeps_no_place_in_the_queue() -> None:
    served: list[str] = []
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt:
            early, late = await rt.sequence(), await rt.sequence()

            async def fill(name: str, seq: Sequence) -> None:
                await seq.append([1] * 32)
                served.append(name)

            async with anyio.create_task_group() as group, full_pool(rt):
                with pytest.raises(PoolExhausted):
                    await early.append(PROMPT, deadline=0)
                group.start_soon(fill, "waited longer", late)
                await waits(rt, 1)
                group.start_soon(fill, "came back", early)
                await waits(rt, 2)
            assert served == ["waited longer", "came back"]


@pytest.mark.parametrize("value", [math.nan, math.inf, "high", None])
async def test_a_priority_is_a_finite_number(value: Any) -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            with pytest.raises(InvalidRequest):
                await rt.sequence(PROMPT, priority=value)
            assert rt.stats().sequences == 0


@pytest.mark.parametrize("value", [math.nan, -1, "soon"])
async def test_a_deadline_is_a_number_of_seconds(value: Any) -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            with pytest.raises(InvalidRequest):
                await rt.sequence(PROMPT, deadline=value)
            with pytest.raises(InvalidRequest):
                await seq.append(PROMPT, deadline=value)
            with pytest.raises(InvalidRequest):
                seq.generate(deadline=value)
            assert await take(seq.generate(), 1) == Double.greedy(PROMPT, 1)


@pytest.mark.parametrize("arguments", [{"max_sequences": 0}, {"max_sequences": 1.5}, {"max_queue": -1}])
async def test_limits_are_whole_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        async with Runtime.open("no such model", **arguments):
            raise AssertionError("it was refused before any model was looked for")


# Waiting ends promptly


async def an_append(rt: Runtime, seq: Sequence) -> None:
    await seq.append([1] * 8)


async def a_generation(rt: Runtime, seq: Sequence) -> None:
    await anext(seq.generate())


async def a_topk(rt: Runtime, seq: Sequence) -> None:
    await seq.topk(1)


async def a_fork(rt: Runtime, seq: Sequence) -> None:
    await seq.fork(2)


Waiter = Callable[[Runtime, Sequence], Awaitable[None]]
WAITERS: list[Waiter] = [an_append, a_generation, a_topk, a_fork]


@asynccontextmanager
async def preempted(rt: Runtime) -> AsyncIterator[Sequence]:
    """A sequence that had to give up its blocks, in a pool where none will come free."""
    async with await rt.sequence(PROMPT) as seq, full_pool(rt):
        assert rt.stats().preemptions == 1
        yield seq


@pytest.mark.parametrize("operation", WAITERS)
async def test_close_ends_what_waits_for_blocks(operation: Waiter) -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt, preempted(rt) as seq:

            async def run() -> None:
                with pytest.raises(SequenceClosed):
                    await operation(rt, seq)

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await waits(rt)
                await seq.close()
            assert rt.stats().waiting == 0


@pytest.mark.parametrize("operation", WAITERS)
async def test_cancelled_while_it_waits_for_blocks_nothing_is_lost(operation: Waiter) -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt:
            async with preempted(rt) as seq:
                async with anyio.create_task_group() as group:
                    group.start_soon(operation, rt, seq)
                    await waits(rt)
                    group.cancel_scope.cancel()
                assert rt.stats().waiting == 0 and seq.tokens == PROMPT
                ledger(rt).check()
            await free(rt, 8)


@pytest.mark.parametrize("operation", WAITERS)
async def test_at_its_deadline_an_operation_is_refused_and_the_sequence_is_as_it_was(operation: Waiter) -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt:
            seq = await rt.sequence(PROMPT, deadline=0.02)
            async with full_pool(rt):
                with pytest.raises(PoolExhausted):
                    await operation(rt, seq)
                assert seq.tokens == PROMPT and rt.stats().waiting == 0
                ledger(rt).check()
            assert await take(seq.generate(), 4) == Double.greedy(PROMPT, 4)


async def test_aclose_ends_a_generation_that_waits_for_its_first_blocks() -> None:
    ended = False
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=16, patience=LONG) as rt, preempted(rt) as seq:
            generation = seq.generate()

            async def read() -> None:
                nonlocal ended
                assert [step async for step in generation] == []
                ended = True

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await waits(rt)
                await generation.aclose()
            assert ended and rt.stats().waiting == 0 and seq.tokens == PROMPT


@pytest.mark.parametrize("end", ["aclose", "close", "cancel"])
async def test_a_generation_whose_lease_waits_for_blocks_ends_at_once(end: str) -> None:
    got: list[int] = []
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=4, patience=LONG) as rt, await rt.sequence([7] * 16, priority=100) as hog:
            before = hog.generate()
            await take(before, 1)
            seq = await rt.sequence(PROMPT)
            generation = seq.generate()

            async def read() -> None:
                with contextlib.suppress(SequenceClosed):
                    async for step in generation:
                        got.append(step.token)

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await waits(rt)
                if end == "cancel":
                    group.cancel_scope.cancel()
                else:
                    await (generation.aclose() if end == "aclose" else seq.close())
            await generation.aclose()
            assert got and got == Double.greedy(PROMPT, len(got)) and seq.tokens == PROMPT + got
            assert rt.stats().waiting == 0
            await seq.close()
            await hog.close()
            await free(rt, 8)


async def test_a_runtime_closes_promptly_while_many_wait() -> None:
    ended: list[type[BaseException]] = []
    with anyio.fail_after(20):
        many = runtime(blocks=8, lease=16, patience=LONG, max_sequences=12)
        async with anyio.create_task_group() as group, many as rt:
            sequences = [await rt.sequence() for _ in range(11)]
            hog = await rt.sequence([7] * 29, priority=100)
            generation = hog.generate(SamplingParams(max_tokens=3))
            await take(generation, 1)

            async def fails(function: Callable[..., Awaitable[Any]], *args: Any) -> None:
                try:
                    await function(*args)
                except (SequenceClosed, RuntimeClosed) as error:
                    ended.append(type(error))

            for seq in sequences:
                group.start_soon(fails, seq.append, PROMPT)
            for _ in range(20):
                group.start_soon(fails, rt.sequence, PROMPT)
            await waits(rt, 11)
    assert ended.count(SequenceClosed) == 11 and ended.count(RuntimeClosed) == 20


# Sequences


async def test_sequences_beyond_the_limit_are_let_in_first_come_first_served() -> None:
    arrived: list[int] = []
    with anyio.fail_after(20):
        async with runtime(max_sequences=1, patience=LONG) as rt:
            first = await rt.sequence(PROMPT)

            async def come(number: int) -> None:
                async with await rt.sequence(PROMPT):
                    assert rt.stats().sequences == 1
                    arrived.append(number)

            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(come, number)
                    await turns(3)
                assert arrived == []
                await first.close()
            assert arrived == [0, 1, 2, 3]


async def test_a_sequence_that_may_not_come_in_gives_up_at_its_deadline() -> None:
    with anyio.fail_after(20):
        async with runtime(max_sequences=1, patience=LONG) as rt:
            async with await rt.sequence():
                with pytest.raises(DeadlineExceeded):
                    await rt.sequence(deadline=0.01)
                with pytest.raises(DeadlineExceeded):
                    await rt.sequence(deadline=0)
            async with await rt.sequence(deadline=0):
                pass


@pytest.mark.parametrize("later", range(6))
async def test_who_comes_as_another_is_called_waits_behind_it(later: int) -> None:
    most = 0
    with anyio.fail_after(20):
        async with runtime(max_sequences=1, patience=LONG, inline=True) as rt:
            first = await rt.sequence()

            async def come() -> None:
                nonlocal most
                async with await rt.sequence():
                    most = max(most, rt.stats().sequences)
                    await checkpoint()

            async with anyio.create_task_group() as group:
                group.start_soon(come)
                await turns(3)
                first._actor.post(Close())
                await turns(later)
                await come()
            assert most == 1


@pytest.mark.parametrize("later", range(6))
async def test_who_leaves_as_it_is_called_lets_the_next_one_in(later: int) -> None:
    with anyio.fail_after(20):
        async with runtime(max_sequences=1, patience=LONG, inline=True) as rt:
            first = await rt.sequence()

            async def come() -> None:
                async with await rt.sequence():
                    pass

            async with anyio.create_task_group() as group, anyio.create_task_group() as leaving:
                leaving.start_soon(come)
                await turns(3)
                group.start_soon(come)
                await turns(3)
                first._actor.post(Close())
                await turns(later)
                leaving.cancel_scope.cancel()
            assert rt.stats().sequences == 0


async def test_a_fork_beyond_the_limit_is_refused_and_leaves_no_child() -> None:
    with anyio.fail_after(20):
        async with runtime(max_sequences=3, patience=LONG) as rt, await rt.sequence(PROMPT) as seq:
            with pytest.raises(InvalidRequest):
                await seq.fork(3)
            assert len(await seq.fork(2)) == 2
            with pytest.raises(InvalidRequest):
                await seq.fork()
            assert rt.stats().sequences == 3


async def test_a_fork_that_is_cancelled_lets_those_in_that_wait() -> None:
    with anyio.fail_after(20):
        for count in range(12):
            async with runtime(max_sequences=2, patience=LONG, inline=True) as rt:
                seq = await rt.sequence(PROMPT)
                await seq.topk(1)

                async def come(rt: Runtime = rt) -> None:
                    async with await rt.sequence():
                        pass

                async def fork(seq: Sequence = seq) -> None:
                    with contextlib.suppress(InvalidRequest):  # the other was let in before
                        await seq.fork()

                async with anyio.create_task_group() as group:
                    async with anyio.create_task_group() as forking:
                        forking.start_soon(fork)
                        await turns(count)
                        group.start_soon(come)
                        await turns(1)
                        forking.cancel_scope.cancel()
                    if rt.stats().sequences == 2:
                        await seq.close()
