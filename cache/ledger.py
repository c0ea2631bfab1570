"""The truth about who holds which block. No event loop, no model: the allocator actor and the simulator drive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.table import BlockTable


@dataclass(frozen=True)
class Grant:
    """An owner's table from entry `first` on, and the copies (source, destination, filled rows) due before a write."""

    first: int
    ids: list[int]
    copies: list[tuple[int, int, int]]


class Ledger:
    """Tables by owner over one pool. Every call takes effect whole or, raising, not at all.

    An owner comes into being with its first `reserve` or as a child of `share`; `release` returns all that it
    holds, pins included. A copy's source stays pinned until `copied`, so nobody overwrites it before it was read.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.copies = 0
        self.copied_rows = 0
        self._tables: dict[int, BlockTable] = {}
        self._pins: dict[int, list[int]] = {}

    @property
    def owners(self) -> int:
        return len(self._tables)

    def table(self, owner: int) -> BlockTable | None:
        """The owner's table, not to be changed; None for an owner that holds nothing."""
        return self._tables.get(owner)

    def reserve(self, owner: int, length: int, write_from: int | None = None) -> Grant:
        """Cover `length` tokens; with `write_from`, make the blocks of positions `[write_from, length)` its own.

        A block shared with others is replaced by a fresh one and a copy of its rows before `write_from`. All or
        nothing: BlocksExhausted when the pool has too few free blocks.
        """
        table = self._tables.get(owner)
        if table is None:
            table = BlockTable(self.pool.block_size)
        length = max(length, table.length)
        missing = table.missing(length)
        replaced: list[int] = []
        if write_from is not None and write_from < table.capacity:
            stop = min(length, table.capacity)
            replaced = table.shared(write_from, stop, self.pool.refcounts).tolist()
        fresh = self.pool.allocate(len(replaced) + missing)
        first = min([len(table), *replaced])
        copies = []
        for index, block in zip(replaced, fresh.tolist(), strict=False):
            old = table.replace(index, block)
            filled = table.filled(index, write_from or 0)
            if filled:
                copies.append((old, block, filled))
                self._pins.setdefault(owner, []).append(old)
            else:
                self.pool.free([old])
        table.grow(fresh[len(replaced) :])
        table.advance(length - table.length)
        self._tables[owner] = table
        self.copies += len(copies)
        self.copied_rows += sum(filled for _, _, filled in copies)
        return Grant(first, table.ids[first:].tolist(), copies)

    def share(self, owner: int, children: Sequence[int], length: int) -> None:
        """Give each child a table of the owner's first `length` tokens: the same blocks, one more reference each."""
        table = self._tables.get(owner) or BlockTable(self.pool.block_size)
        for child in children:
            copy = table.fork(min(length, table.length))
            self.pool.retain(copy.ids)
            self._tables[child] = copy

    def shrink(self, owner: int, length: int) -> int:
        """Keep the blocks of the first `length` tokens; returns how many blocks became free."""
        table = self._tables.get(owner)
        if table is None or length > table.length:
            return 0
        return self.pool.free(table.truncate(length))

    def copied(self, owner: int) -> int:
        """The owner's copies are done: let their sources go. Returns how many blocks became free."""
        return self.pool.free(self._pins.pop(owner, []))

    def release(self, owner: int) -> int:
        """Return all that the owner holds; an unknown owner holds nothing. Returns how many blocks became free."""
        freed = self.copied(owner)
        table = self._tables.pop(owner, None)
        return freed + (self.pool.free(table.ids) if table is not None else 0)

    def check(self) -> None:
        """Raise AssertionError unless refcounts equal what the tables and pins name (P1). Cost: all blocks."""
        expected = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for table in self._tables.values():
            np.add.at(expected, table.ids, 1)
        for pins in self._pins.values():
            np.add.at(expected, pins, 1)
        if not np.array_equal(expected, self.pool.refcounts):
            wrong = np.flatnonzero(expected != self.pool.refcounts)
            raise AssertionError(f"refcounts differ from what is held at blocks {wrong[:8].tolist()}")
        if self.pool.num_free + int((expected > 0).sum()) != self.pool.num_blocks:
            raise AssertionError("free and held blocks do not add up to the pool")


__all__ = ["BlocksExhausted", "Grant", "Ledger"]
