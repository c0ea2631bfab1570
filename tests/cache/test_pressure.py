"""Ledger, prefix index and arbiter on a pool that is too small, against a memory that says what each row was made of.

Some pools serve a model of windows: its owners trim their tables, and need no row that is out of the window. Some serve
one of several groups of layers, of which some have a window.

PAGEFORK_RUNS asks for more runs than the 200 of 100 steps each.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagefork.cache.arbiter import AGEING, Arbiter, Event, Expired, Granted, Preempt, Refused, Waiting, Yield
from pagefork.cache.blocks import BlockPool
from pagefork.cache.grant import Grant
from pagefork.cache.ledger import Ledger, first_needed
from pagefork.cache.prefix import PrefixIndex
from pagefork.cache.table import HOLE

PICKS = st.integers(0, 63)
# Two tokens, so that sequences meet by chance and the index has something to confuse.
TOKENS = st.lists(st.integers(0, 1), max_size=9)
GROUPS = st.sampled_from([(1, 0), (1, 0), (0, 1), (0, 1), (1, 1), (1, 2), (2, 1)])
"""How many groups of layers see all positions, and how many have a window."""
PATIENCE = st.none() | st.integers(1, 40)
RUNS = int(os.environ.get("PAGEFORK_RUNS", "200"))


@dataclass
class Sequence:
    """What an owner must read back: its tokens, of which the first `computed` are in its blocks."""

    owner: int
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    ticket: int | None = None
    wanted: list[int] = field(default_factory=list)
    priority: int = 0
    named: bool = False
    active: bool = False
    arrival: float = 0.0
    order: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        return self.arrival - self.priority * AGEING, self.order

    @property
    def next(self) -> int:
        """The lowest position at which it may compute a token."""
        return max(0, min(self.computed, len(self.tokens) - 1))


class Pressure(RuleBasedStateMachine):
    hash_values: ClassVar[int | None] = None

    @initialize(
        blocks=st.integers(6, 20),
        size=st.integers(1, 4),
        prefix=st.sampled_from([True, True, True, False]),
        eager=st.booleans(),
        groups=GROUPS,
        window=st.integers(1, 9),
    )
    def start(self, blocks: int, size: int, prefix: bool, eager: bool, groups: tuple[int, int], window: int) -> None:
        blocks *= sum(groups)
        self.windows = (None,) * groups[0] + (window,) * groups[1]
        self.ledger = Ledger(BlockPool(blocks, size), prefix, windows=self.windows)
        self.window = window if groups[1] else None
        values = self.hash_values
        if values is not None:
            index = PrefixIndex(self.ledger.pool, hasher=lambda parent, chunk: hash((parent, chunk)) % values)
            self.ledger.index = index
            self.ledger._roots = [index.root_of(str(group)) for group in range(len(self.windows))]
        self.arbiter = Arbiter(self.ledger, max_queue=6)
        self.size = size
        self.eager = eager
        # A row's K and V depend on all tokens up to it, so that is what a row of this memory holds, and the group.
        self.memory: list[tuple[int, ...] | None] = [None] * (blocks * size)
        self.live: dict[int, Sequence] = {}
        self.tickets: dict[int, Sequence] = {}
        self.owners = self.orders = 0
        self.now = 0.0

    # Sequences

    def pick(self, pick: int, waiting: bool = False) -> Sequence | None:
        some = [one for one in self.live.values() if waiting or one.ticket is None]
        return some[pick % len(some)] if some else None

    def tables(self, owner: int) -> list[list[int]]:
        tables = [self.ledger.table(owner, group) for group in range(len(self.windows))]
        return [[] if table is None else table.ids.tolist() for table in tables]

    def trimmed(self, owner: int) -> int:
        table = self.ledger.table(owner, -1)
        return 0 if table is None else table.trimmed

    def holds(self, owner: int) -> bool:
        return all(self.tables(owner))

    def low(self, position: int, window: int | None) -> int:
        """The first position that is read at `position` or later."""
        return 0 if window is None else max(0, position - window + 1)

    def new(self, tokens: list[int]) -> Sequence:
        self.owners += 1
        self.live[self.owners] = one = Sequence(self.owners, tokens)
        return one

    @rule(first=TOKENS, second=TOKENS, priority=st.integers(-1, 1), patience=PATIENCE)
    def open(self, first: list[int], second: list[int], priority: int, patience: int | None) -> None:
        one = self.new([])
        one.priority = priority
        self.ask(one, first + second, patience)

    @rule(pick=PICKS, more=TOKENS, patience=PATIENCE)
    def append(self, pick: int, more: list[int], patience: int | None) -> None:
        if (one := self.pick(pick)) is not None:
            self.ask(one, more, patience)

    @rule(picks=st.lists(PICKS, min_size=1, max_size=4), more=TOKENS)
    def append_to_some(self, picks: list[int], more: list[int]) -> None:
        for pick in picks:
            self.append(pick, more, None)

    def ask(self, one: Sequence, more: list[int], patience: int | None) -> None:
        """Compute what is pending and `more` tokens."""
        self.do_copies(one)
        if one.tokens + more:
            self.request(one, one.tokens + more, None if patience is None else self.now + patience)
            self.tick(0)

    def request(self, one: Sequence, wanted: list[int], deadline: float | None = None) -> None:
        start = min(one.computed, len(wanted) - 1)
        if not one.active:
            self.orders += 1
            one.active, one.arrival, one.order = True, self.now, self.orders
        before = self.ledger.available, self.tables(one.owner)
        answer = self.arbiter.request(
            one.owner,
            len(wanted),
            start,
            array("i", wanted),
            now=self.now,
            priority=one.priority,
            deadline=deadline,
        )
        one.wanted = wanted
        if isinstance(answer, Granted):
            assert not one.named
            if self.ledger.available < before[0]:
                assert all(one.rank < other.rank for other in self.tickets.values()), "passed by who waits"
            self.compute(one, answer.grant)
            return
        assert before == (self.ledger.available, self.tables(one.owner)), "not granted, nothing taken"
        if isinstance(answer, Waiting):
            one.ticket = answer.ticket
            self.tickets[answer.ticket] = one
        elif isinstance(answer, Refused):
            entries, windowed = -(-len(wanted) // self.size), len(self.windows) - self.windows.count(None)
            blocks = entries * len(self.windows) - self.trimmed(one.owner) * windowed
            assert (answer.reason == "too large") == (blocks > self.ledger.pool.num_blocks)
        else:
            assert one.named, "only a victim is told to yield at once"

    def compute(self, one: Sequence, grant: Grant) -> None:
        tables, refcounts = self.tables(one.owner), self.ledger.pool.refcounts
        assert [table[grant.first :] for table in tables] == grant.ids
        assert all(len(table) >= -(-len(one.wanted) // self.size) for table in tables)
        if grant.hit:
            trimmed = [0 if window is None else grant.trimmed for window in self.windows]
            assert [table.count(HOLE) for table in tables] == trimmed and grant.first == min(trimmed)
        for source, target, rows in grant.copies:
            assert 0 < rows < self.size and refcounts[source] >= 1 and refcounts[target] == 1
        one.copies = grant.copies
        start = min(one.computed, len(one.wanted) - 1)
        if grant.hit:
            assert one.computed == 0 and grant.hit < len(one.wanted), "a token is left to compute"
            start = grant.hit
        one.tokens = one.wanted
        for group, table in enumerate(tables):
            for position in range(start, len(one.tokens)):
                block = table[position // self.size]
                assert refcounts[block] == 1, "P3: only its owner writes a block, and no published one is written"
                self.memory[block * self.size + position % self.size] = (group, *one.tokens[: position + 1])
        one.computed = len(one.tokens)
        if self.eager and not one.copies:
            self.ledger.publish(one.owner, array("i", one.tokens), one.computed)

    def do_copies(self, one: Sequence) -> None:
        """Copies are done late, when their sources may have lost all holders but the pin."""
        for source, target, rows in one.copies:
            for row in range(rows):
                self.memory[target * self.size + row] = self.memory[source * self.size + row]
        one.copies = []
        available = self.ledger.available
        assert self.ledger.copied(one.owner) == self.ledger.available - available

    @rule(pick=PICKS, part=st.integers(0, 9))
    def publish(self, pick: int, part: int) -> None:
        one = self.pick(pick, waiting=True)
        if one is not None:
            self.do_copies(one)
            self.ledger.publish(one.owner, array("i", one.tokens), max(0, one.computed - (part if part > 6 else 0)))

    @rule(pick=PICKS, count=st.integers(1, 3), length=st.integers(0, 40))
    def fork(self, pick: int, count: int, length: int) -> None:
        one = self.pick(pick, waiting=True)
        if one is None:
            return
        self.do_copies(one)
        # Not shorter than what the owner still has a window for.
        shortest = self.trimmed(one.owner) * self.size + (self.window or 0) if self.trimmed(one.owner) else 0
        length = max(length % (one.computed + 1), min(shortest, one.computed))
        available = self.ledger.available
        children = [self.new(one.tokens[:length]) for _ in range(count)]
        self.arbiter.share(one.owner, [child.owner for child in children], length, self.now)
        for child in children:
            child.computed = length
        assert self.ledger.available == available

    @rule(pick=PICKS, length=st.integers(0, 40))
    def truncate(self, pick: int, length: int) -> None:
        one = self.pick(pick)
        if one is None or one.copies:
            return
        length %= len(one.tokens) + 1
        del one.tokens[length:]
        one.computed = min(one.computed, length)
        available = self.ledger.available
        assert self.ledger.shrink(one.owner, length) == self.ledger.available - available
        if self.low(one.next, self.window) < self.trimmed(one.owner) * self.size or not self.holds(one.owner):
            self.arbiter.release(one.owner)
            one.computed, one.named = 0, False
        self.tick(0)

    @rule(pick=PICKS, all_the_way=st.booleans())
    def trim(self, pick: int, all_the_way: bool) -> None:
        """Give back what is out of the window, waiting for more, told to leave, or with copies to do as it may be."""
        one = self.pick(pick, waiting=True)
        if one is None or self.window is None or not self.holds(one.owner):
            return
        first = min(first_needed(one.next, self.window, self.size), len(self.tables(one.owner)[0]) - 1)
        if not all_the_way:
            first //= 2
        available, tables, live = self.ledger.available, self.tables(one.owner), self.ledger.referenced
        assert self.ledger.trim(one.owner, first * self.size) == self.ledger.available - available
        before = self.trimmed(one.owner) if one.copies else tables[-1].count(HOLE)
        first = before if one.copies else max(first, before)
        for window, old, table in zip(self.windows, tables, self.tables(one.owner), strict=True):
            assert table == (old if window is None else [HOLE] * first + old[first:])
        assert self.ledger.trim(one.owner, first * self.size) == 0 and self.ledger.referenced <= live
        self.tick(0)

    @rule(pick=PICKS)
    def copied(self, pick: int) -> None:
        some = [one for one in self.live.values() if one.copies]
        if some:
            one = some[pick % len(some)]
            self.do_copies(one)
            self.tick(0)

    @rule(pick=PICKS)
    def finish(self, pick: int) -> None:
        one = self.pick(pick)
        if one is not None:
            one.active = False
            self.arbiter.idle(one.owner, self.now)
            self.tick(0)

    @precondition(lambda self: self.tickets)
    @rule(pick=PICKS)
    def withdraw(self, pick: int) -> None:
        ticket = sorted(self.tickets)[pick % len(self.tickets)]
        self.tickets.pop(ticket).ticket = None
        available = self.ledger.available
        assert self.arbiter.withdraw(ticket) and not self.arbiter.withdraw(ticket)
        assert self.ledger.available == available
        self.tick(0)

    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        one = self.pick(pick, waiting=True)
        if one is not None:
            del self.live[one.owner]
            if one.ticket is not None:
                del self.tickets[one.ticket]
            available = self.ledger.available
            assert self.arbiter.forget(one.owner) == self.ledger.available - available
            assert self.arbiter.forget(one.owner) == 0
            self.tick(0)

    @rule(pick=PICKS)
    def obey(self, pick: int) -> None:
        """A victim, told to some time ago, releases everything; some ask again at once."""
        some = [one for one in self.live.values() if one.named]
        if some:
            one = some[pick % len(some)]
            self.release(one)
            if pick % 2 and one.active and one.tokens:
                self.request(one, one.tokens)
            self.tick(0)

    def release(self, one: Sequence) -> None:
        one.named = False
        one.copies = []
        one.computed = 0
        self.arbiter.release(one.owner)
        assert not self.holds(one.owner) and self.ledger.table(one.owner) is None

    @rule(seconds=st.floats(0.01, 20))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        events = self.arbiter.tick(self.now)
        for event in events:
            self.hear(event)
        due = self.arbiter.next_deadline
        assert due is None or due > self.now

    def hear(self, event: Event) -> None:
        if isinstance(event, Preempt):
            one = self.live[event.owner]
            assert one.ticket is None and not one.named and self.holds(one.owner)
            self.name(one)
            return
        one = self.tickets.pop(event.ticket)
        assert one.owner == event.owner
        one.ticket = None
        if isinstance(event, Granted):
            self.compute(one, event.grant)
        elif isinstance(event, Yield):
            assert not one.named and self.holds(one.owner)
            self.name(one)
        else:
            assert isinstance(event, Expired)

    def name(self, one: Sequence) -> None:
        one.named = True
        head = min(other.rank for other in self.tickets.values())
        assert not one.active or one.rank > head, "an operation gives way only to one that ranks before it"

    # What must hold

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        self.arbiter.check()
        assert self.arbiter.waiting == len(self.tickets)
        for block, count in enumerate(self.ledger.pool.refcounts.tolist()):
            if not count:
                self.memory[block * self.size : (block + 1) * self.size] = [None] * self.size

    @invariant()
    def everyone_reads_its_own(self) -> None:
        for one in getattr(self, "live", {}).values():
            for group, (window, table) in enumerate(zip(self.windows, self.tables(one.owner), strict=True)):
                for position in range(self.low(one.next, window), one.computed if not one.copies else 0):
                    row = self.memory[table[position // self.size] * self.size + position % self.size]
                    assert row == (group, *one.tokens[: position + 1])

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.everybody_is_served()
        for owner in list(self.live):
            self.arbiter.forget(owner)
        assert self.ledger.available == self.ledger.pool.num_blocks and self.ledger.owners == 0
        self.ledger.index.evict(self.ledger.cached)
        assert self.ledger.pool.num_free == self.ledger.pool.num_blocks and len(self.ledger.index) == 0
        self.ledger.check()

    def everybody_is_served(self) -> None:
        """P6: with whoever runs coming to an end, all that wait are served without a deadline, and none is closed."""
        wait = list(self.live.values())
        for one in wait:
            self.do_copies(one)
        unserved = {one.owner for one in self.tickets.values()}
        for _ in range(200):
            for one in wait:
                if one.named:
                    self.release(one)
                if one.ticket is None and one.active:
                    if one.owner in unserved and one.computed < len(one.wanted):
                        self.request(one, one.wanted)
                    if one.ticket is None and not one.named:
                        unserved.discard(one.owner)
                        self.do_copies(one)
                        one.active = False
                        self.arbiter.idle(one.owner, self.now)
            self.tick(0.06)
            if not self.tickets and not any(one.named for one in wait):
                break
        assert not self.tickets and not self.arbiter.waiting


class Colliding(Pressure):
    """The same with chain hashes of three values."""

    hash_values = 3


# Steps take longer than usual examples, and on a busy machine longer still.
STEPS = settings(stateful_step_count=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Pressure.TestCase.settings = settings(STEPS, max_examples=RUNS)
Colliding.TestCase.settings = settings(STEPS, max_examples=max(1, RUNS // 5))
TestPressure = Pressure.TestCase
TestColliding = Colliding.TestCase
