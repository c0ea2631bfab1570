"""Ledger: who holds which block, against a model that remembers every token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.ledger import Ledger, first_needed
from pagefork.cache.table import HOLE

BLOCKS, SIZE = 12, 3


class Sharing(RuleBasedStateMachine):
    """Owners write distinct tokens through their tables; `content` is the memory, `said` what each must read back."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BlockPool(BLOCKS, SIZE), windows=(SIZE,))
        self.content = np.full(BLOCKS * SIZE, -1)
        self.said: dict[int, list[int]] = {}
        self.due: dict[int, list[tuple[int, int, int]]] = {}
        self.clock = 0
        self.owners = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.said)))

    @rule()
    def open(self) -> None:
        self.owners += 1
        self.said[self.owners] = []

    @precondition(lambda self: self.said)
    @rule(data=st.data(), more=st.integers(0, 7), back=st.integers(0, 4))
    def write(self, data: st.DataObject, more: int, back: int) -> None:
        owner = self.pick(data)
        if self.due.get(owner):
            return
        start = max(self.unread(owner), len(self.said[owner]) - back)
        stop = start + more
        if stop < len(self.said[owner]):
            return
        before = self.ledger.pool.refcounts.copy(), list(self.table(owner))
        try:
            grant = self.ledger.reserve(owner, stop, start)
        except BlocksExhausted:
            assert before[0].tolist() == self.ledger.pool.refcounts.tolist()
            assert before[1] == self.table(owner)
            return
        assert self.table(owner)[grant.first :] == grant.ids[0]
        assert before[1][: grant.first] == self.table(owner)[: grant.first]
        assert len(grant.copies) <= 1, "at most the partial block is copied"
        self.due[owner] = list(grant.copies)
        for source, target, rows in grant.copies:
            assert 0 < rows < SIZE
            assert self.ledger.pool.refcounts[source] >= 2, "a copy's source is pinned"
            self.content[target * SIZE : target * SIZE + rows] = self.content[source * SIZE : source * SIZE + rows]
        for position in range(start, stop):
            block = self.table(owner)[position // SIZE]
            assert self.ledger.pool.refcounts[block] == 1, "P3: only its owner writes a block"
            self.clock += 1
            self.content[block * SIZE + position % SIZE] = self.clock
            self.said[owner][position : position + 1] = [self.clock]

    @precondition(lambda self: self.said)
    @rule(data=st.data(), count=st.integers(1, 3))
    def share(self, data: st.DataObject, count: int) -> None:
        owner = self.pick(data)
        length = data.draw(st.integers(0, len(self.said[owner])))
        free = self.ledger.pool.num_free
        children = [self.owners + 1 + i for i in range(count)]
        self.owners += count
        self.ledger.share(owner, children, length)
        assert self.ledger.pool.num_free == free, "sharing takes no block"
        for child in children:
            self.said[child] = self.said[owner][: length if length > self.unread(owner) else 0]

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        length = data.draw(st.integers(0, len(self.said[owner])))
        if length <= self.unread(owner):
            length = 0
        free = self.ledger.pool.num_free
        assert self.ledger.shrink(owner, length) == self.ledger.pool.num_free - free
        del self.said[owner][length:]
        assert len(self.table(owner)) == -(-length // SIZE)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """Positions before a start are never read again."""
        owner = self.pick(data)
        table = self.table(owner)
        if not table:
            return
        start = data.draw(st.integers(0, (len(table) - 1) * SIZE))
        free = self.ledger.pool.num_free
        assert self.ledger.trim(owner, start) == self.ledger.pool.num_free - free
        gone = max(start // SIZE, table.count(HOLE))
        assert self.table(owner) == [HOLE] * gone + table[gone:]

    def unread(self, owner: int) -> int:
        """Positions at the start that were given back."""
        return self.table(owner).count(HOLE) * SIZE

    @precondition(lambda self: any(self.due.values()))
    @rule(data=st.data())
    def copied(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(owner for owner, due in self.due.items() if due)))
        free = self.ledger.pool.num_free
        assert self.ledger.copied(owner) == self.ledger.pool.num_free - free
        self.due.pop(owner)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.ledger.release(owner)
        assert self.ledger.release(owner) == 0, "released once, an owner holds nothing"
        self.said.pop(owner)
        self.due.pop(owner, None)

    def table(self, owner: int) -> list[int]:
        table = self.ledger.table(owner)
        return [] if table is None else table.ids.tolist()

    @invariant()
    def conserved(self) -> None:
        self.ledger.check()
        held = Counter(block for owner in self.said for block in self.table(owner) if block != HOLE)
        held.update(source for due in self.due.values() for source, _, _ in due)
        assert dict(held) == {b: int(n) for b, n in enumerate(self.ledger.pool.refcounts) if n}

    @invariant()
    def content_is_each_owners_own(self) -> None:
        for owner, said in self.said.items():
            table, first = self.table(owner), self.unread(owner)
            read = [int(self.content[table[p // SIZE] * SIZE + p % SIZE]) for p in range(first, len(said))]
            assert read == said[first:]

    def teardown(self) -> None:
        for owner in self.said:
            self.ledger.release(owner)
        assert self.ledger.pool.num_free == BLOCKS and self.ledger.owners == 0


Sharing.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSharing = Sharing.TestCase


def test_an_owner_that_was_refused_its_first_block_holds_nothing() -> None:
    ledger = Ledger(BlockPool(2, 4))
    ledger.reserve(1, 8)
    with pytest.raises(BlocksExhausted):
        ledger.reserve(2, 1)
    assert ledger.table(2) is None and ledger.release(2) == 0
    ledger.check()


def test_a_source_outlives_its_last_owner_until_the_copy_is_done() -> None:
    ledger = Ledger(BlockPool(4, 4))
    ledger.reserve(1, 3, 0)
    ledger.share(1, [2], 3)
    ((source, target, rows),) = ledger.reserve(2, 4, 3).copies
    assert (target, rows) == (1, 3)
    ledger.release(1)
    assert source not in ledger.reserve(3, 8, 0).ids[0]
    assert ledger.copied(2) == 1
    assert ledger.reserve(3, 12, 8).ids == [[source]]


def test_copies_are_counted_by_block_and_by_row() -> None:
    ledger = Ledger(BlockPool(8, 4))
    ledger.reserve(1, 6, 0)
    ledger.share(1, [2, 3], 6)
    ledger.reserve(2, 7, 6)
    ledger.reserve(3, 7, 6)
    assert (ledger.copies, ledger.copied_rows) == (2, 4)
    ledger.reserve(1, 7, 6)
    assert ledger.copies == 3, "both sources are pinned still"


def test_check_finds_a_reference_that_nobody_holds() -> None:
    ledger = Ledger(BlockPool(4, 4))
    ledger.reserve(1, 4)
    ledger.pool.retain([0])
    with pytest.raises(AssertionError, match="refcounts"):
        ledger.check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_first_entry_needed_holds_the_start_of_the_window_of_the_block_before(window: int, size: int) -> None:
    for position in range(40):
        first = first_needed(position, window, size)
        oldest = max(0, position - position % size - max(window, 2) + 1)
        assert first * size <= oldest < (first + 1) * size


def test_trimmed_blocks_that_were_published_are_kept_until_others_need_them() -> None:
    ledger = Ledger(BlockPool(5, 2), windows=(3,))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    ledger.reserve(1, 8, 0)
    ledger.publish(1, tokens, 8)
    assert ledger.trim(1, 5) == 2
    assert (ledger.cached, ledger.referenced, ledger.span(1, 8), ledger.span(1, 11)) == (2, 2, 2, 4)
    grant = ledger.reserve(2, 9, 0, [*tokens, 9])
    assert (grant.first, len(grant.ids[0]), grant.hit) == (3, 2, 8), "of the prefix it takes the end that it reads"
    ledger.check()
    ledger.reserve(1, 10, 8)
    assert ledger.evictions == 1 and ledger.index.lookup(tokens) == [0], "a head is kept before what comes after it"
    ledger.publish(1, [*tokens, 9, 10], 10)
    assert len(ledger.index) == 1, "what follows a block that is gone stays unpublished"
    ledger.check()
    for owner in (1, 2):
        ledger.release(owner)
    assert ledger.available == 5 and ledger.cached == 1


def test_a_trimmed_prefix_loses_its_end_first_once_nobody_uses_it() -> None:
    ledger = Ledger(BlockPool(12, 4), windows=(8,))
    tokens = list(range(40))
    ledger.reserve(1, 40, 0)
    ledger.publish(1, tokens, 40)
    for position in range(0, 40, 4):
        ledger.trim(1, first_needed(position, 8, 4) * 4)
    ledger.release(1)
    ledger.reserve(2, 12, 0)
    assert ledger.evictions == 1 and len(ledger.index.lookup(tokens)) == 9
    ledger.check()


def test_trimming_an_owner_without_blocks_does_nothing() -> None:
    ledger = Ledger(BlockPool(2, 4))
    assert ledger.trim(7, 100) == 0 and ledger.span(7, 5) == 2
