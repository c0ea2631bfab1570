"""Families of sequences in a pool too small for them: shared prefixes, cancellations, steps that retire late."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.runtime import ContextOverflow, PoolExhausted, Runtime, Sequence

from .double import Double, free, ledger, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
BLOCKS = 12
ACTIONS = ["append", "take", "take", "take", "fork", "truncate", "topk", "close", "leave", "open"]


class Member:
    """One sequence, what it should hold, and its task's own dice."""

    def __init__(self, seq: Sequence, said: list[int]) -> None:
        self.seq, self.said = seq, said
        self.generation: Any = None


class Family:
    """Tasks act on their own members, all at once; an act may be cancelled, and the member says what it holds then."""

    def __init__(self, rt: Runtime, seed: int) -> None:
        self.rt, self.seed = rt, seed
        self.live = 0

    async def live_through(self, number: int, actions: list[tuple[str, int]]) -> None:
        rng = random.Random(self.seed * 100 + number)
        members: list[Member] = []
        for action, choice in actions:
            if not members:
                action = "open"
            member = rng.choice(members) if members else None
            before = None if member is None else (member.said[:], member.generation)
            async with anyio.create_task_group() as group:
                if rng.random() < 0.25:
                    group.start_soon(self._cancel, rng.randrange(25), group.cancel_scope)
                with contextlib.suppress(PoolExhausted, ContextOverflow):
                    await self._act(members, member, action, choice)
                group.cancel_scope.cancel()
            if member is not None and before is not None and member in members:
                self._reconcile(member, before[0], choice)
            ledger(self.rt).check()
            self.rt._house.allocator.arbiter.check()
        for member in members:
            await member.seq.close()

    async def _cancel(self, turns: int, scope: anyio.CancelScope) -> None:
        for _ in range(turns):
            await checkpoint()
        scope.cancel()

    async def _act(self, members: list[Member], member: Member | None, action: str, choice: int) -> None:
        if action == "open" or member is None:
            if len(members) < 3:
                prompt = PROMPT[: 1 + choice % 10]
                members.append(Member(await self.rt.sequence(prompt, priority=choice % 2 / 1000), prompt[:]))
            return
        seq, said = member.seq, member.said
        match action:
            case "append":
                member.generation = None
                await seq.append([choice % 32] * (choice % 6))
            case "take" if said:
                if member.generation is None:
                    member.generation = seq.generate()
                await take(member.generation, 1 + choice % 7)
            case "fork" if len(members) < 4:
                members += [Member(child, child.tokens) for child in await seq.fork(1)]
            case "truncate":
                member.generation = None
                await seq.truncate(min(choice % (len(said) + 1), len(said)))
            case "topk" if said:
                member.generation = None
                assert (await seq.topk(1))[0][0] == Double.greedy(said, 1)[0]
            case "leave" if member.generation is not None:
                generation, member.generation = member.generation, None
                await generation.aclose()
            case "close":
                members.remove(member)
                await seq.close()

    def _reconcile(self, member: Member, before: list[int], choice: int) -> None:
        """What it holds now is what it held, or that with the action's effect, or with tokens that were to be."""
        now = member.seq.tokens
        more = now[len(before) :]
        appended, generated = [choice % 32] * (choice % 6), Double.greedy(before, len(more))
        assert now == before[: len(now)] or (now[: len(before)] == before and more in (appended, generated))
        member.said = now


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scripts=st.lists(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)), max_size=14), max_size=4),
    lease=st.integers(1, 9),
    chunk=st.integers(1, 9),
    prefix=st.booleans(),
    seconds=st.sampled_from([1.0, 0.0003]),
)
async def test_families_in_a_small_pool_hold_what_they_were_told(
    seed: int, scripts: list[list[tuple[str, int]]], lease: int, chunk: int, prefix: bool, seconds: float, depth: int
) -> None:
    with anyio.fail_after(60):
        async with runtime(
            Double(depth=depth, seconds=seconds),
            blocks=BLOCKS,
            lease=lease,
            chunk=chunk,
            patience=0.05,
            prefix_cache=prefix,
            inline=True,
        ) as rt:
            family = Family(rt, seed)
            async with anyio.create_task_group() as group:
                for number, actions in enumerate(scripts):
                    group.start_soon(family.live_through, number, actions)
            await free(rt, BLOCKS)


@pytest.mark.parametrize("depth", [1, 2])
async def test_steps_that_retire_late_and_out_of_phase_with_frees_read_and_write_what_is_theirs(depth: int) -> None:
    """The double checks at launch and at retirement that all that a step names is held, and writable where written."""
    with anyio.fail_after(60):
        for seed in range(6):
            rng, double, done = random.Random(seed), Double(depth=depth), anyio.Event()
            actions = [[(rng.choice(ACTIONS), rng.randrange(100)) for _ in range(14)] for _ in range(4)]
            async with runtime(double, blocks=BLOCKS, lease=6, patience=0.1, prefix_cache=True) as rt:

                async def hold(double: Double = double, rng: random.Random = rng, done: anyio.Event = done) -> None:
                    while not done.is_set():
                        double.hold()
                        for _ in range(rng.randrange(60)):
                            await checkpoint()
                        double.release()
                        for _ in range(rng.randrange(20)):
                            await checkpoint()

                async with anyio.create_task_group() as outer:
                    outer.start_soon(hold)
                    async with anyio.create_task_group() as group:
                        for number, script in enumerate(actions):
                            group.start_soon(Family(rt, seed).live_through, number, script)
                    done.set()
                await free(rt, BLOCKS)


async def test_blocks_of_a_step_in_flight_are_granted_to_nobody_before_it_has_retired() -> None:
    double = Double(depth=2)
    with anyio.fail_after(20):
        async with runtime(double, blocks=8, lease=4, patience=1000.0, prefix_cache=True) as rt:
            seq = await rt.sequence(PROMPT)
            generation = seq.generate()
            double.hold()
            async with anyio.create_task_group() as group:
                group.start_soon(anext, generation)
                await double.held()
                other = await rt.sequence(priority=100)
                group.start_soon(other.append, [7] * 32)
                for _ in range(200):
                    await checkpoint()
                assert len(other) == 0 and ledger(rt).available < 8
                double.release()
            assert len(other) == 32
            await other.close()
            await seq.close()


async def test_a_copy_reads_its_source_though_every_holder_of_it_is_gone() -> None:
    double = Double(depth=2)
    with anyio.fail_after(20):
        async with runtime(double, blocks=8, patience=1000.0) as rt:
            seq = await rt.sequence(PROMPT)
            await seq.topk(1)
            (child,) = await seq.fork()
            double.hold()
            async with anyio.create_task_group() as group:
                group.start_soon(child.append, [1])
                group.start_soon(child.topk, 1)
                await double.held()
                source = int(ledger(rt).table(seq._actor.owner).ids[-1])
                group.start_soon(seq.close)
                for _ in range(100):
                    await checkpoint()
                assert ledger(rt).pool.refcounts[source] == 1, "pinned by the copy alone"
                double.release()
            await child.topk(1)
            assert ledger(rt).pool.refcounts[source] == 0
            assert (await child.topk(1))[0][0] == Double.greedy(child.tokens, 1)[0]
            await child.close()
