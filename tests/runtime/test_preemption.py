"""Sequences that have to give up their blocks go on as if they had not; whoever waits for them gets them in the end."""

from __future__ import annotations

import random
from typing import Any

import anyio
import mlx.core as mx
import pytest
from anyio.lowlevel import checkpoint
from mlx_lm.models import llama

from pagefork.runtime import BeamSearchParams, PoolExhausted, Runtime, SamplingParams, Sequence
from pagefork.runtime.messages import Resume

from .double import Double, free, ledger, runtime, settled, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
AHEAD = Double.greedy(PROMPT, 64)
LONG = 1000.0
"""Seconds of patience that no test has."""


async def turns(count: int) -> None:
    for _ in range(count):
        await checkpoint()


def preempt(rt: Runtime, seq: Sequence) -> None:
    rt._house.preempt(seq._actor.owner)


def slow_allocator(rt: Runtime, count: int) -> None:
    """The allocator takes so many turns for each message, as one in another process would."""
    allocator = rt._house.allocator
    serve = allocator.serve

    async def later(envelope: Any) -> None:
        await turns(count)
        await serve(envelope)

    allocator.serve = later  # type: ignore[method-assign]


def sound(rt: Runtime) -> None:
    ledger(rt).check()
    rt._house.allocator.arbiter.check()


# What a preempted sequence says


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
async def test_a_generation_goes_on_unchanged_at_whichever_turn_it_is_preempted(prefix: bool, depth: int) -> None:
    with anyio.fail_after(30):
        async with runtime(Double(depth=depth), patience=LONG, prefix_cache=prefix, inline=True) as rt:
            for count in range(0, 40, 3):
                async with await rt.sequence(PROMPT) as seq, anyio.create_task_group() as group:
                    generation = seq.generate(SamplingParams(max_tokens=20))
                    got: list[int] = []

                    async def read(generation: Any = generation, got: list[int] = got) -> None:
                        got += [step.token async for step in generation]

                    group.start_soon(read)
                    await turns(count)
                    preempt(rt, seq)
                    await turns(count % 5)
                    preempt(rt, seq)
                assert got == AHEAD[:20]
                sound(rt)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_generation_preempted_while_it_is_forked_is_resumed_once(depth: int) -> None:
    """Two jobs of one sequence wrote the same slots."""
    with anyio.fail_after(30):
        async with runtime(Double(depth=depth), patience=LONG, prefix_cache=True, inline=True) as rt:
            slow_allocator(rt, 8)
            for count in range(0, 48, 2):
                async with await rt.sequence(PROMPT) as seq, anyio.create_task_group() as group:
                    generation = seq.generate(SamplingParams(max_tokens=24))
                    await take(generation, 3)
                    group.start_soon(seq.fork)
                    await turns(count)
                    preempt(rt, seq)
                    assert await take(generation, 21) == AHEAD[3:24]
                    assert rt.stats().jobs <= 1
                for actor in list(rt._house.sequences.values()):
                    await Sequence(actor, rt._house).close()
                sound(rt)


async def test_only_what_was_computed_again_is_published_after_a_preemption() -> None:
    """Others were given blocks that the resumed job had not come to yet."""
    double = Double()
    with anyio.fail_after(30):
        async with runtime(double, blocks=20, lease=40, chunk=4, patience=LONG, prefix_cache=True) as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate(SamplingParams(max_tokens=100))
            await take(generation, 1)
            await settled(rt, lambda: len(seq._actor._work.stream.tokens) > 35)
            hog = await rt.sequence([7] * 80, priority=100)
            await settled(rt, lambda: not seq._actor._work.held.entries)
            double.hold()
            await hog.close()
            await double.held()
            await take(generation, 14)
            async with anyio.create_task_group() as group:
                group.start_soon(generation.aclose)
                await turns(20)
                async with await rt.sequence(PROMPT + AHEAD[:6]) as twin:
                    double.release()
                    assert (await twin.topk(1))[0][0] == AHEAD[6]
            assert seq.tokens == PROMPT + AHEAD[:15]
            await seq.close()


