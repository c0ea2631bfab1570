"""Forks share every block, diverge by at most one partial block, and never disturb each other."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.runtime import SamplingParams, Sequence

from .double import Double, free, ledger, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
AHEAD = Double.greedy(PROMPT, 64)


async def test_a_fork_copies_nothing_and_takes_no_block() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            await seq.topk(1)
            used = ledger(rt).pool.num_used
            kids = await seq.fork(5)
            assert all(kid.tokens == PROMPT for kid in kids)
            assert (ledger(rt).pool.num_used, ledger(rt).copied_rows) == (used, 0)
            assert rt.stats().forks == 5 and rt.stats().sequences == 6


async def test_what_is_pending_is_computed_once_for_all_children() -> None:
    with anyio.fail_after(20):
        async with runtime(chunk=4) as rt, await rt.sequence(PROMPT) as seq:
            kids = await seq.fork(3)
            before = rt.stats().prompt_tokens
            for kid in kids:
                assert (await kid.topk(1))[0][0] == AHEAD[0]
            assert before == len(PROMPT) - 1 - 1 and rt.stats().prompt_tokens == before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("taken", range(1, 9))
async def test_the_generation_of_a_forked_sequence_goes_on_unchanged(taken: int, depth: int) -> None:
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth)) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=24))
            await take(generation, taken)
            copied = ledger(rt).copied_rows
            kids = await seq.fork(2)
            assert all(kid.tokens == PROMPT + AHEAD[:taken] for kid in kids)
            for kid in kids:
                said = kid.tokens
                assert await take(kid.generate(), 4) == Double.greedy(said, 4)
            rest = [step.token async for step in generation]
            assert rest == AHEAD[taken:24]
            assert ledger(rt).copied_rows - copied <= 3 * 3, "each of three holders copies at most a partial block"


async def test_children_that_diverge_copy_at_most_one_partial_block_each() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            await seq.topk(1)
            kids = await seq.fork(4)
            for count, kid in enumerate(kids, start=1):
                await kid.append([20 + count, 1, 2, 3, 4])
                await kid.topk(1)
                assert ledger(rt).copies <= count and ledger(rt).copied_rows <= 2 * count
            assert await take(seq.generate(), 5) == AHEAD[:5]


async def test_forks_of_a_finished_but_unread_generation_end_where_the_reader_is() -> None:
    double = Double(depth=2)
    with anyio.fail_after(20):
        async with runtime(double, lease=16) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=6))
            await take(generation, 2)
            while not seq._actor._work.stream.done:
                await checkpoint()
            (child,) = await seq.fork()
            assert child.tokens == PROMPT + AHEAD[:2]
            assert await take(child.generate(), 3) == AHEAD[2:5]
            assert await take(generation, 4) == AHEAD[2:6]


@pytest.mark.parametrize("depth", [1, 2])
async def test_what_a_parent_computed_past_its_reader_is_not_its_childrens(depth: int) -> None:
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth), lease=16) as rt, await rt.sequence(PROMPT) as seq:
            generation = seq.generate(SamplingParams(max_tokens=30))
            await take(generation, 2)
            while len(seq._actor._work.stream.tokens) < 9:
                await checkpoint()
            (child,) = await seq.fork()
            await child.append([7] * 6)
            assert child.tokens == PROMPT + AHEAD[:2] + [7] * 6
            assert (await child.topk(1))[0][0] == Double.greedy(child.tokens, 1)[0]
            assert await take(generation, 28) == AHEAD[2:30]


async def test_a_parent_closed_leaves_its_children_whole() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            seq = await rt.sequence(PROMPT)
            first, second = await seq.fork(2)
            await seq.close()
            assert await take(first.generate(), 3) == AHEAD[:3]
            await first.close()
            assert await take(second.generate(), 3) == AHEAD[:3]
            await second.close()
            await free(rt, 64)


async def test_an_empty_sequence_can_be_forked() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence() as seq:
            (child,) = await seq.fork()
            await child.append(PROMPT)
            assert await take(child.generate(), 2) == AHEAD[:2] and seq.tokens == []


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch_and_forks_differ() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    with anyio.fail_after(20):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            alone = await take(seq.generate(params), 12)
            crowd = [await rt.sequence([n, n]) for n in range(5)]
            again = await rt.sequence(PROMPT)
            kids = await again.fork(3)
            got: dict[int, list[int]] = {}

            async def read(index: int, sequence: Sequence) -> None:
                got[index] = await take(sequence.generate(params), 12)

            async with anyio.create_task_group() as group:
                for index, sequence in enumerate([again, *kids, *crowd]):
                    group.start_soon(read, index, sequence)
            assert got[0] == alone
            assert len({tuple(got[index]) for index in range(4)}) == 4
            await seq.truncate(len(PROMPT))
            other = SamplingParams(max_tokens=12, temperature=1.0, seed=6)
            assert await take(seq.generate(other), 12) != alone


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["append", "take", "fork", "truncate", "topk", "close", "leave"]), st.integers(0, 99)),
    max_size=25,
)


class Family:
    """Live sequences with the tokens that each should hold and the generation that it runs."""

    def __init__(self, root: Sequence) -> None:
        self.members = [(root, PROMPT[:])]
        self.generations: dict[int, object] = {}

    async def act(self, action: str, number: int) -> None:
        if not self.members:
            return
        index = number % len(self.members)
        seq, said = self.members[index]
        match action:
            case "append":
                self.generations.pop(id(seq), None)
                await seq.append([number % 32] * (number % 6))
                said += [number % 32] * (number % 6)
            case "take" if said:
                generation = self.generations.setdefault(id(seq), seq.generate())
                expected = Double.greedy(said, 1 + number % 5)
                assert await take(generation, 1 + number % 5) == expected
                said += expected
            case "fork" if len(self.members) < 8:
                self.members += [(child, said[:]) for child in await seq.fork(1 + number % 2)]
            case "truncate":
                self.generations.pop(id(seq), None)
                del said[number % (len(said) + 1) :]
                await seq.truncate(len(said))
            case "topk" if said:
                self.generations.pop(id(seq), None)
                assert (await seq.topk(1))[0][0] == Double.greedy(said, 1)[0]
            case "leave" if (generation := self.generations.pop(id(seq), None)) is not None:
                await generation.aclose()
            case "close":
                self.generations.pop(id(seq), None)
                self.members.pop(index)
                await seq.close()


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=20, deadline=None)
@given(actions=ACTIONS, lease=st.integers(1, 9), chunk=st.integers(1, 9), seconds=st.sampled_from([1.0, 0.0003]))
async def test_families_of_sequences_hold_what_they_were_told(
    actions: list[tuple[str, int]], lease: int, chunk: int, seconds: float, depth: int
) -> None:
    with anyio.fail_after(30):
        double = Double(depth=depth, seconds=seconds)
        async with runtime(double, blocks=512, lease=lease, chunk=chunk, inline=True) as rt:
            family = Family(await rt.sequence(PROMPT))
            for action, number in actions:
                await family.act(action, number)
                ledger(rt).check()
                assert [seq.tokens for seq, _ in family.members] == [said for _, said in family.members]
