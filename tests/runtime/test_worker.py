"""The worker: what wakes together is batched together, prompts and decodes share steps, lanes are shared."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from pagefork.runtime import Runtime, SamplingParams, Sequence

from .double import Double, free, runtime, take

pytestmark = pytest.mark.anyio


async def generate_all(rt: Runtime, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of every prompt, all at once."""
    got: list[list[int]] = [[] for _ in prompts]

    async def read(index: int) -> None:
        async with await rt.sequence(prompts[index]) as seq:
            got[index] = await take(seq.generate(SamplingParams(max_tokens=count)), count)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(read, index)
    return got


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_batch", [1, 3, 64])
async def test_everybody_gets_their_own_tokens_whatever_the_batch(max_batch: int, depth: int) -> None:
    prompts = [[n % 7 + 1] * (n % 5 + 1) for n in range(20)]
    with anyio.fail_after(30):
        async with runtime(Double(depth=depth), blocks=256, max_batch=max_batch, lease=4) as rt:
            assert await generate_all(rt, prompts, 12) == [Double.greedy(prompt, 12) for prompt in prompts]
            await free(rt, 256)


async def test_sequences_that_wake_together_share_their_steps() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double, blocks=256, lease=32) as rt:
            await generate_all(rt, [[n + 1] for n in range(16)], 20)
    sizes = [len(plan.tokens) for plan in double.plans]
    assert max(sizes) == 16 and len(sizes) < 2 * 20


async def test_a_long_prompt_goes_in_chunks_and_decodes_go_on_beside_it() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double, blocks=256, chunk=8, lease=64, inline=True) as rt:
            seq = await rt.sequence([1, 2])
            generation = seq.generate(SamplingParams(max_tokens=64))
            await take(generation, 1)
            await (await rt.sequence([3] * 100)).topk(1)
            await take(generation, 20)
    prefill = [plan for plan in double.plans if any(segment.count > 1 for segment in plan.segments)]
    assert all(sum(segment.count for segment in plan.segments) <= 8 for plan in prefill)
    assert len(prefill) >= 12 and sum(len(plan.lengths) > 0 for plan in prefill) > 6


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_prompt_of_6000_tokens_delays_no_decode_by_more_than_a_chunk_and_ends_though_they_never_do(
    depth: int,
) -> None:
    double, readers, chunk, length = Double(depth=depth), 16, 512, 6000
    with anyio.fail_after(60):
        async with runtime(double, blocks=4096, chunk=chunk, lease=64, inline=True) as rt:
            prompt, over = await rt.sequence([3] * length), anyio.Event()

            async def decode(seq: Sequence) -> None:
                async for _ in seq.generate(SamplingParams(max_tokens=500)):
                    if over.is_set():
                        return

            async with anyio.create_task_group() as group:
                for name in range(readers):
                    group.start_soon(decode, await rt.sequence([name + 1] * 4))
                while not any(len(plan.lengths) == readers for plan in double.plans):
                    await checkpoint()
                await prompt.topk(1)
                over.set()
    chunks = [[part.count for part in plan.segments if part.count > 4] for plan in double.plans]
    first = next(index for index, counts in enumerate(chunks) if counts)
    during = double.plans[first : first + -(-length // chunk)]
    assert [sum(counts) for counts in chunks[first : first + len(during)]] == [chunk] * 11 + [length - 11 * chunk]
    assert all(len(plan.lengths) == readers for plan in during)


async def test_prompts_share_the_chunk_first_come_first_served() -> None:
    double, done = Double(), []
    with anyio.fail_after(20):
        async with runtime(double, blocks=256, chunk=4, inline=True) as rt:

            async def ask(seq: Sequence, name: int) -> None:
                await seq.topk(1)
                done.append(name)

            async with anyio.create_task_group() as group:
                for name in range(4):
                    group.start_soon(ask, await rt.sequence([name] * 21), name)
                    for _ in range(20):
                        await checkpoint()
    assert done == [0, 1, 2, 3]


async def test_steps_carry_plain_arrays_of_the_stated_kinds() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double, chunk=4) as rt:
            await generate_all(rt, [[1] * 9, [2]], 4)
    for plan in double.plans:
        arrays = (plan.tokens, plan.positions, plan.slots, plan.feed, plan.tables, plan.lengths, plan.copies, plan.rows)
        assert all(isinstance(array, np.ndarray) and array.dtype == np.int32 for array in arrays)
        assert len(plan.tokens) == len(plan.positions) == len(plan.slots)
        assert len(plan.feed) == len(plan.lengths) == len(plan.tables)
        assert len(plan.rows) == len(plan.sampling.keys)


async def test_two_steps_are_in_flight_only_where_the_engine_allows_it() -> None:
    for depth in (1, 2):
        double = Double(depth=depth)
        with anyio.fail_after(20):
            async with runtime(double, lease=32) as rt, await rt.sequence([1, 2]) as seq:
                generation = seq.generate()
                await take(generation, 1)
                double.hold()
                await double.held()
                await anyio.wait_all_tasks_blocked()
                assert len(double._flights) <= depth
                double.release()
                assert await take(generation, 8) == Double.greedy([1, 2], 9)[1:]
                assert any((plan.feed >= 0).any() for plan in double.plans) == (depth == 2)
