"""Who gets blocks when there are not enough of them. A state machine over a Ledger that is told the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from pagefork.cache.grant import Grant, Quote
from pagefork.cache.lazy_heap import LazyHeap
from pagefork.cache.ledger import Ledger
from pagefork.cache.prefix import Chain, Tokens
from pagefork.cache.victims import Party, Victims

AGEING = 10.0
"""Seconds of waiting that one level of priority is worth."""


@dataclass(frozen=True, slots=True)
class Granted:
    ticket: int
    owner: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ticket stands in the queue; `tick` or `withdraw` will end it."""

    ticket: int
    owner: int


@dataclass(frozen=True, slots=True)
class Refused:
    """ "too large": more blocks than the pool has. "queue full": `wanted` tickets are waiting, of `total` allowed."""

    ticket: int
    owner: int
    reason: Literal["too large", "queue full"]
    wanted: int
    total: int


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed; `wanted` blocks were needed and `spare` could be had."""

    ticket: int
    owner: int
    wanted: int
    spare: int


@dataclass(frozen=True, slots=True)
class Yield:
    """The owner gives way: its ticket is over; let it `release` everything and ask again, which keeps its place."""

    ticket: int
    owner: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Make the owner stop and `release` everything. Nothing to do if it holds nothing by then."""

    owner: int


Event = Granted | Expired | Yield | Preempt


class _Operator(Party):
    """An owner, and the operation that it has in progress. admitted: the operation was granted something before."""

    __slots__ = ("admitted", "arrival", "order", "ticket")

    def __init__(self, owner: int) -> None:
        super().__init__(owner)
        self.admitted = False
        self.arrival = 0.0
        self.order = 0
        self.ticket: _Ticket | None = None


class _Ticket:
    __slots__ = ("chains", "deadline", "length", "number", "party", "rank", "tokens", "waiting", "write_from")

    def __init__(
        self,
        number: int,
        party: _Operator,
        length: int,
        write_from: int | None,
        tokens: Tokens | None,
        deadline: float | None,
    ) -> None:
        self.number = number
        self.party = party
        self.rank = party.rank
        self.length = length
        self.write_from = write_from
        self.tokens = tokens
        self.deadline = deadline
        self.chains: Sequence[Chain] = ()
        self.waiting = False


