"""A pool and several tables under random growth, forks, writes, truncations and closes, against a shadow of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.table import BlockTable

SIZES = st.integers(0, 9)
PICKS = st.integers(0, 7)
LENGTHS = st.integers(0, 40)


@dataclass
class Live:
    """A table and the tokens that its sequence must hold."""

    table: BlockTable
    tokens: list[float] = field(default_factory=list)


class Sharing(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(4, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        # One number per slot. NaN wherever no sequence holds a token, so that any stray read shows.
        self.store = np.full((num_blocks, block_size), np.nan)
        self.live = [Live(BlockTable(block_size)) for _ in range(2)]
        self.next_token = 0.0

    def pick(self, pick: int) -> Live:
        return self.live[pick % len(self.live)]

    def release(self, ids: np.ndarray) -> None:
        self.pool.free(ids)
        self.store[ids[self.pool.refcounts[ids] == 0]] = np.nan
        for one in self.live:
            table = one.table
            tail = table.slots(table.length, table.capacity)
            self.store.reshape(-1)[tail[self.pool.refcounts[tail // table.block_size] == 1]] = np.nan

    @rule()
    def open_empty(self) -> None:
        self.live.append(Live(BlockTable(self.pool.block_size)))

    @rule(pick=PICKS, ahead=SIZES)
    def grant_ahead(self, pick: int, ahead: int) -> None:
        table = self.pick(pick).table
        missing, free = table.missing(table.length + ahead), self.pool.num_free
        try:
            table.grow(self.pool.allocate(missing))
        except BlocksExhausted:
            assert missing > free == self.pool.num_free
        else:
            assert table.capacity >= table.length + ahead

    @rule(pick=PICKS, n=SIZES)
    def write(self, pick: int, n: int) -> None:
        one = self.pick(pick)
        start, stop = one.table.length, one.table.length + n
        try:
            one.table.grow(self.pool.allocate(one.table.missing(stop)))
            entries = one.table.shared(start, stop, self.pool.refcounts)
            fresh = self.pool.allocate(len(entries))
        except BlocksExhausted:
            self.release(one.table.truncate(start))
            return
        for index, block in zip(entries.tolist(), fresh.tolist(), strict=True):
            filled = one.table.filled(index, start)
            old = one.table.replace(index, block)
            self.store[block, :filled] = self.store[old, :filled]
            self.release(np.array([old]))
        slots = one.table.slots(start, stop)
        assert (self.pool.refcounts[slots // self.pool.block_size] == 1).all()
        assert np.isnan(self.store.reshape(-1)[slots]).all()
        one.tokens += [self.next_token + i for i in range(n)]
        self.store.reshape(-1)[slots] = one.tokens[start:]
        self.next_token += n
        one.table.advance(n)

    @rule(pick=PICKS, length=LENGTHS)
    def fork(self, pick: int, length: int) -> None:
        parent = self.pick(pick)
        length %= len(parent.tokens) + 1
        free = self.pool.num_free
        child = parent.table.fork(length)
        self.pool.retain(child.ids)
        self.live.append(Live(child, parent.tokens[:length]))
        assert self.pool.num_free == free

    @rule(pick=PICKS, length=LENGTHS)
    def truncate(self, pick: int, length: int) -> None:
        one = self.pick(pick)
        length %= len(one.tokens) + 1
        del one.tokens[length:]
        self.release(one.table.truncate(length))

    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        one = self.live.pop(pick % len(self.live))
        self.release(one.table.truncate(0))
        assert len(one.table) == 0
        if not self.live:
            self.open_empty()

    @invariant()
    def every_reference_is_a_table_entry(self) -> None:
        named = np.concatenate([np.empty(0, np.int32), *(one.table.ids for one in self.live)])
        assert np.array_equal(self.pool.refcounts, np.bincount(named, minlength=self.pool.num_blocks))
        assert self.pool.num_used == np.count_nonzero(self.pool.refcounts)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks

    @invariant()
    def every_sequence_holds_its_tokens(self) -> None:
        for one in self.live:
            assert one.table.length == len(one.tokens)
            assert self.store.reshape(-1)[one.table.slots(0, one.table.length)].tolist() == one.tokens

    def teardown(self) -> None:
        for one in getattr(self, "live", []):
            self.release(one.table.truncate(0))
        if hasattr(self, "pool"):
            free = self.pool.allocate(self.pool.num_free)
            assert sorted(free.tolist()) == list(range(self.pool.num_blocks))


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
