"""One actor per sequence: its tokens, its block table, its job at the worker."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import anyio
import msgspec
import numpy as np

from pagefork.runtime.actor import Actor, Envelope
from pagefork.runtime.errors import (
    ContextOverflow,
    InvalidRequest,
    PageforkError,
    PoolExhausted,
    SequenceBusy,
    SequenceClosed,
    WorkerDied,
)
from pagefork.runtime.holdings import Holdings, Tokens
from pagefork.runtime.house import House
from pagefork.runtime.log import log
from pagefork.runtime.messages import (
    Append,
    Cancel,
    Close,
    Extend,
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
    Yielded,
)
from pagefork.runtime.sampling import mix
from pagefork.runtime.stream import Stream


class SequenceActor(Actor):
    """Serves one sequence.

    While a generation runs, `_stream` holds what the worker sampled: what the reader took of it counts as the
    sequence's, the rest goes when it ends. `_paused`: the worker has no job of the running generation, which is to be
    resumed; `_before`: tokens that were sampled before its present job.
    Preempted, it gives up its whole table; from its tokens it computes K and V again when it goes on.
    """

    def __init__(
        self,
        house: House,
        tokens: Tokens[int] | None = None,
        *,
        computed: int = 0,
        table: Tokens[int] | None = None,
        trimmed: int = 0,
        lineage: int = 0,
        priority: float = 0.0,
        patience: float | None = None,
    ) -> None:
        self.owner = house.owner()
        super().__init__(f"sequence {self.owner}", capacity=64)
        self._house = house
        self._tokens = Tokens("i") if tokens is None else tokens
        self._held = Holdings(
            self.owner,
            house.allocator,
            house.block_size,
            self._all,
            table=table,
            computed=computed,
            trimmed=trimmed,
            priority=priority,
            window=house.window,
        )
        self._lineage = lineage
        self._priority = priority
        self._patience = house.patience if patience is None else patience
        self._waits = self._patience
        self._paused = False
        self._before = 0
        self._children = 0
        self._generations = 0
        self._stream: Stream | None = None
        self._job: Submit | None = None
        self._scope: anyio.CancelScope | None = None
        self.gone = anyio.Event()
        self._left = False
        house.sequences[self.owner] = self

    @property
    def length(self) -> int:
        """How many tokens it has, those of a running generation as far as they were read."""
        return len(self._tokens) + (self._stream.read if self._stream else 0)

    @property
    def tokens(self) -> Tokens[int]:
        """A copy of its tokens, those of a running generation as far as they were read."""
        return self._tokens + Tokens("i", self._stream.tokens[: self._stream.read] if self._stream else [])

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
        if self._stream is None and not self._left:
            self._held.rest()

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
            ends = self._stream is not None and self._stream.serial == message.serial
            if ends:
                self._scope.cancel()

    def withdraw(self, envelope: Envelope) -> None:
        if self.serving is envelope and self._scope is not None:
            self._scope.cancel()
        else:
            super().withdraw(envelope)

    def die(self, reason: PageforkError, cause: BaseException | None = None) -> None:
        if self.dead is None and self._stream is not None:
            self._stream.fail(reason)
        super().die(reason, cause)

    async def handle(self, message: Message) -> Any:
        match message:
            case Renew(wait=wait):
                return await self._renew(wait)
            case Preempt():
                return await self._give_way()
            case Resume():
                return await self._resume()
            case Settle(serial=serial):
                if self._stream is not None and self._stream.serial == serial:
                    await self._settle()
                return None
            case Fork(count=count):
                return await self._fork(count)
            case Close():
                self.die(self.epitaph(None))
                return await self._leave()
        if self._stream is not None and self._stream.waiting:
            raise SequenceBusy(
                f"another task waits for the next token of {self.name}; finish or aclose() that generation first"
            )
        await self._settle()
        match message:
            case Append(tokens=tokens, patience=patience):
                self._waits = self._patience if patience is None else patience
                return await self._append(tokens)
            case Generate(params=params, patience=patience):
                self._waits = self._patience if patience is None else patience
                return await self._generate(params)
            case TopK(k=k):
                return await self._topk(k)
            case Truncate(length=length):
                return self._truncate(length)
            case ReadKV(layer=layer):
                return await self._read_kv(layer)
        return await super().handle(message)

    # What callers ask for

    async def _append(self, tokens: list[int]) -> None:
        length = len(self._tokens) + len(tokens)
        if length > self._house.max_context:
            raise ContextOverflow(
                f"{length} tokens exceed the context of {self._house.max_context}; truncate the sequence or append less"
            )
        try:
            await self._reserve(length, tokens=self._tokens + Tokens("i", tokens), patience=self._waits)
        except BaseException:
            self._held.shrink(len(self._tokens))
            raise
        self._tokens.extend(tokens)

    async def _generate(self, params: SamplingParams) -> Stream:
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
        self._generations += 1
        stream = Stream(self._generations)
        pending = length - self._held.computed
        await self._start(job, stream)
        self._job, self._stream = job, stream
        if pending >= self._house.block_size and stream.renew_at is not None:
            stream.renew_at = 1  # the prompt is computed then: others may have its blocks
        return stream

    async def _topk(self, k: int) -> list[tuple[int, float]]:
        length = self._need_tokens()
        return (await self._compute(Submit(owner=self.owner, topk=k), length)).top

    async def _read_kv(self, layer: int) -> tuple[Any, Any]:
        held = self._held
        k, v = await self._house.read_kv(layer, np.array(held.table, dtype=np.int32), held.computed)
        k[: held.trimmed * self._house.block_size] = v[: held.trimmed * self._house.block_size] = np.nan
        return k, v

    def _truncate(self, length: int) -> None:
        if not 0 <= length <= len(self._tokens):
            raise InvalidRequest(f"length must be between 0 and {len(self._tokens)}, not {length}")
        del self._tokens[length:]
        self._held.shrink(length)

    async def _fork(self, count: int) -> list[SequenceActor]:
        """Children share every block of the tokens read so far; a running generation pauses for it."""
        running = self._stream is not None and not self._stream.done
        if self._stream is not None:
            await self._stop(pause=True)
        try:
            length = self.length
            if length - self._held.computed > 1:
                # Once for all: what is left pending, every child would compute.
                await self._compute(Submit(owner=self.owner), length - 1)
            return await self._share(count, length)
        finally:
            if running:
                self.post(Resume())

    async def _share(self, count: int, length: int) -> list[SequenceActor]:
        house, tokens = self._house, self.tokens
        if not house.has_room(count):
            raise InvalidRequest(
                f"{count} more sequences would exceed max_sequences={house.max_sequences}; close some first"
            )
        blocks = self._held.table[: -(-length // house.block_size)]
        children = [
            SequenceActor(
                house,
                tokens[:],
                computed=min(self._held.computed, length),
                table=blocks[:],
                trimmed=self._held.trimmed,
                lineage=mix(self._lineage, self._children + i + 1),
                priority=self._priority,
                patience=self._patience,
            )
            for i in range(count)
        ]
        owners = [child.owner for child in children]

        def undo(_: Any = None) -> None:
            for owner in owners:
                house.allocator.post(Release(owner))
                house.sequences[owner].gone.set()
                house.leave(owner)

        try:
            await house.allocator.ask(Share(self.owner, owners, length))
        except BaseException:
            undo()
            raise
        self._children += count
        house.forks += count
        for child in children:
            house.spawn(child)
        return children

    # Jobs at the worker

    def _need_tokens(self) -> int:
        if not self._tokens:
            raise InvalidRequest(f"{self.name} is empty; append at least one token first")
        return len(self._tokens)

    def _all(self) -> Tokens[int]:
        """Every token there is, those that the reader has not taken included."""
        return self._tokens + Tokens("i", self._stream.tokens if self._stream else [])

    async def _start(self, job: Submit, stream: Stream, stop: int | None = None) -> None:
        """Reserve blocks and submit what is pending of the tokens before `stop`, the last of them at least.

        Where blocks of the past are given back, a long pending part is computed piece by piece first.
        """
        tokens = self._all()[:stop]  # of those that are found computed, the last is to be left
        patience = self._patience if job.params is None else self._waits
        while not await self._submit(job, stream, tokens, len(tokens), patience):
            piece = Stream()
            if await self._submit(Submit(owner=self.owner), piece, tokens, self._held.reach(len(tokens)), patience):
                await self._finish(piece)

    async def _submit(self, job: Submit, stream: Stream, tokens: Tokens[int], stop: int, patience: float) -> bool:
        """Submit what is pending before `stop`; False and nothing done where that is too long, or was computed."""
        if self._held.reach(stop) < stop:
            return False
        limit = stop
        if job.params is not None:
            # Those that begin together have first leases of different lengths: not all of them renew at once, and those
            # that do go on doing so, together.
            lease = self._house.lease - self.owner % max(self._house.lease // 8, 1)
            limit = self._held.reach(max(stop, min(self.length + lease, job.end - 1)))
        start = min(self._held.computed, stop - 1)
        try:
            copies = await self._reserve(limit, start, tokens, patience=0 if limit > stop else patience)
        except PoolExhausted:
            if limit == stop:
                raise
            limit = stop
            copies = await self._reserve(limit, start, tokens, patience=patience)
        # Where the blocks had to go and came back, this is further behind, or ahead by what others computed.
        if self._held.capacity < stop or self._held.computed >= stop < len(tokens):
            return False
        limit = min(limit, self._held.capacity)
        start = min(self._held.computed, stop - 1)
        job = msgspec.structs.replace(
            job,
            start=start,
            tokens=tokens[start:stop].tolist(),
            table=self._held.table.tolist(),
            limit=limit,
            copies=copies,
        )
        try:
            await self._house.worker.submit(job, stream)
        except BaseException:
            self._held.forget(copies, start)
            raise
        self._before = len(stream.tokens)
        self._set_limit(stream, limit, job.end)
        return True

    async def _compute(self, job: Submit, stop: int) -> Stream:
        """Run a job that samples nothing up to its end; cancelled, what was computed stays."""
        stream = Stream()
        await self._start(job, stream, stop)
        await self._finish(stream)
        return stream

    async def _finish(self, stream: Stream) -> None:
        """Wait for the end of a job that samples nothing; cancelled, it ends now, and what was computed stays."""
        try:
            await stream.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._house.worker.ask(Cancel(self.owner))
            raise
        finally:
            if stream.computed is not None:
                self._held.computed = stream.computed
                self._publish()

    async def _stop(self, pause: bool = False) -> None:
        """Take the job back from the worker, once no step in flight names it. Shielded: two steps at most."""
        stream = self._stream
        assert stream is not None
        with anyio.CancelScope(shield=True):
            await self._house.worker.ask(Cancel(self.owner, pause=pause))
        self._paused = pause
        if stream.computed is not None:
            self._held.computed, stream.computed = stream.computed, None

    async def _resume(self) -> None:
        stream, job = self._stream, self._job
        if self._paused and stream is not None and job is not None and not stream.done:
            try:
                await self._start(job, stream)
                self._paused = False
            except PageforkError as error:
                stream.fail(error)

    async def _settle(self) -> None:
        """End a generation at the last token that its reader took."""
        stream = self._stream
        if stream is None:
            return
        self._publish()  # before anything is waited for: the next prompt may begin like this one
        await self._stop()
        stream.cut()
        self._tokens.extend(stream.tokens)
        self._stream = self._job = None
        self._held.computed = min(self._held.computed, len(self._tokens))
        self._publish()
        self._held.shrink(len(self._tokens))

    async def _renew(self, wait: bool) -> None:
        """Extend the lease. Without blocks for it the job goes on to the end of what it has; then it waits or fails."""
        stream, job = self._stream, self._job
        if stream is None or job is None or stream.done or self._paused:
            return
        self._publish()
        due, last = self._renewal(stream)
        if stream.read < due:
            stream.renew_at = due
            return
        for limit in (self.length + self._house.lease, self._held.capacity + 1, self._held.capacity):
            limit = min(limit, job.end - 1)
            if limit > stream.limit and await self._extend(limit, 0) is None:
                return
        if stream.read < last:
            stream.renew_at = last
        elif not wait:
            self.post(Renew(wait=True))
        elif exhausted := await self._extend(min(stream.limit + 1, job.end - 1), self._waits):
            stream.fail(exhausted)

    async def _extend(self, limit: int, patience: float) -> PoolExhausted | None:
        """Have blocks for positions below `limit` and lease them to the job; returns why there are none."""
        stream, job, held = self._stream, self._job, self._held
        assert stream is not None and job is not None
        first = len(held.table)
        answer = await held.ask(limit, patience=patience, yielded=self._preempt_later)
        if isinstance(answer, Yielded):
            self._preempt_later()
            return None
        try:
            copies = held.adopt(answer)
        except PoolExhausted as error:
            return error
        assert not copies
        self._house.worker.post(Extend(self.owner, first, held.table[first:].tolist(), limit))
        self._set_limit(stream, limit, job.end)
        return None

    async def _give_way(self) -> None:
        """Let another have the blocks. A running job is paused, and goes on from its tokens when there are blocks."""
        if not self._held.table:
            return
        if self._stream is not None:
            await self._stop(pause=True)
        self._surrender()
        await self._resume()

    def _set_limit(self, stream: Stream, limit: int, end: int) -> None:
        """Note the lease, and when its reader should ask for the next."""
        stream.limit = limit
        stream.renew_at = self._renewal(stream)[0] if limit < end - 1 else None

    def _renewal(self, stream: Stream) -> tuple[int, int]:
        """At how many tokens read to renew the lease; and its last."""
        last = stream.limit - len(self._tokens) + 1
        return max(last - min((self._house.lease + 2) // 4, 8), 1), last

    # Blocks

    async def _reserve(
        self,
        length: int,
        write_from: int | None = None,
        tokens: Tokens[int] | None = None,
        *,
        patience: float,
    ) -> list[tuple[int, int, int]]:
        """Have blocks for `length` tokens, those from `write_from` on its own; returns the copies to submit.

        Told to give way, it surrenders what it has and asks for all again: no job of it may be at the worker. With a
        window it may get blocks for fewer tokens, as many as are held at once.
        """
        held = self._held
        while True:
            reach = held.reach(length)
            answer = await held.ask(reach, write_from, tokens, patience=patience, yielded=self._preempt_later)
            if not isinstance(answer, Yielded):
                return held.adopt(answer)
            self._surrender()

    def _preempt_later(self) -> None:
        """Told to give way when nobody waited for the answer any more: a job may be running."""
        self.post(Preempt())

    def _surrender(self) -> None:
        """Give up every block. No job may be at the worker."""
        self._held.surrender()
        # A Preempt that waits has what it wanted: serving it later would cost blocks that were granted since.
        for envelope in [waiting for waiting in self._urgent if isinstance(waiting.message, Preempt)]:
            self._urgent.remove(envelope)

    def _publish(self) -> None:
        """Let other sequences have the full blocks whose K and V are computed, and let go of those out of sight."""
        computed, stream = self._held.computed, self._stream
        if stream is not None and not self._paused and stream.read > self._before:
            # A token that this job sampled came out of everything before it.
            computed = max(computed, len(self._tokens) + stream.read - 1)
        self._held.publish(computed)
        self._held.trim(min(computed, self.length - 1))

    async def _leave(self) -> None:
        """Return everything; no step in flight names the sequence afterwards."""
        if self._left:
            return
        self._left = True
        with anyio.CancelScope(shield=True), contextlib.suppress(PageforkError):
            await self._house.worker.ask(Cancel(self.owner))
        self._held.release()
        self._house.leave(self.owner)
        self.gone.set()