class Arbiter:
    """Grants, queues and preempts over one ledger, which it must be the only one to reserve from.

    An operation of an owner begins with its first `request` and ends with `idle` or `forget`. Its rank is its arrival
    less `ageing` seconds for each level of priority, and never changes while it lasts: who waits is overtaken by no
    more than the operations that rank before it, so neither the old nor the low can starve. Tickets are granted in the
    order of ranks, whole or not at all; only a request that takes no block passes others by.

    While the first in the queue lacks blocks, owners are preempted: the idle ones, longest idle first, then operations
    that rank behind it, the last first. The first of all is preempted by nobody, hence there is no livelock. Nobody is
    preempted in vain: each victim frees a block, alone or with the others named, or saves the first a copy.

    Every ticket ends once: granted, refused, expired, yielded or withdrawn. Call `tick` after any call that made blocks
    available (of the ledger too: `shrink`, `copied`) or that answered Waiting, and when `next_deadline` comes. Costs
    grow with the logarithm of the owners, and with the blocks of those concerned.
    """

    def __init__(self, ledger: Ledger, *, ageing: float = AGEING, max_queue: int | None = None) -> None:
        """`max_queue`: how many tickets may wait before the first request of an operation is refused."""
        self.ledger = ledger
        self.preempted = 0
        self.expired = 0
        self._ageing = ageing
        self._max_queue = max_queue
        self._parties: dict[int, _Operator] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = count(1)
        self._orders = count(1)
        self._queue: LazyHeap[_Ticket] = LazyHeap(lambda _, ticket: ticket.waiting)
        self._deadlines: LazyHeap[_Ticket] = LazyHeap(lambda _, ticket: ticket.waiting)
        self._victims = Victims(ledger)

    @property
    def waiting(self) -> int:
        """How many tickets wait."""
        return len(self._tickets)

    @property
    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest, though nothing happens before; None: no need."""
        ticket = self._deadlines.peek()
        due = [] if ticket is None or ticket.deadline is None else [ticket.deadline]
        if self._tickets and (rescan := self._victims.rescan_at) is not None:
            due.append(rescan)
        return min(due, default=None)

    def request(
        self,
        owner: int,
        length: int,
        write_from: int | None = None,
        tokens: Tokens | None = None,
        *,
        now: float,
        priority: float = 0.0,
        deadline: float | None = None,
    ) -> Granted | Refused | Waiting | Yield:
        """Ask for what `Ledger.reserve` does. `now` and `deadline` in seconds of one clock; `tokens` must not change.

        The answer carries the ticket's number. Yield: the owner was named for preemption and has not released yet. A
        further request of an owner withdraws the one that waits.
        """
        party = self._party(owner)
        if party.ticket is not None:
            self._end(party.ticket)
        self._begin(party, priority, now)
        ticket = _Ticket(next(self._numbers), party, length, write_from, tokens, deadline)
        blocks = self.ledger.span(owner, length)
        if blocks > self.ledger.pool.num_blocks:
            return Refused(ticket.number, owner, "too large", blocks, self.ledger.pool.num_blocks)
        if party.leaving is not None:
            return Yield(ticket.number, owner)
        quote = self._quote(ticket)
        head = self._queue.peek()
        if not quote.short and (not quote.takes or head is None or party.rank < head.rank):
            return self._grant(ticket, quote)
        if self._max_queue is not None and not party.admitted and len(self._tickets) >= self._max_queue:
            return Refused(ticket.number, owner, "queue full", len(self._tickets), self._max_queue)
        self._enqueue(ticket)
        return Waiting(ticket.number, owner)

    def tick(self, now: float) -> list[Event]:
        """Expire, grant and preempt as far as can be done at `now`."""
        events: list[Event] = []
        self._expire(now, events)
        while (head := self._queue.peek()) is not None:
            quote = self._quote(head)
            if quote.short:
                victims = self._victims.name(head.rank, quote, now)
                events += [self._preempt(self._parties[victim.owner]) for victim in victims]
                break
            self._end(head)
            events.append(self._grant(head, quote))
        return events

    def withdraw(self, ticket: int) -> bool:
        """The asker gave up. False when the ticket had ended already: granted, its blocks are the owner's."""
        found = self._tickets.get(ticket)
        if found is not None:
            self._end(found)
        return found is not None

    def idle(self, owner: int, now: float) -> None:
        """The owner's operation is over, or it exists without ever having had one. A ticket of it is withdrawn."""
        party = self._party(owner)
        if party.ticket is not None:
            self._end(party.ticket)
        party.active = False
        party.since = now
        self._victims.enlist(party, renew=True)

    def share(self, owner: int, children: Sequence[int], length: int, now: float) -> None:
        """`Ledger.share`; the children are idle."""
        self.ledger.share(owner, children, length)
        for child in children:
            self.idle(child, now)

    def release(self, owner: int) -> int:
        """`Ledger.release`; an operation keeps its rank. Returns how many blocks became available."""
        party = self._parties.get(owner)
        if party is not None:
            self._victims.left(party)
        return self.ledger.release(owner)

    def is_victim(self, owner: int) -> bool:
        """Whether the owner was told to give way and has not released yet: what makes a late Preempt void."""
        party = self._parties.get(owner)
        return party is not None and party.leaving is not None

    def forget(self, owner: int) -> int:
        """The owner is gone: its ticket is withdrawn, all that it holds released.

        Returns how many blocks became available.
        """
        freed = self.release(owner)
        party = self._parties.pop(owner, None)
        if party is not None:
            if party.ticket is not None:
                self._end(party.ticket)
            party.stamp = 0
        return freed

    # Operations and tickets

    def _party(self, owner: int) -> _Operator:
        party = self._parties.get(owner)
        if party is None:
            party = self._parties[owner] = _Operator(owner)
        return party

    def _begin(self, party: _Operator, priority: float, now: float) -> None:
        if not party.active:
            party.active, party.admitted = True, False
            party.arrival, party.order = now, next(self._orders)
        rank = (party.arrival - priority * self._ageing, party.order)
        if rank != party.rank:
            party.rank = rank
            self._victims.enlist(party, renew=True)

    def _quote(self, ticket: _Ticket) -> Quote:
        owner = ticket.party.owner
        quote = self.ledger.quote(owner, ticket.length, ticket.write_from, ticket.tokens, ticket.chains)
        ticket.chains = quote.chains
        return quote

    def _grant(self, ticket: _Ticket, quote: Quote) -> Granted:
        party = ticket.party
        grant = self.ledger.take(party.owner, ticket.length, ticket.write_from, quote)
        party.admitted = True
        self._victims.enlist(party)
        return Granted(ticket.number, party.owner, grant)

    def _enqueue(self, ticket: _Ticket) -> None:
        ticket.waiting = True
        ticket.party.ticket = ticket
        self._tickets[ticket.number] = ticket
        self._queue.push(ticket.rank, ticket.number, ticket)
        if ticket.deadline is not None:
            self._deadlines.push(ticket.deadline, ticket.number, ticket)

    def _end(self, ticket: _Ticket) -> None:
        ticket.waiting = False
        ticket.party.ticket = None
        del self._tickets[ticket.number]

    def _expire(self, now: float, events: list[Event]) -> None:
        while (ticket := self._deadlines.peek()) is not None and ticket.deadline is not None and ticket.deadline <= now:
            quote = self._quote(ticket)
            self._end(ticket)
            self.expired += 1
            events.append(Expired(ticket.number, ticket.party.owner, quote.new, quote.spare))

    def _preempt(self, party: _Operator) -> Event:
        self.preempted += 1
        ticket = party.ticket
        if ticket is None:
            return Preempt(party.owner)
        self._end(ticket)
        return Yield(ticket.number, party.owner)

    def check(self) -> None:
        """Raise AssertionError unless the books agree. Cost: all blocks and owners."""
        self._victims.check()
        if any(t.party.ticket is not t or not t.waiting or not t.party.active for t in self._tickets.values()):
            raise AssertionError("a ticket and its owner disagree")
        for party in self._parties.values():
            table = self.ledger.table(party.owner)
            if table is not None and len(table) and not party.listed and party.leaving is None:
                raise AssertionError(f"owner {party.owner} holds blocks and could never be preempted")
