"""One actor per sequence: its mailbox, and what callers ask of it."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import anyio
import numpy as np

from pagefork.runtime.actor import Actor, Envelope
from pagefork.runtime.errors import (
    ContextOverflow,
    InvalidRequest,
    PageforkError,
    SequenceBusy,
    SequenceClosed,
    WorkerDied,
)
from pagefork.runtime.holdings import Tokens
from pagefork.runtime.house import House
from pagefork.runtime.log import log
from pagefork.runtime.messages import (
    Append,
    Close,
    Fork,
    Generate,
    Message,
    Preempt,
    ReadKV,
    Release,
    Renew,
    Resume,
    SamplingParams,
    Settle,
    Share,
    Submit,
    TopK,
    Truncate,
)
from pagefork.runtime.sampling import mix
from pagefork.runtime.stream import Stream
from pagefork.runtime.work import Work


class SequenceActor(Actor):
    """Serves one sequence. Its tokens, its blocks and its generation are its Work, which it alone calls."""

    def __init__(
        self,
        house: House,
        *,
        lineage: int = 0,
        priority: float = 0.0,
        patience: float | None = None,
    ) -> None:
        self.owner = house.owner()
        super().__init__(f"sequence {self.owner}", capacity=64)
        self._house = house
        self._work = Work(self.owner, house, priority=priority, post=self.post, surrendered=self._drop_preempts)
        self._lineage = lineage
        self._priority = priority
        self._patience = house.patience if patience is None else patience
        self._children = 0
        self._scope: anyio.CancelScope | None = None
        self.gone = anyio.Event()
        self._left = False
        house.sequences[self.owner] = self

    @property
    def length(self) -> int:
        """How many tokens it has, those of a running generation as far as they were read."""
        return self._work.length

    @property
    def tokens(self) -> Tokens[int]:
        """A copy of its tokens, those of a running generation as far as they were read."""
        return self._work.tokens

    def epitaph(self, error: BaseException | None) -> PageforkError:
        if isinstance(error, WorkerDied):
            return WorkerDied(str(error))
        if error is not None:
            return SequenceClosed(f"{self.name} crashed and was closed: {error!r}; make another")
        return SequenceClosed(f"{self.name} is closed; make or fork another")

    async def run(self) -> None:
        """Serve until closed. Whatever ends the task, the blocks go back; a crash stays here."""
        try:
            while self.dead is None:
                await self.serve(await self.next())
        except Exception as error:
            log.error("sequence_crashed", owner=self.owner, error=repr(error))
            self.die(self.epitaph(error), error)
        finally:
            self.die(self.epitaph(None))
            await self._leave()

    async def serve(self, envelope: Envelope) -> None:
        prompt = envelope.message == Renew()  # and the most frequent: not worth a scope
        with contextlib.nullcontext() if prompt else anyio.CancelScope() as self._scope:
            await super().serve(envelope)
        if self._scope is not None and self._scope.cancelled_caught and envelope.reply is not None:
            envelope.reply.withdraw()
        if self._work.stream is None and not self._left:
            self._work.held.rest()

    def urge(self, envelope: Envelope) -> None:
        """What ends the sequence or its generation does not wait behind something that waits for blocks."""
        super().urge(envelope)
        serving, message = self.serving, envelope.message
        if isinstance(message, Close | Settle):
            self._urgent.rotate(1)
        if serving is None or self._scope is None:
            return
        if isinstance(message, Close):
            if serving.reply is not None:
                serving.reply.fail(self.epitaph(None))
            self._scope.cancel()
        elif isinstance(message, Settle) and isinstance(serving.message, Renew | Preempt | Resume):
            stream = self._work.stream
            if stream is not None and stream.serial == message.serial:
                self._scope.cancel()

    def withdraw(self, envelope: Envelope) -> None:
        if self.serving is envelope and self._scope is not None:
            self._scope.cancel()
        else:
            super().withdraw(envelope)

    def die(self, reason: PageforkError, cause: BaseException | None = None) -> None:
        if self.dead is None and self._work.stream is not None:
            self._work.stream.fail(reason)
        super().die(reason, cause)

    async def handle(self, message: Message) -> Any:
        work = self._work
        match message:
            case Renew(wait=wait):
                return await work.renew(wait)
            case Preempt():
                return await work.give_way()
            case Resume():
                return await work.resume()
            case Settle(serial=serial):
                if work.stream is not None and work.stream.serial == serial:
                    await work.settle()
                return None
            case Fork(count=count):
                return await self._fork(count)
            case Close():
                self.die(self.epitaph(None))
                return await self._leave()
        if work.stream is not None and work.stream.waiting:
            raise SequenceBusy(
                f"another task waits for the next token of {self.name}; finish or aclose() that generation first"
            )
        await work.settle()
        match message:
            case Append(tokens=tokens, patience=patience):
                return await self._append(tokens, self._patience if patience is None else patience)
            case Generate(params=params, patience=patience):
                return await self._generate(params, self._patience if patience is None else patience)
            case TopK(k=k):
                return await self._topk(k)
            case Truncate(length=length):
                return self._truncate(length)
            case ReadKV(layer=layer):
                return await self._read_kv(layer)
        return await super().handle(message)

    async def _append(self, tokens: list[int], patience: float) -> None:
        length = self._work.length + len(tokens)
        if length > self._house.max_context:
            raise ContextOverflow(
                f"{length} tokens exceed the context of {self._house.max_context}; truncate the sequence or append less"
            )
        await self._work.append(tokens, patience)

    async def _generate(self, params: SamplingParams, patience: float) -> Stream:
        length = self._need_tokens()
        end = min(length + params.max_tokens, self._house.max_context)
        if end == length:
            raise ContextOverflow(f"the context of {length} tokens is full; truncate the sequence first")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        job = Submit(
            owner=self.owner,
            end=end,
            params=params,
            key=mix(seed, self._lineage),
            stop=frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else self._house.facts.eos_ids),
        )
        return await self._work.generate(job, patience)

    async def _topk(self, k: int) -> list[tuple[int, float]]:
        length = self._need_tokens()
        return (await self._work.compute(Submit(owner=self.owner, topk=k), length, self._patience)).top

    async def _read_kv(self, layer: int) -> tuple[Any, Any]:
        held, groups = self._work.held, self._house.facts.groups
        group, _ = groups.places[layer]
        k, v = await self._house.read_kv(layer, np.array(held.tables[group], dtype=np.int32), held.computed)
        gone = held.trimmed * self._house.block_size if groups.windows[group] else 0
        k[:gone] = v[:gone] = np.nan
        return k, v

    def _truncate(self, length: int) -> None:
        if not 0 <= length <= self._work.length:
            raise InvalidRequest(f"length must be between 0 and {self._work.length}, not {length}")
        self._work.truncate(length)

    def _need_tokens(self) -> int:
        if not self._work.length:
            raise InvalidRequest(f"{self.name} is empty; append at least one token first")
        return self._work.length

    async def _fork(self, count: int) -> list[SequenceActor]:
        """Children share every block of the tokens read so far; a running generation pauses for it."""
        work = self._work
        running = work.stream is not None and not work.stream.done
        if work.stream is not None:
            await work.stop(pause=True)
        try:
            length = work.length
            if length - work.held.computed > 1:
                # Once for all: what is left pending, every child would compute.
                await work.compute(Submit(owner=self.owner), length - 1, self._patience)
            return await self._share(count, length)
        finally:
            if running:
                self.post(Resume())

    async def _share(self, count: int, length: int) -> list[SequenceActor]:
        house = self._house
        if not house.has_room(count):
            raise InvalidRequest(
                f"{count} more sequences would exceed max_sequences={house.max_sequences}; close some first"
            )
        children = [
            SequenceActor(
                house,
                lineage=mix(self._lineage, self._children + i + 1),
                priority=self._priority,
                patience=self._patience,
            )
            for i in range(count)
        ]
        shared = length if self._work.held.goes_on(length) else 0
        for child in children:
            child._work.inherit(self._work, shared)
        owners = [child.owner for child in children]

        def undo(_: Any = None) -> None:
            for owner in owners:
                house.allocator.post(Release(owner))
                house.sequences[owner].gone.set()
                house.leave(owner)

        try:
            await house.allocator.ask(Share(self.owner, owners, shared))
        except BaseException:
            undo()
            raise
        self._children += count
        house.forks += count
        for child in children:
            house.spawn(child)
        return children

    def _drop_preempts(self) -> None:
        """A Preempt that waits has what it wanted: serving it later would cost blocks that were granted since."""
        for envelope in [waiting for waiting in self._urgent if isinstance(waiting.message, Preempt)]:
            self._urgent.remove(envelope)

    async def _leave(self) -> None:
        """Return everything, and let another in."""
        if self._left:
            return
        self._left = True
        await self._work.close()
        self._house.leave(self.owner)
        self.gone.set()
