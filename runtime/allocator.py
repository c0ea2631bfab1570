"""The allocator actor: owns the block pool and grants its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from pagefork.cache import arbiter as events
from pagefork.cache.arbiter import Arbiter
from pagefork.cache.blocks import BlockPool
from pagefork.cache.grant import Grant
from pagefork.cache.ledger import Ledger
from pagefork.runtime.actor import Actor, Envelope
from pagefork.runtime.errors import PageforkError
from pagefork.runtime.messages import (
    Audit,
    Copied,
    Exhausted,
    Granted,
    Idle,
    Message,
    Publish,
    Release,
    Reserve,
    Share,
    Shrink,
    Surrender,
    Trim,
    Yielded,
)


class Allocator(Actor):
    """Serves from its ledger, which is the truth (P2); its arbiter says who goes first and who must give way.

    A Reserve that cannot be met is answered later: granted, told to yield, or refused at its deadline. `preempt(owner)`
    tells a sequence to surrender its blocks; it must not block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix: bool = True,
        max_queue: int | None = None,
        windows: Sequence[int | None] = (None,),
        preempt: Callable[[int], None] = lambda owner: None,
    ) -> None:
        super().__init__("allocator", capacity=4096)
        self.ledger = Ledger(BlockPool(num_blocks, block_size), prefix, windows=windows)
        self.arbiter = Arbiter(self.ledger, max_queue=max_queue)
        self.waited = 0
        self._preempt = preempt
        self._asking: dict[int, Envelope] = {}

    @property
    def waiting(self) -> int:
        """How many Reserves wait for blocks."""
        return len(self._asking)

    async def next(self) -> Envelope:
        """The next message; meanwhile what is due at its time is done."""
        while True:
            due = self.arbiter.next_deadline
            if due is None:
                return await super().next()
            with anyio.move_on_after(due - anyio.current_time()):
                return await super().next()
            self._tick()

    async def serve(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, Reserve):
            self.serving = envelope
            self._reserve(envelope, envelope.message)
            self.serving = None
        else:
            await super().serve(envelope)
        if self._asking:
            self._tick()

    async def handle(self, message: Message) -> Any:
        ledger = self.ledger
        match message:
            case Share(owner=owner, children=children, length=length):
                self.arbiter.share(owner, children, length, anyio.current_time())
            case Shrink(owner=owner, length=length):
                ledger.shrink(owner, length)
            case Trim(owner=owner, start=start):
                ledger.trim(owner, start)
            case Copied(owner=owner):
                ledger.copied(owner)
            case Publish(owner=owner, tokens=tokens, computed=computed):
                ledger.publish(owner, tokens, computed)
            case Idle(owner=owner):
                self.arbiter.idle(owner, anyio.current_time())
            case Surrender(owner=owner):
                self.arbiter.release(owner)
            case Release(owner=owner):
                self.arbiter.forget(owner)
            case Audit():
                ledger.check()
                return ledger.available
            case _:
                return await super().handle(message)
        return None

    def withdraw(self, envelope: Envelope) -> None:
        for ticket, asking in self._asking.items():
            if asking is envelope:
                del self._asking[ticket]
                self.arbiter.withdraw(ticket)
                envelope.reply.withdraw()
                return
        super().withdraw(envelope)

    def die(self, reason: PageforkError, cause: BaseException | None = None) -> None:
        if self.dead is None:
            for envelope in self._asking.values():
                envelope.reply.fail(reason)
            self._asking.clear()
        super().die(reason, cause)

    def _reserve(self, envelope: Envelope, reserve: Reserve) -> None:
        now = anyio.current_time()
        answer = self.arbiter.request(
            reserve.owner,
            reserve.length,
            reserve.write_from,
            reserve.tokens,
            now=now,
            priority=reserve.priority,
            deadline=now + reserve.patience,
        )
        match answer:
            case events.Waiting(ticket=ticket) if reserve.patience > 0:
                self.waited += 1
                self._asking[ticket] = envelope
            case events.Waiting(ticket=ticket):
                self.arbiter.withdraw(ticket)
                envelope.reply.set(self._exhausted(reserve))
            case events.Refused():
                envelope.reply.set(self._exhausted(reserve))
            case events.Yield():
                envelope.reply.set(Yielded())
            case events.Granted(grant=grant):
                envelope.reply.set(_granted(grant))

    def _tick(self) -> None:
        for event in self.arbiter.tick(anyio.current_time()):
            match event:
                case events.Preempt(owner=owner):
                    self._preempt(owner)
                case events.Granted(ticket=ticket, grant=grant):
                    self._answer(ticket, _granted(grant))
                case events.Yield(ticket=ticket):
                    self._answer(ticket, Yielded())
                case events.Expired(ticket=ticket, wanted=wanted, spare=spare):
                    self._answer(ticket, Exhausted(wanted, spare, self.ledger.pool.num_blocks))

    def _answer(self, ticket: int, message: Message) -> None:
        self._asking.pop(ticket).reply.set(message)

    def _exhausted(self, reserve: Reserve) -> Exhausted:
        quote = self.ledger.quote(reserve.owner, reserve.length, reserve.write_from, reserve.tokens)
        return Exhausted(quote.new, quote.spare, self.ledger.pool.num_blocks)


def _granted(grant: Grant) -> Granted:
    return Granted(grant.first, grant.ids, grant.copies, grant.hit, grant.trimmed)
