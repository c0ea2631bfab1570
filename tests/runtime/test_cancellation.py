"""P8: an operation that is cancelled took effect or did not, at whichever turn of the event loop the cancel comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pagefork.runtime import BeamSearchParams, PoolExhausted, Runtime, SamplingParams, Sequence

from .double import Double, free, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
EXTRA = [7, 7, 7, 7, 7]
AHEAD = Double.greedy(PROMPT, 12)
BLOCKS = 48
Operation = Callable[[Runtime, Sequence], Awaitable[None]]


async def append(rt: Runtime, seq: Sequence) -> None:
    await seq.append(EXTRA)
    assert seq.tokens == PROMPT + EXTRA


async def append_too_much(rt: Runtime, seq: Sequence) -> None:
    async with await rt.sequence([7] * 40):
        with pytest.raises(PoolExhausted):
            await seq.append([7] * (4 * BLOCKS - len(PROMPT)))
    assert seq.tokens == PROMPT


async def generate(rt: Runtime, seq: Sequence) -> None:
    assert await take(seq.generate(SamplingParams(max_tokens=12)), 6) == AHEAD[:6]


async def generate_to_the_end(rt: Runtime, seq: Sequence) -> None:
    assert [step.token async for step in seq.generate(SamplingParams(max_tokens=6))] == AHEAD[:6]


async def leave_a_generation(rt: Runtime, seq: Sequence) -> None:
    generation = seq.generate(SamplingParams(max_tokens=12))
    await take(generation, 2)
    await generation.aclose()


async def topk(rt: Runtime, seq: Sequence) -> None:
    assert len(await seq.topk(4)) == 4


async def truncate(rt: Runtime, seq: Sequence) -> None:
    await seq.truncate(6)
    assert seq.tokens == PROMPT[:6]


async def read_kv(rt: Runtime, seq: Sequence) -> None:
    await seq.read_kv(0)


async def fork(rt: Runtime, seq: Sequence) -> None:
    async with AsyncExitStack() as stack:
        for child in await seq.fork(3):
            await stack.enter_async_context(child)


async def fork_while_running(rt: Runtime, seq: Sequence) -> None:
    async with AsyncExitStack() as stack:
        generation = seq.generate(SamplingParams(max_tokens=12))
        await take(generation, 2)
        children = await seq.fork(2)
        for child in children:
            await stack.enter_async_context(child)
        for child in children:
            await child.append([1])
            await child.topk(2)
        assert await take(generation, 2) == AHEAD[2:4]


async def open_another(rt: Runtime, seq: Sequence) -> None:
    async with await rt.sequence(PROMPT) as other:
        await other.topk(1)


async def beam_search(rt: Runtime, seq: Sequence) -> None:
    await rt.beam_search(PROMPT, BeamSearchParams(width=3, max_tokens=4))


OPERATIONS: list[Operation] = [
    append,
    append_too_much,
    generate,
    generate_to_the_end,
    leave_a_generation,
    topk,
    truncate,
    read_kv,
    fork,
    fork_while_running,
    open_another,
    beam_search,
]


async def ends_within(operation: Callable[[], Awaitable[None]], turns: int) -> bool:
    """Run an operation and cancel it after so many turns of the event loop; whether it had ended by itself."""
    done = False
    async with anyio.create_task_group() as group:

        async def run() -> None:
            nonlocal done
            await operation()
            done = True
            group.cancel_scope.cancel()

        group.start_soon(run)
        for _ in range(turns):
            await checkpoint()
        group.cancel_scope.cancel()
    return done


async def ends_within_natively(operation: Callable[[], Awaitable[None]], turns: int) -> bool:
    """The same with asyncio's own cancellation, twice in a row as an impatient caller does."""
    task = asyncio.ensure_future(operation())
    for _ in range(turns):
        await asyncio.sleep(0)
        if task.done():
            break
    else:
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    return not task.cancelled() and task.exception() is None


def took_effect_or_not(operation: Operation, tokens: list[int]) -> None:
    whole = {append: [PROMPT, PROMPT + EXTRA], truncate: [PROMPT, PROMPT[:6]]}
    assert tokens in whole.get(operation, [PROMPT + AHEAD[:n] for n in range(7)])


async def usable(seq: Sequence) -> None:
    """The sequence goes on from what it says it holds."""
    said = seq.tokens
    assert [token for token, _ in await seq.topk(3)] == Double.logprobs(said).argsort()[::-1][:3].tolist()
    k, v = await seq.read_kv(0)
    assert k.ravel().tolist() == said and v.ravel().tolist() == list(range(len(said)))
    assert await take(seq.generate(SamplingParams(max_tokens=5)), 5) == Double.greedy(said, 5)


def stride(turns: int) -> int:
    """Every turn of the first ones; later ones repeat the same steps, and a third of them will do."""
    return 1 if turns < 30 else 3


async def one_round(rt: Runtime, operation: Operation, turns: int, shared: bool, ends: Callable[..., Awaitable[bool]]):
    """Whether the operation ended before it was cancelled. Either way everything is as it should be."""
    seq = await rt.sequence(PROMPT)
    kids = []
    if shared:
        await seq.topk(1)
        kids = await seq.fork(2)
    ended = await ends(lambda: operation(rt, seq), turns)
    took_effect_or_not(operation, seq.tokens)
    await usable(seq)
    for kid in kids:
        assert await take(kid.generate(SamplingParams(max_tokens=3)), 3) == AHEAD[:3]
        await kid.close()
    await seq.close()
    await free(rt, BLOCKS)
    assert rt.stats().sequences == 0 and rt.stats().jobs == 0
    return ended


@pytest.mark.parametrize(("shared", "depth"), [(True, 1), (False, 2)], ids=["shared", "pending, two steps in flight"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_cancelled_at_any_turn_nothing_is_lost(operation: Operation, shared: bool, depth: int) -> None:
    turns = 0
    with anyio.fail_after(60):
        async with runtime(Double(depth=depth), blocks=BLOCKS, inline=True) as rt:
            while not await one_round(rt, operation, turns, shared, ends_within):
                turns += stride(turns)
    assert turns > 1, "it was cancelled on its way at least once"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_cancelled_natively_at_any_turn_nothing_is_lost(operation: Operation) -> None:
    turns = 0
    with anyio.fail_after(60):
        async with runtime(blocks=BLOCKS, inline=True) as rt:
            while not await one_round(rt, operation, turns, True, ends_within_natively):
                turns += stride(turns)
    assert turns > 1, "it was cancelled on its way at least once"
