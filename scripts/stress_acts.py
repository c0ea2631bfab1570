"""The operations of the stress test. What they leave in the family and its shadows must be right however they end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import toy_model
from schedule import Op
from stress_family import Family, Held
from stress_faults import fuse, passes

from pagefork.runtime import BeamSearchParams, PoolExhausted, SamplingParams, SequenceClosed

GENERATES = ("generate", "sample", "topk", "fork_running", "close_running", "beams", "crash")


class Acts:
    def __init__(self, family: Family) -> None:
        self._family = family
        self._report = family.report
        self._oracle = family.oracle
        self._rt = family.rt

    async def perform(self, op: Op, held: Held | None) -> None:
        """Do it with a sequence, or where there is none open one."""
        if held is None:
            await self._open(op)
        else:
            await getattr(self, f"_{self._possible(op.kind, held)}")(op, held)

    def _possible(self, kind: str, held: Held) -> str:
        """What is done instead where an operation makes no sense."""
        kind = self._oracle.possible(kind)
        if kind in ("append", "race", *GENERATES) and len(held.shadow) >= self._oracle.longest:
            return "truncate"
        if kind in GENERATES and not held.shadow:
            return "append"
        return kind

    def _params(self, op: Op, held: Held, *, temperature: float = 0.0, stop: bool = False) -> SamplingParams:
        return SamplingParams(
            seed=op.seed,
            max_tokens=min(op.count, self._oracle.longest - len(held.shadow)),
            temperature=temperature,
            stop_tokens=op.tokens[:1] if stop else (),
            ignore_eos=True,
        )

    async def _open(self, op: Op, _: Held | None = None) -> None:
        prompt = self._oracle.prompt(op)
        self._family.add(await self._rt.sequence(prompt, priority=op.priority, deadline=op.deadline), prompt)

    async def _append(self, op: Op, held: Held) -> None:
        tokens = self._oracle.more(held.shadow, op)
        with self._family.either(held, [*held.shadow, *tokens]):
            await held.seq.append(tokens, deadline=op.deadline)

    async def _truncate(self, op: Op, held: Held) -> None:
        shortest = self._oracle.shortest
        await self._family.shorten(held, shortest + int(op.fraction * (len(held.shadow) - shortest + 1)))

    async def _close(self, op: Op, held: Held) -> None:
        self._family.forget(held)
        await held.seq.close()

    async def _topk(self, op: Op, held: Held) -> None:
        self._family.check_top(held, await held.seq.topk(op.count))

    async def _fork(self, op: Op, held: Held) -> None:
        count = 1 + op.count % 3
        kids = await held.seq.fork(count)
        self._report.forks += count
        for kid in kids:
            self._family.add(kid, held.shadow)

    async def _generate(self, op: Op, held: Held) -> None:
        """Greedy; half of the readers leave early."""
        params = self._params(op, held, stop=True)
        generation = held.seq.generate(params, deadline=op.deadline)
        await self._family.read(held, generation, params, _length(op, params))

    async def _sample(self, op: Op, held: Held) -> None:
        params = self._params(op, held, temperature=1.0)
        generation = held.seq.generate(params, deadline=op.deadline)
        await self._family.read(held, generation, params, _length(op, params))

    async def _fork_running(self, op: Op, held: Held) -> None:
        """Fork in the middle of a generation, which goes on: it may have got ahead of its reader."""
        params = self._params(op, held)
        generation = held.seq.generate(params, deadline=op.deadline)
        read = await self._family.read(held, generation, params, int(op.fraction * params.max_tokens))
        await passes(op.seed % 16)
        await self._fork(op, held)
        await self._family.read(held, generation, params, params.max_tokens, read)

    async def _close_running(self, op: Op, held: Held) -> None:
        """Close under a reader: it finds SequenceClosed, or had finished."""
        params = self._params(op, held)

        async def read() -> None:
            with suppress(PoolExhausted, SequenceClosed):
                generation = held.seq.generate(params, deadline=op.deadline)
                await self._family.read(held, generation, params, params.max_tokens)

        self._family.forget(held)
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            try:
                await passes(int(op.fraction * 40))
            finally:
                await held.seq.close()

    async def _race(self, op: Op, held: Held) -> None:
        """Two appends and a fork at once: they take effect one after another, in some order."""
        halves = op.tokens[: len(op.tokens) // 2], op.tokens[len(op.tokens) // 2 :]
        before = list(held.shadow)
        states = [
            before + list(itertools.chain(*order)) for n in range(3) for order in itertools.permutations(halves, n)
        ]
        full: list[PoolExhausted] = []

        async def attempt(act: Callable[[], Awaitable[None]]) -> None:
            try:
                await act()
            except PoolExhausted as error:
                full.append(error)

        async def fork() -> None:
            for kid in await held.seq.fork():
                self._report.forks += 1
                self._family.add(kid, self._family.among(kid, states))

        appends = [partial(held.seq.append, half, deadline=op.deadline) for half in halves]
        try:
            async with anyio.create_task_group() as group:
                for act in (appends[0], fork, appends[1]):
                    group.start_soon(attempt, act)
        except BaseException:
            held.shadow = self._family.among(held.seq, states)
            raise
        held.shadow = self._family.among(held.seq, states if full else states[-2:])
        if full:
            raise full[0]

    async def _beams(self, op: Op, held: Held) -> None:
        """Beams are different, in order, and as likely as their tokens."""
        params = BeamSearchParams(width=2 + op.count % 3, max_tokens=1 + op.seed % 5, ignore_eos=True)
        beams = await self._rt.beam_search(held.shadow, params)
        self._report.beams += 1
        scores = [beam.score for beam in beams]
        if len({tuple(beam.tokens) for beam in beams}) < params.width or scores != sorted(scores, reverse=True):
            self._family.wrong(held, f"beams {beams}")
        for beam in beams:
            logprob, tokens = 0.0, list(held.shadow)
            for token in beam.tokens:
                logprobs = self._oracle.logprobs(tokens)
                logprob += beam.logprob / len(beam.tokens) if logprobs is None else logprobs[token]
                tokens.append(token)
            if not math.isclose(beam.logprob, logprob, abs_tol=toy_model.TOLERANCE * len(beam.tokens)):
                self._family.wrong(held, f"{beam}, which has log-probability {logprob}")

    async def _crash(self, op: Op, held: Held) -> None:
        """A defect in the sequence closes it, whatever it was doing, and nobody else comes to harm."""
        self._family.forget(held)
        fuse(held.seq, op.seed % 8)
        try:
            with suppress(PoolExhausted):
                await self._something(op, held)
            for _ in range(16):
                with suppress(PoolExhausted):
                    await held.seq.topk(1)
            self._family.wrong(held, "outlived its fuse")
        except SequenceClosed:
            self._report.crashes += 1
        finally:
            await held.seq.close()

    async def _something(self, op: Op, held: Held) -> None:
        if op.count % 3 == 0:
            await held.seq.append(self._oracle.more(held.shadow, op), deadline=op.deadline)
        elif op.count % 3 == 1:
            await self._fork(op, held)
        else:
            await self._generate(op, held)


def _length(op: Op, params: SamplingParams) -> int:
    """How many tokens a reader takes; half of them leave early."""
    return params.max_tokens if op.seed % 2 else 1 + int(op.fraction * (params.max_tokens - 1))