class Demand:
    """Sequences that want more blocks together than there are: what each was told, and what it must say."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompts = [
            PROMPT[: self.random.randrange(1, 11)] + self.random.choices(range(32), k=self.random.randrange(6))
            for _ in range(6)
        ]
        self.counts = [self.random.randrange(8, 20) for _ in self.prompts]
        sizes = [-(-(len(p) + n) // 4) for p, n in zip(self.prompts, self.counts, strict=True)]
        self.blocks = max(max(sizes) + 1, sum(sizes) * 6 // 10)

    async def run(self, rt: Runtime, index: int) -> list[int]:
        """The tokens of one of them, read with pauses."""
        prompt, count, rng = self.prompts[index], self.counts[index], random.Random(index)
        await turns(rng.randrange(30))
        async with await rt.sequence(prompt, priority=rng.choice([0.0, 0.0, 0.01])) as seq:
            out = []
            async for step in seq.generate(SamplingParams(max_tokens=count, ignore_eos=True)):
                out.append(step.token)
                await turns(rng.choice([0, 0, 0, 5]))
            assert seq.tokens == prompt + out
            return out


async def together(rt: Runtime, demand: Demand) -> list[list[int]]:
    out: dict[int, list[int]] = {}

    async def one(index: int) -> None:
        out[index] = await demand.run(rt, index)

    async with anyio.create_task_group() as group:
        for index in range(len(demand.prompts)):
            group.start_soon(one, index)
    sound(rt)
    return [out[index] for index in range(len(out))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
async def test_preempted_greedy_sequences_end_with_the_tokens_that_they_would_have_had_alone(
    prefix: bool, depth: int
) -> None:
    preemptions = 0
    with anyio.fail_after(60):
        for seed in range(12):
            demand, double = Demand(seed), Double(depth=depth, seconds=(1.0, 0.0003)[seed % 2])
            async with runtime(
                double, blocks=demand.blocks, patience=LONG, prefix_cache=prefix, inline=seed % 3 > 0
            ) as rt:
                for prompt, count, out in zip(demand.prompts, demand.counts, await together(rt, demand), strict=True):
                    assert out == Double.greedy(prompt, count)
                await free(rt, demand.blocks)
                preemptions += rt.stats().preemptions
    assert preemptions > 5, "the pool was too small now and then"


def tiny_llama() -> llama.Model:
    mx.random.seed(7)
    args = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    return llama.Model(
        llama.ModelArgs(model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=32, **args)
    )


async def test_a_preempted_model_says_what_it_would_have_said_alone() -> None:
    model = (tiny_llama(), None)
    with anyio.fail_after(60):
        for seed in range(2):
            demand = Demand(seed)
            async with Runtime.open(model, blocks=200, block_size=4, prefix_cache=False) as rt:
                alone = [await demand.run(rt, index) for index in range(len(demand.prompts))]
                assert rt.stats().preemptions == 0
            async with Runtime.open(model, blocks=demand.blocks, block_size=4, lease=8, patience=LONG) as rt:
                assert await together(rt, demand) == alone
                assert rt.stats().preemptions > 0


# Who gives way, and who does not


async def test_an_idle_sequence_gives_way_and_computes_again_what_it_had() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt:
            idle = await rt.sequence(PROMPT)
            await idle.topk(1)
            async with await rt.sequence([7] * 32):
                assert len(idle) == len(PROMPT) and rt.stats().preemptions == 1
            assert await take(idle.generate(), 5) == AHEAD[:5]
            await idle.close()


async def test_a_preemption_that_was_met_already_costs_nothing_again() -> None:
    submits = 0
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=20))
            await take(generation, 2)
            submit = rt._house.worker.submit

            async def counted(*args: Any) -> None:
                nonlocal submits
                submits += 1
                await submit(*args)

            rt._house.worker.submit = counted  # type: ignore[method-assign]
            for _ in range(3):
                preempt(rt, seq)
            assert await take(generation, 18) == AHEAD[2:20]
            assert submits == 1


async def test_two_generations_in_a_pool_for_one_both_end() -> None:
    """Neither takes back from the other what it has just lost, for ever."""
    with anyio.fail_after(30):
        async with runtime(blocks=6, patience=LONG, lease=4) as rt:
            out: dict[int, list[int]] = {}

            async def one(number: int) -> None:
                async with await rt.sequence([number] * 9) as seq:
                    out[number] = [step.token async for step in seq.generate(SamplingParams(max_tokens=14))]

            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(one, number)
            assert out == {number: Double.greedy([number] * 9, 14) for number in range(4)}
            assert rt.stats().preemptions <= 40


async def test_a_large_request_is_served_though_small_ones_keep_coming() -> None:
    done = anyio.Event()
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt, anyio.create_task_group() as group:

            async def small() -> None:
                while not done.is_set():
                    async with await rt.sequence([1] * 8) as seq:
                        await seq.topk(1)

            for _ in range(6):
                group.start_soon(small)
            await turns(20)
            async with await rt.sequence([2] * 30) as seq:
                assert len(await seq.topk(1)) == 1
            done.set()


async def test_small_requests_are_served_though_large_ones_keep_coming() -> None:
    done = anyio.Event()
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt, anyio.create_task_group() as group:

            async def large() -> None:
                while not done.is_set():
                    async with await rt.sequence([1] * 30) as seq:
                        await seq.topk(1)

            for _ in range(6):
                group.start_soon(large)
            await turns(20)
            for _ in range(5):
                async with await rt.sequence([2] * 4) as seq:
                    assert len(await seq.topk(1)) == 1
            done.set()


# Readers that stop


async def test_a_generation_that_nobody_reads_keeps_its_blocks_from_those_that_came_later_until_their_deadline() -> (
    None
):
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=0.02) as rt, await rt.sequence([7] * 29) as stalled:
            generation = stalled.generate(SamplingParams(max_tokens=3))
            await take(generation, 1)
            with pytest.raises(PoolExhausted):
                await rt.sequence(PROMPT)
            assert await take(generation, 2) == Double.greedy([7] * 29, 3)[1:]


async def test_a_generation_that_nobody_reads_gives_way_to_what_is_more_urgent_and_can_be_read_on() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, patience=LONG) as rt, await rt.sequence([7] * 20) as stalled:
            generation = stalled.generate(SamplingParams(max_tokens=10))
            await take(generation, 1)
            async with await rt.sequence([1] * 32, priority=5) as urgent:
                assert len(await urgent.topk(1)) == 1
            assert await take(generation, 9) == Double.greedy([7] * 20, 10)[1:]


async def test_a_generation_that_failed_holds_nothing_back_from_others() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=4, patience=0.02) as rt:
            first, failing = await rt.sequence([7] * 17, priority=100), await rt.sequence([1] * 8)
            keeper = first.generate(SamplingParams(max_tokens=3))
            await take(keeper, 1)
            generation = failing.generate(SamplingParams(max_tokens=20))
            with pytest.raises(PoolExhausted):
                async for _ in generation:
                    pass
            assert failing.tokens[8:] == Double.greedy([1] * 8, len(failing) - 8)
            async with await rt.sequence([2] * 8, deadline=LONG) as late:
                assert len(await late.topk(1)) == 1
            assert len(failing) > 8 and generation is not None


# Forks and beams


async def test_a_running_parent_goes_on_in_a_full_pool_at_the_cost_of_its_idle_children() -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=2, patience=LONG) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=20))
            await take(generation, 3)
            kids = await seq.fork(3)
            async with await rt.sequence([7] * 4 * ledger(rt).available, priority=1):
                assert await take(generation, 1) == AHEAD[3:4]
            assert await take(generation, 16) == AHEAD[4:20]
            for kid in kids:
                assert await take(kid.generate(), 2) == AHEAD[3:5]
                await kid.close()


async def test_beam_searches_in_a_pool_that_holds_one_find_what_each_finds_alone() -> None:
    params = BeamSearchParams(width=3, max_tokens=6)
    prompts = [PROMPT, PROMPT[::-1], [1, 2, 3]]
    with anyio.fail_after(30):
        async with runtime(blocks=200) as rt:
            alone = [[beam.tokens for beam in await rt.beam_search(prompt, params)] for prompt in prompts]
        async with runtime(blocks=9, patience=LONG, prefix_cache=True) as rt, anyio.create_task_group() as group:
            for prompt, expected in zip(prompts, alone, strict=True):

                async def run(prompt: list[int] = prompt, expected: list[list[int]] = expected) -> None:
                    assert [beam.tokens for beam in await rt.beam_search(prompt, params)] == expected

                group.start_soon(run)
        assert rt.stats().preemptions > 0


# Ends while it gives way


@pytest.mark.parametrize("slow", [0, 5])
@pytest.mark.parametrize("ends", ["aclose", "close"])
async def test_it_ends_promptly_at_whichever_turn_while_it_gives_way_for_good(ends: str, slow: int) -> None:
    with anyio.fail_after(50):
        for count in range(0, 36, 2):
            async with runtime(blocks=8, lease=4, patience=LONG, prefix_cache=True, inline=True) as rt:
                slow_allocator(rt, slow)
                seq = await rt.sequence(PROMPT)
                generation = seq.generate(SamplingParams(max_tokens=20))
                await take(generation, 5)
                async with anyio.create_task_group() as group:
                    group.start_soon(
                        rt.sequence,
                        [7] * 32,
                    )
                    hog = await rt.sequence(priority=100)
                    group.start_soon(hog.append, [7] * 32)
                    await turns(count // 3)
                    group.start_soon(take_what_comes, generation)
                    await turns(count)
                    with anyio.fail_after(5):
                        await (generation.aclose() if ends == "aclose" else seq.close())
                    assert seq.tokens[len(PROMPT) :] == AHEAD[: len(seq) - len(PROMPT)]
                    await settled(rt, lambda hog=hog: len(hog) == 32)
                    sound(rt)
                    group.cancel_scope.cancel()


async def take_what_comes(generation: Any) -> None:
    try:
        async for _ in generation:
            pass
    except Exception as error:
        assert type(error).__name__ == "SequenceClosed"


@pytest.mark.parametrize("ends", ["aclose", "close"])
async def test_its_end_does_not_wait_behind_a_resumption_that_waits_for_blocks(ends: str) -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=8, lease=4, patience=LONG) as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate(SamplingParams(max_tokens=20))
            await take(generation, 5)
            hog = await rt.sequence([7] * 29, priority=100)
            keeper = hog.generate(SamplingParams(max_tokens=3))
            await take(keeper, 1)
            await settled(rt, lambda: rt.stats().waiting == 1)
            seq._actor.post(Resume())
            await (generation.aclose() if ends == "aclose" else seq.close())
            assert seq.tokens == PROMPT + AHEAD[:5] or ends == "close"
            assert rt.stats().waiting == 0
            await seq.close()
