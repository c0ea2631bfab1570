"""Generations as their readers see them: what was taken is the sequence's, and nothing else is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import pairwise

import anyio
import pytest

from pagefork.runtime import PoolExhausted, SamplingParams, SequenceBusy, SequenceClosed, Step
from pagefork.runtime.actor import Envelope
from pagefork.runtime.messages import Reserve

from .double import Double, free, ledger, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5]
AHEAD = Double.greedy(PROMPT, 64)
TAKEN = 12


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lease", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [1, 2, 30])
async def test_greedy_tokens_follow_the_logits(depth: int, lease: int, count: int) -> None:
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth), lease=lease) as rt, await rt.sequence(PROMPT) as seq:
            steps = [step async for step in seq.generate(SamplingParams(max_tokens=count))]
            assert [step.token for step in steps] == AHEAD[:count]
            assert [step.finish_reason for step in steps] == [None] * (count - 1) + ["length"]
            assert seq.tokens == PROMPT + AHEAD[:count]
            for index, step in enumerate(steps):
                expected = Double.logprobs(PROMPT + AHEAD[:index])[step.token]
                assert step.logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_end_token_ends_it_and_belongs_to_the_sequence(depth: int) -> None:
    stop = AHEAD[9]
    expected = AHEAD[: AHEAD.index(stop) + 1]
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth, eos=[stop])) as rt, await rt.sequence(PROMPT) as seq:
            steps = [step async for step in seq.generate()]
            assert [step.token for step in steps] == expected == seq.tokens[len(PROMPT) :]
            assert steps[-1].finish_reason == "stop" and all(step.finish_reason is None for step in steps[:-1])
            await seq.truncate(len(PROMPT))
            ignoring = SamplingParams(max_tokens=20, ignore_eos=True)
            assert [step.token async for step in seq.generate(ignoring)] == AHEAD[:20]
            await seq.truncate(len(PROMPT))
            own = SamplingParams(max_tokens=20, ignore_eos=True, stop_tokens=(AHEAD[1],))
            assert [step.token async for step in seq.generate(own)] == AHEAD[: AHEAD.index(AHEAD[1]) + 1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("taken", range(1, 8))
async def test_left_early_the_sequence_ends_at_the_last_token_taken(taken: int, depth: int) -> None:
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth), lease=16) as rt, await rt.sequence(PROMPT) as seq:
            async for _ in seq.generate():
                taken -= 1
                if not taken:
                    break
            said = seq.tokens
            assert said == PROMPT + AHEAD[: len(said) - len(PROMPT)]
            gc.collect()
            await free(rt, 64 - -(-len(said) // 4))
            assert [token for token, _ in await seq.topk(1)] == [AHEAD[len(said) - len(PROMPT)]]


async def test_closed_a_generation_gives_its_blocks_back_before_aclose_returns() -> None:
    with anyio.fail_after(20):
        async with runtime(lease=32) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate()
            assert await take(generation, 4) == AHEAD[:4]
            await generation.aclose()
            await generation.aclose()
            await seq.truncate(len(seq))
            assert ledger(rt).pool.num_used == 3
            with pytest.raises(StopAsyncIteration):
                await anext(generation)
            assert seq.tokens == PROMPT + AHEAD[:4]


async def test_closed_before_it_began_it_gives_nothing() -> None:
    async with runtime() as rt, await rt.sequence(PROMPT) as seq:
        generation = seq.generate()
        await generation.aclose()
        assert [step async for step in generation] == [] and seq.tokens == PROMPT


async def test_a_generation_can_be_closed_after_its_sequence() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate()
            await take(generation, 1)
            await seq.close()
            await generation.aclose()


async def test_changing_the_sequence_ends_its_generation() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate()
            await take(generation, 3)
            await seq.append([7])
            assert [step async for step in generation] == []
            assert seq.tokens == [*PROMPT, *AHEAD[:3], 7]


async def test_an_old_generation_closed_late_leaves_the_new_one_running() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            old, new = seq.generate(), seq.generate()
            await take(old, 2)
            assert await take(new, 2) == AHEAD[2:4]
            await old.aclose()
            assert await take(new, 20) == AHEAD[4:24]


async def test_only_one_task_may_wait_for_the_next_token() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate()
            got: list[Step] = []
            for begun in range(2):
                double.hold()
                async with anyio.create_task_group() as group:

                    async def read() -> None:
                        # More than the lease that may have been computed before the engine was held.
                        for _ in range(TAKEN):
                            got.append(await anext(generation))

                    group.start_soon(read)
                    await double.held()
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(SequenceBusy):
                        await anext(generation)
                    double.release()
                assert [step.token for step in got] == AHEAD[: TAKEN * (begun + 1)]
                await take(generation, 0)


@pytest.mark.parametrize("natively", [False, True])
async def test_a_reader_cancelled_after_its_token_came_and_before_it_ran_takes_it_then_or_later(
    natively: bool, anyio_backend: str
) -> None:
    if natively and anyio_backend != "asyncio":
        pytest.skip("trio has no cancel of one task")
    with anyio.fail_after(20):
        async with runtime(Double(), lease=16) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=40))
            got = [(await anext(generation)).token]
            stream = generation._stream
            assert stream is not None
            push = type(stream).push
            cancels: list[Callable[[], object]] = []

            class Waking(type(stream)):  # type: ignore[misc]
                __slots__ = ()

                def push(self, token: int, logprob: float) -> None:
                    push(self, token, logprob)
                    if self.waiting and cancels:
                        cancels.pop()()

            stream.__class__ = Waking
            cut_short = 0
            while len(got) < 40:
                with anyio.CancelScope() as scope:
                    cancels[:] = [asyncio.current_task().cancel if natively else scope.cancel]  # type: ignore[union-attr]
                    try:
                        got.append((await anext(generation)).token)
                    except asyncio.CancelledError:
                        if not natively:
                            raise
                        cut_short += 1
                cut_short += scope.cancelled_caught
                assert seq.tokens == PROMPT + got
            assert got == AHEAD[:40] and (cut_short or not natively)


async def test_while_a_task_waits_for_a_token_only_fork_and_close_are_served() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double, lease=1) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate()
            await take(generation, 1)
            async with anyio.create_task_group() as group:
                await seq.topk(1)
                generation = seq.generate()
                await take(generation, 1)
                double.hold()
                ended: list[str] = []

                async def read() -> None:
                    with pytest.raises(SequenceClosed):
                        while True:
                            await anext(generation)
                    ended.append("closed")

                group.start_soon(read)
                await double.held()
                await anyio.wait_all_tasks_blocked()
                for operation in (
                    seq.append([1]),
                    seq.truncate(1),
                    seq.topk(1),
                    seq.read_kv(0),
                    anext(seq.generate()),
                ):
                    with pytest.raises(SequenceBusy, match=r"aclose\(\)"):
                        await operation
                double.release()
                (child,) = await seq.fork()
                assert child.tokens == PROMPT + AHEAD[: len(child) - len(PROMPT)]
                await seq.close()
            assert ended == ["closed"]


async def test_a_slow_reader_is_not_run_away_from() -> None:
    with anyio.fail_after(20):
        async with runtime(lease=6) as rt, await rt.sequence(PROMPT) as seq, await rt.sequence([9]) as other:
            generation = seq.generate(SamplingParams(max_tokens=64))
            for taken in range(1, 30):
                await take(generation, 1)
                await other.topk(1)
                await other.topk(1)
                assert len(seq._actor._work.stream.tokens) <= taken + 7
            assert seq.tokens == PROMPT + AHEAD[:29]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lease", [1, 3, 8, 64])
@pytest.mark.parametrize("blocks", [2, 3, 5])
async def test_an_exhausted_pool_delivers_every_token_that_fits_first(blocks: int, lease: int, depth: int) -> None:
    with anyio.fail_after(20):
        double = Double(depth=depth)
        async with runtime(double, blocks=blocks + 1, lease=lease) as rt, await rt.sequence(PROMPT) as seq:
            holder = await rt.sequence([1])
            got = []
            with pytest.raises(PoolExhausted):
                async for step in seq.generate():
                    got.append(step.token)
            assert got == AHEAD[: 4 * blocks - len(PROMPT) + 1], "one more than has K and V"
            assert seq.tokens == PROMPT + got
            await holder.close()
            assert await take(seq.generate(), 2) == AHEAD[len(got) : len(got) + 2]


async def test_exhausted_at_its_start_it_can_be_tried_again() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=2) as rt, await rt.sequence([3, 1, 4, 1]) as seq:
            (child,) = await seq.fork()
            holder = await rt.sequence([1])
            generation = child.generate()
            with pytest.raises(PoolExhausted) as caught:
                await anext(generation)
            assert (caught.value.wanted, caught.value.free, caught.value.total) == (1, 0, 2)
            assert child.tokens == [3, 1, 4, 1]
            await holder.close()
            assert await take(generation, 1) == Double.greedy([3, 1, 4, 1], 1)


@pytest.mark.parametrize("max_batch", [1, 2])
async def test_generations_read_in_turn_need_no_more_lanes_than_there_are(max_batch: int) -> None:
    prompts = [[n, 1, 2] for n in range(4)]
    with anyio.fail_after(10):
        async with runtime(max_batch=max_batch, lease=3) as rt:
            generations = [(await rt.sequence(prompt)).generate(SamplingParams(max_tokens=9)) for prompt in prompts]
            got: list[list[int]] = [[] for _ in prompts]
            for _ in range(9):
                for tokens, generation in zip(got, generations, strict=True):
                    tokens += await take(generation, 1)
            assert got == [Double.greedy(prompt, 9) for prompt in prompts]


async def test_blocks_are_asked_for_once_for_most_of_a_lease() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(), blocks=64, lease=16) as rt, await rt.sequence(PROMPT) as seq:
            allocator = rt._house.allocator
            asked: list[int] = []
            reserve = allocator._reserve

            def counted(envelope: Envelope, message: Reserve) -> None:
                asked.append(message.length)
                reserve(envelope, message)

            allocator._reserve = counted  # type: ignore[method-assign]
            assert await take(seq.generate(SamplingParams(max_tokens=60)), 60) == AHEAD[:60]
            assert len(asked) <= 6 and all(more - less >= 10 for less, more in pairwise(asked[:-1]))
