"""What a sequence has computed and has the worker compute: its tokens, their blocks, its running generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import anyio
import msgspec

from pagefork.runtime.errors import PageforkError, PoolExhausted
from pagefork.runtime.holdings import Holdings, Tokens
from pagefork.runtime.house import House
from pagefork.runtime.messages import Cancel, Extend, Message, Preempt, Renew, Submit, Yielded
from pagefork.runtime.stream import Stream

_RENEWED_BEFORE = 8
"""Tokens before the end of a lease at which its reader asks for the next: what an answer takes, and a few more."""


class Work:
    """The sequence's half of what it and the worker say to each other; an actor calls it, one call at a time.

    While a generation runs, `stream` holds what the worker sampled: what the reader took of it counts as the
    sequence's, the rest goes when it ends. `_paused`: the worker has no job of the running generation, which is to be
    resumed; `_before`: tokens that were sampled before its present job; `_patience`: seconds that it waits for blocks.
    Preempted, it gives up all its blocks; from its tokens it computes K and V again when it goes on.

    `post` sends its actor a message; `surrendered` is called whenever all blocks were given up.
    """

    def __init__(
        self,
        owner: int,
        house: House,
        *,
        priority: float,
        post: Callable[[Message], None],
        surrendered: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._house = house
        self._post = post
        self._surrendered = surrendered
        self._tokens = Tokens("i")
        self.held = Holdings(
            owner,
            house.allocator,
            house.block_size,
            self._all,
            groups=len(house.facts.groups.windows),
            priority=priority,
            window=house.window,
        )
        self._patience = 0.0
        self._paused = False
        self._before = 0
        self._generations = 0
        self.stream: Stream | None = None
        self._job: Submit | None = None

    @property
    def length(self) -> int:
        """How many tokens there are, those of a running generation as far as they were read."""
        return len(self._tokens) + (self.stream.read if self.stream else 0)

    @property
    def tokens(self) -> Tokens[int]:
        """A copy of the tokens, those of a running generation as far as they were read."""
        return self._tokens + Tokens("i", self.stream.tokens[: self.stream.read] if self.stream else [])

    def inherit(self, parent: Work, length: int) -> None:
        """Begin with the tokens of `parent` that were read, and with its blocks of the first `length` of them."""
        self._tokens = parent.tokens
        self.held.inherit(parent.held, length)

    async def append(self, tokens: list[int], patience: float) -> None:
        """Add tokens, once there are blocks for them. Raises PoolExhausted."""
        length = len(self._tokens) + len(tokens)
        try:
            await self._reserve(length, tokens=self._tokens + Tokens("i", tokens), patience=patience)
        except BaseException:
            self.held.shrink(len(self._tokens))
            raise
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self._tokens[length:]
        self.held.shrink(length)

    async def generate(self, job: Submit, patience: float) -> Stream:
        """Have a job that samples begin; it waits `patience` seconds for blocks each time there are none."""
        self._generations += 1
        stream = Stream(self._generations)
        pending = len(self._tokens) - self.held.computed
        await self._start(job, stream, patience)
        self._job, self.stream, self._patience = job, stream, patience
        if pending >= self._house.block_size and stream.renew_at is not None:
            stream.renew_at = 1  # the prompt is computed then: others may have its blocks
        return stream

    async def compute(self, job: Submit, stop: int, patience: float) -> Stream:
        """Run a job that samples nothing on the tokens before `stop`; cancelled, what was computed stays."""
        stream = Stream()
        await self._start(job, stream, patience, stop)
        await self._finish(stream)
        return stream

    async def stop(self, pause: bool = False) -> None:
        """Take the job back from the worker, once no step in flight names it. Shielded: it is soon."""
        stream = self.stream
        assert stream is not None
        with anyio.CancelScope(shield=True):
            await self._house.worker.ask(Cancel(self._owner, pause=pause))
        self._paused = pause
        if stream.computed is not None:
            # Steps that were on their way past an end, or past this, went on with tokens that are nobody's.
            self.held.computed, stream.computed = min(stream.computed, len(self._all())), None

    async def resume(self) -> None:
        """Submit the paused job again. Without blocks for it the generation fails."""
        stream, job = self.stream, self._job
        if self._paused and stream is not None and job is not None and not stream.done:
            try:
                await self._start(job, stream, self._patience)
                self._paused = False
            except PageforkError as error:
                stream.fail(error)

    async def settle(self) -> None:
        """End a generation at the last token that its reader took."""
        stream = self.stream
        if stream is None:
            return
        self._publish()  # before anything is waited for: the next prompt may begin like this one
        await self.stop()
        stream.cut()
        self._tokens.extend(stream.tokens)
        self.stream = self._job = None
        self.held.computed = min(self.held.computed, len(self._tokens))
        self._publish()
        self.held.shrink(len(self._tokens))

    async def renew(self, wait: bool) -> None:
        """Extend the lease. Without blocks for it the job goes on to the end of what it has; then it waits or fails."""
        stream, job = self.stream, self._job
        if stream is None or job is None or stream.done or self._paused:
            return
        self._publish()
        due, last = self._renewal(stream)
        if stream.read < due:
            stream.renew_at = due
            return
        for limit in (self.length + self._house.lease, self.held.capacity + 1, self.held.capacity):
            limit = min(limit, job.end - 1)
            if limit > stream.limit and await self._extend(limit, 0) is None:
                return
        if stream.read < last:
            stream.renew_at = last
        elif not wait:
            self._post(Renew(wait=True))
        elif exhausted := await self._extend(min(stream.limit + 1, job.end - 1), self._patience):
            stream.fail(exhausted)

    async def give_way(self) -> None:
        """Let another have the blocks. A running job is paused, and goes on from its tokens when there are blocks."""
        if not self.held.entries:
            return
        if self.stream is not None:
            await self.stop(pause=True)
        self._surrender()
        await self.resume()

    async def close(self) -> None:
        """Return everything; no step in flight names the sequence afterwards."""
        with anyio.CancelScope(shield=True), contextlib.suppress(PageforkError):
            await self._house.worker.ask(Cancel(self._owner))
        self.held.release()

    # Jobs at the worker

    def _all(self) -> Tokens[int]:
        """Every token there is, those that the reader has not taken included."""
        return self._tokens + Tokens("i", self.stream.tokens if self.stream else [])

    async def _start(self, job: Submit, stream: Stream, patience: float, stop: int | None = None) -> None:
        """Reserve blocks and submit what is pending of the tokens before `stop`, the last of them at least.

        Where blocks of the past are given back, a long pending part is computed piece by piece first.
        """
        tokens = self._all()[:stop]
        while not await self._submit(job, stream, tokens, len(tokens), patience):
            # The last token is the job's own: computed by a piece, it would be computed again without its window.
            piece, end = Stream(), min(self.held.reach(len(tokens)), len(tokens) - 1)
            if await self._submit(Submit(owner=self._owner), piece, tokens, end, patience):
                await self._finish(piece)

    async def _submit(self, job: Submit, stream: Stream, tokens: Tokens[int], stop: int, patience: float) -> bool:
        """Submit what is pending before `stop`; False and nothing done where that is too long, or was computed."""
        if self.held.reach(stop) < stop or self.held.computed >= stop < len(tokens):
            return False
        limit = stop
        if job.params is not None:
            # Those that begin together have first leases of different lengths: not all of them renew at once, and those
            # that do go on doing so, together.
            lease = self._house.lease - self._owner % max(self._house.lease // 8, 1)
            limit = self.held.reach(max(stop, min(self.length + lease, job.end - 1)))
        start = min(self.held.computed, stop - 1)
        try:
            copies = await self._reserve(limit, start, tokens, patience=0 if limit > stop else patience)
        except PoolExhausted:
            if limit == stop:
                raise
            limit = stop
            copies = await self._reserve(limit, start, tokens, patience=patience)
        # Where the blocks had to go and came back, this is further behind, or ahead by what others computed.
        if self.held.capacity < stop or self.held.computed >= stop < len(tokens):
            return False
        limit = min(limit, self.held.capacity)
        start = min(self.held.computed, stop - 1)
        job = msgspec.structs.replace(
            job,
            start=start,
            tokens=tokens[start:stop].tolist(),
            tables=[table.tolist() for table in self.held.tables],
            limit=limit,
            copies=copies,
        )
        try:
            await self._house.worker.submit(job, stream)
        except BaseException:
            self.held.forget(copies, start)
            raise
        self._before = len(stream.tokens)
        self._set_limit(stream, limit, job.end)
        return True

    async def _finish(self, stream: Stream) -> None:
        """Wait for the end of a job that samples nothing; cancelled, it ends now, and what was computed stays."""
        try:
            await stream.wait()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._house.worker.ask(Cancel(self._owner))
            raise
        finally:
            if stream.computed is not None:
                self.held.computed = stream.computed
                self._publish()

    async def _extend(self, limit: int, patience: float) -> PoolExhausted | None:
        """Have blocks for positions below `limit` and lease them to the job; returns why there are none."""
        stream, job, held = self.stream, self._job, self.held
        assert stream is not None and job is not None
        first = held.entries
        answer = await held.ask(limit, patience=patience, yielded=self._preempt_later)
        if isinstance(answer, Yielded):
            self._preempt_later()
            return None
        try:
            copies = held.adopt(answer)
        except PoolExhausted as error:
            return error
        assert not copies
        ids = [table[first:].tolist() for table in held.tables]
        self._house.worker.post(Extend(self._owner, first, ids, limit))
        self._set_limit(stream, limit, job.end)
        return None

    def _set_limit(self, stream: Stream, limit: int, end: int) -> None:
        """Note the lease, and when its reader should ask for the next."""
        stream.limit = limit
        stream.renew_at = self._renewal(stream)[0] if limit < end - 1 else None

    def _renewal(self, stream: Stream) -> tuple[int, int]:
        """At how many tokens read to renew the lease; and its last."""
        last = stream.limit - len(self._tokens) + 1
        return max(last - min((self._house.lease + 2) // 4, _RENEWED_BEFORE), 1), last

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
        held = self.held
        while True:
            reach = held.reach(length)
            answer = await held.ask(reach, write_from, tokens, patience=patience, yielded=self._preempt_later)
            if not isinstance(answer, Yielded):
                return held.adopt(answer)
            self._surrender()

    def _preempt_later(self) -> None:
        """Told to give way when nobody waited for the answer any more: a job may be running."""
        self._post(Preempt())

    def _surrender(self) -> None:
        """Give up every block. No job may be at the worker."""
        self.held.surrender()
        self._surrendered()

    def _publish(self) -> None:
        """Let other sequences have the full blocks whose K and V are computed, and let go of those out of sight."""
        computed, stream = self.held.computed, self.stream
        if stream is not None and not self._paused and stream.read > self._before:
            # A token that this job sampled came out of everything before it.
            computed = max(computed, len(self._tokens) + stream.read - 1)
        self.held.publish(computed)
        self.held.trim(min(computed, self.length - 1))
