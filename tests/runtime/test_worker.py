"""The worker: what wakes together is batched together, prompts and decodes share steps, lanes are shared."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from pagefork.runtime import Runtime, SamplingParams, Sequence, WorkerDied, worker
from pagefork.runtime.engine import EngineThread, StepPlan, StepResult
from pagefork.runtime.messages import Extend, StepDone, Submit
from pagefork.runtime.stream import Stream
from pagefork.runtime.worker import Worker

from .double import VOCAB, Double, free, runtime, take

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


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seconds", [1.0, 0.0003])
async def test_steps_carry_plain_arrays_of_the_stated_kinds(depth: int, seconds: float) -> None:
    double = Double(depth=depth, seconds=seconds)
    with anyio.fail_after(20):
        async with runtime(double, chunk=4, inline=True) as rt:
            await generate_all(rt, [[1] * 9, [2]], 4)
    for plan in double.plans:
        arrays = (plan.tokens, plan.positions, plan.slots, plan.feed, plan.tables, plan.lengths, plan.copies, plan.rows)
        assert all(isinstance(array, np.ndarray) and array.dtype == np.int32 for array in arrays)
        assert len(plan.tokens) == len(plan.positions) == len(plan.slots[0])
        assert len(plan.lengths) == len(plan.tables[0])
        assert len(plan.feed) in (0, len(plan.lengths))
        assert len(plan.rows) == len(plan.sampling.keys)
    assert any(len(plan.feed) for plan in double.plans) == (depth == 2 or seconds < 1)


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
                assert len(double._flights) == depth
                double.release()
                assert await take(generation, 8) == Double.greedy([1, 2], 9)[1:]


class Bench:
    """A worker whose task is run turn by turn, and in place of its engine the steps that it asked for."""

    def __init__(self, depth: int = 1) -> None:
        self.steps: list[tuple[list[StepPlan], int]] = []
        self.worker = Worker(self, lambda message: None, block_size=4, max_batch=8, chunk=8, depth=depth)  # type: ignore[arg-type]

    def step(self, plans: list[StepPlan], collect: int) -> None:
        self.steps.append((plans, collect))

    async def submit(self, owner: int, limit: int) -> Stream:
        """A greedy job of one given token with blocks for 16."""
        stream = Stream()
        table = [owner * 4 + index for index in range(4)]
        job = Submit(owner=owner, tokens=[1], tables=[table], limit=limit, end=16, params=SamplingParams())
        await self.worker.submit(job, stream)
        return stream

    def done(self, *ids: int) -> None:
        """A long step is done, and these are the ids of its rows."""
        self.land([ids], seconds=1.0)

    def land(self, steps: list[tuple[int, ...]], seconds: float) -> None:
        results = [StepResult(np.array(ids, np.int32), np.zeros(len(ids), np.float32)) for ids in steps]
        self.worker.post(StepDone(results, seconds))


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_step_is_one_command_and_a_pipeline_is_filled_by_one(depth: int) -> None:
    bench = Bench(depth)
    with anyio.fail_after(10):
        await bench.submit(1, limit=16)
        for _ in range(4):
            await bench.worker.turn()
            bench.done(3)
    assert [(len(plans), collect) for plans, collect in bench.steps] == [(depth, 1)] + [(1, 1)] * 3


@pytest.mark.parametrize("depth", [1, 2])
async def test_steps_that_are_short_are_planned_several_at_a_time_as_long_as_they_are(depth: int) -> None:
    bench = Bench(depth)
    with anyio.fail_after(10):
        stream = await bench.submit(1, limit=16)
        await bench.worker.turn()
        bench.land([(1,)], seconds=0.0003)
        await bench.worker.turn()
        bench.land([(2,), (3,)], seconds=0.0003)
        await bench.worker.turn()
        assert len(bench.steps) == 2, "one of those asked for is not here yet"
        bench.land([(4,)], seconds=0.002)
        await bench.worker.turn()
    assert [(len(plans), collect) for plans, collect in bench.steps] == [(depth, 1), (3, 3), (1, 1)]
    assert list(stream.tokens) == [1, 2, 3, 4]
    positions = [int(plan.positions[0]) for plans, _ in bench.steps for plan in plans]
    assert positions == list(range(len(positions)))


async def test_no_run_of_steps_goes_beyond_a_lease_or_the_longest_run() -> None:
    bench = Bench()
    with anyio.fail_after(10):
        await bench.submit(1, limit=12)
        await bench.submit(2, limit=11)
        await bench.worker.turn()
        bench.land([(1, 1)], seconds=0.0)
        await bench.worker.turn()
        bench.land([(1, 1)] * 8, seconds=0.0)
        await bench.worker.turn()
    assert [(len(plans), collect) for plans, collect in bench.steps[1:]] == [(8, 8), (3, 3)]
    assert [len(plan.tokens) for plan in bench.steps[2][0]] == [2, 2, 1], "one lease is at its end, then both are"


@pytest.mark.parametrize("depth", [1, 2])
async def test_no_run_of_steps_is_planned_with_a_step_of_given_tokens_or_behind_it(depth: int) -> None:
    """How long that takes, and those after it, nobody knows yet."""
    bench = Bench(depth)
    with anyio.fail_after(10):
        await bench.submit(1, limit=16)
        await bench.worker.turn()
        bench.land([(1,)], seconds=0.0)
        await bench.submit(2, limit=16)
        for rows in range(depth):
            await bench.worker.turn()
            bench.land([(1, 1)[: rows + 3 - depth]], seconds=0.0)
        assert [len(plans) for plans, _ in bench.steps] == [depth, *[1] * depth]
        await bench.worker.turn()
        assert len(bench.steps[-1][0]) == 8


async def test_a_run_of_steps_gives_no_more_tokens_than_the_event_loop_should_take_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "RUN_TOKENS", 7)
    bench = Bench()
    with anyio.fail_after(10):
        for owner in (1, 2):
            await bench.submit(owner, limit=16)
        await bench.worker.turn()
        bench.land([(1, 1)], seconds=0.0)
        await bench.worker.turn()
    assert [(len(plans), collect) for plans, collect in bench.steps] == [(1, 1), (3, 3)]


async def test_a_lane_that_only_an_older_step_sampled_for_waits_for_that_step() -> None:
    """Its token is neither here nor among the ids of the newest step."""
    bench = Bench()
    with anyio.fail_after(10):
        streams = [await bench.submit(1, limit=16), await bench.submit(2, limit=3)]
        await bench.worker.turn()
        bench.land([(10, 20)], seconds=0.0003)
        await bench.worker.turn()
        assert [plan.positions.tolist() for plan in bench.steps[1][0]] == [[1, 1], [2, 2], [3]]
        bench.worker.post(Extend(owner=2, first=0, ids=[[8, 9, 10, 11]], limit=16))
        bench.land([(11, 21)], seconds=0.0003)
        await bench.worker.turn()
        bench.land([(12, 22), (13,)], seconds=1.0)
        await bench.worker.turn()
    last = bench.steps[-1][0][0]
    assert last.tokens.tolist() == [13, 22] and last.positions.tolist() == [4, 3] and not len(last.feed)
    assert [list(stream.tokens) for stream in streams] == [[10, 11, 12, 13], [20, 21, 22]]


class Counting:
    """An engine whose steps take `seconds` of its own clock; how many were on the device at once, and when."""

    def __init__(self, depth: int, seconds: float) -> None:
        self.facts = Double(depth=depth).facts
        self.seconds, self.now = seconds, 0.0
        self.flying = self.launched = 0
        self.most = 0

    def launch(self, plan: Any) -> None:
        self.flying += 1
        self.most = max(self.most, self.flying)

    def collect(self) -> Any:
        self.flying -= 1
        self.launched += 1
        self.now += self.seconds
        return self.launched


@pytest.mark.parametrize("depth", [1, 2])
def test_results_are_posted_together_where_steps_are_short_and_no_token_waits_long(depth: int) -> None:
    def posted(seconds: float) -> list[list[int]]:
        engine, out = Counting(depth, seconds), list[Any]()
        thread = EngineThread(lambda: engine, out.append)  # type: ignore[arg-type, return-value]
        thread.clock = lambda: engine.now  # type: ignore[method-assign]
        plans: Any = [None] * (depth + 4)
        thread._run_steps(engine, plans[:depth], 1)  # type: ignore[arg-type]
        thread._run_steps(engine, plans[depth:], 4)  # type: ignore[arg-type]
        assert engine.most == depth and engine.flying == depth - 1
        assert all(done.seconds == pytest.approx(seconds) for done in out)
        return [done.results for done in out]

    assert posted(0.0002) == [[1], [2, 3, 4, 5]]
    assert posted(0.0006) == [[1], [2, 3], [4, 5]]
    assert posted(0.02) == [[1], [2], [3], [4], [5]]


def test_a_step_that_was_done_before_it_was_asked_for_counts_as_long_as_that_took() -> None:
    """An event loop that is late must not make long steps look short: many of them would be planned at once."""
    engine, out = Counting(depth=2, seconds=0.0), list[Any]()
    thread = EngineThread(lambda: engine, out.append)  # type: ignore[arg-type, return-value]
    thread.clock = lambda: engine.now  # type: ignore[method-assign]
    plans: Any = [None] * 3
    thread._run_steps(engine, plans[:2], 1)  # type: ignore[arg-type]
    engine.now += 0.5
    thread._run_steps(engine, plans[2:], 1)  # type: ignore[arg-type]
    assert [done.seconds for done in out] == [0.0, 0.5]


async def test_tokens_go_out_as_their_step_comes_in_and_the_next_is_planned_in_the_turn_after_it() -> None:
    bench = Bench()
    with anyio.fail_after(10):
        streams = [await bench.submit(owner, limit=16) for owner in (1, 2)]
        await bench.worker.turn()
        bench.done(5, 6)
        assert [list(stream.tokens) for stream in streams] == [[5], [6]] and len(bench.steps) == 1
        await bench.worker.turn()
        assert bench.steps[1][0][0].tokens.tolist() == [5, 6]


async def test_a_lease_is_extended_though_the_job_is_still_in_the_mailbox() -> None:
    """Served before the Submit, it would be for nobody, and the job stand still at the end of its first lease."""
    bench = Bench()
    with anyio.fail_after(10):
        stream = await bench.submit(1, limit=1)
        bench.worker.post(Extend(owner=1, first=0, ids=[[4, 5, 6, 7]], limit=3))
        for token in (7, 8, 9):
            await bench.worker.turn()
            bench.done(token)
    assert list(stream.tokens) == [7, 8, 9]


async def test_a_lease_extended_during_a_step_counts_in_the_step_after_it() -> None:
    bench = Bench()
    with anyio.fail_after(10):
        stream = await bench.submit(1, limit=1)
        await bench.worker.turn()
        bench.worker.post(Extend(owner=1, first=0, ids=[[4, 5, 6, 7]], limit=2))
        bench.done(7)
        await bench.worker.turn()
        bench.worker.post(Extend(owner=1, first=0, ids=[[4, 5, 6, 7]], limit=3))
        bench.done(8)
        await bench.worker.turn()
        bench.done(9)
        await bench.worker.turn()
        assert len(bench.steps) == 3, "the lease is at its end"
        bench.worker.post(Extend(owner=1, first=0, ids=[[4, 5, 6, 7]], limit=4))
        await bench.worker.turn()
    assert list(stream.tokens) == [7, 8, 9] and len(bench.steps) == 4


@pytest.mark.parametrize("inline", [False, True])
async def test_a_result_that_cannot_be_handed_out_fails_every_reader(inline: bool) -> None:
    class Torn(Double):
        def collect(self) -> StepResult:
            result = super().collect()
            return StepResult(result.ids, result.logprobs[:-1])

    with anyio.fail_after(20):
        async with runtime(Torn(), inline=inline) as rt:
            for prompt in ([1], [VOCAB - 1]):
                with pytest.raises(WorkerDied):
                    await take((await rt.sequence(prompt)).generate(), 1)


async def test_a_reader_that_takes_nothing_holds_nobody_up() -> None:
    double = Double()
    with anyio.fail_after(20):
        async with runtime(double, blocks=256, lease=8) as rt:
            slow, quick = await rt.sequence([1]), await rt.sequence([2])
            idle = slow.generate()
            first = await take(idle, 1)
            assert await take(quick.generate(), 100) == Double.greedy([2], 100)
            assert first + await take(idle, 20) == Double.greedy([1], 21)
