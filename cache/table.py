"""The block table: which blocks hold the positions of one sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefork.cache.blocks import Ids, IdsLike

HOLE = -1
"""Stands in a table where a block was given back."""


class TableError(Exception):
    """A length, position or index that the table does not cover; the table is as it was."""


class BlockTable:
    """Block ids of one sequence, in order, and the number of tokens they hold.

    Plain data: no reference is counted here; whoever owns the table retains and frees through a BlockPool.
    The blocks may cover more positions (`capacity`) than there are tokens (`length`): granted, not yet filled.
    The first `trimmed` entries are holes: their positions are past and will not be read. The last is never one.
    """

    __slots__ = ("_block_size", "_buffer", "_count", "_length", "_trimmed")

    def __init__(self, block_size: int) -> None:
        """`block_size`: token positions per block. ValueError unless positive."""
        if block_size < 1:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self._block_size = block_size
        self._buffer: Ids = np.empty(8, dtype=np.int32)
        self._count = 0
        self._length = 0
        self._trimmed = 0

    def __len__(self) -> int:
        """How many entries the table has, holes included."""
        return self._count

    def __repr__(self) -> str:
        return f"BlockTable({self._length} tokens in {self._count} blocks of {self._block_size})"

    @property
    def block_size(self) -> int:
        """Token positions per block."""
        return self._block_size

    @property
    def length(self) -> int:
        """Tokens in the sequence: positions `0 .. length-1` hold data."""
        return self._length

    @property
    def capacity(self) -> int:
        """Positions that the table's entries cover."""
        return self._count * self._block_size

    @property
    def trimmed(self) -> int:
        """How many entries at the start are holes."""
        return self._trimmed

    @property
    def ids(self) -> Ids:
        """The block ids, int32 `[len(table)]`, holes included: a read-only view, valid until the table next changes."""
        view = self._buffer[: self._count]
        view.flags.writeable = False
        return view

    @property
    def live(self) -> Ids:
        """`ids` without the holes: the blocks that the table names."""
        return self.ids[self._trimmed :]

    def blocks_for(self, length: int) -> int:
        """How many blocks `length` tokens occupy."""
        return -(-length // self._block_size)

    def readable(self, length: int) -> int:
        """`length`, or 0 where the entries of so many tokens are holes alone."""
        return length if length > self._trimmed * self._block_size else 0

    def missing(self, length: int) -> int:
        """How many more blocks the table needs to cover `length` tokens; 0 when it does."""
        return max(0, self.blocks_for(length) - self._count)

    def grow(self, ids: IdsLike) -> None:
        """Append blocks, int32 `[n]`; `length` stays."""
        stop = self._count + len(ids)
        if stop > len(self._buffer):
            # Doubling makes a long generation's appends cost O(1) each.
            buffer = np.empty(max(stop, 2 * len(self._buffer)), dtype=np.int32)
            buffer[: self._count] = self._buffer[: self._count]
            self._buffer = buffer
        self._buffer[self._count : stop] = ids
        self._count = stop

    def skip(self, entries: int) -> None:
        """Begin with so many holes, to be followed by blocks. TableError unless the table is empty."""
        if self._count:
            raise TableError(f"cannot skip entries of a table that has {self._count}")
        self.grow(np.full(entries, HOLE, dtype=np.int32))
        self._trimmed = entries

    def trim(self, start: int) -> Ids:
        """Make holes of the entries whose positions all lie before `start`; returns their ids, int32.

        The owner must free them. TableError when that would be all entries. Cost: the ids returned.
        """
        first = self._trimmed
        stop = max(start // self._block_size, first)
        if stop >= max(self._count, 1):
            raise TableError(f"cannot trim to position {start} of {self.capacity}: nothing would be left")
        dropped = self._buffer[first:stop].copy()
        self._buffer[first:stop] = HOLE
        self._trimmed = stop
        return dropped

    def advance(self, tokens: int) -> None:
        """Count `tokens` more as written. TableError when they would not fit the blocks."""
        length = self._length + tokens
        if tokens < 0 or length > self.capacity:
            raise TableError(f"cannot advance by {tokens}: {self._length} of {self.capacity} positions are filled")
        self._length = length

    def fork(self, length: int | None = None) -> BlockTable:
        """A table of the first `length` tokens (default: all) that names the same blocks; retain its `live`.

        Granted blocks past `length` are left out. Where only holes are left the table is empty. TableError when
        `length` exceeds this table's.
        """
        length = self._length if length is None else length
        self._check_length(length)
        length = self.readable(length)
        child = BlockTable.__new__(BlockTable)
        child._block_size = self._block_size
        child._count = self.blocks_for(length)
        child._length = length
        child._trimmed = self._trimmed if length else 0
        child._buffer = self._buffer[: max(child._count, 8)].copy()
        return child

    def truncate(self, length: int) -> Ids:
        """Keep the first `length` tokens; returns the ids dropped from the end, int32, which the owner must free.

        Granted blocks past `length` are dropped too, so `truncate(table.length)` gives back what is unfilled. Where
        only holes would be left the table becomes empty. TableError when `length` exceeds the table's.
        """
        self._check_length(length)
        length = self.readable(length)
        count = self.blocks_for(length)
        dropped = self._buffer[max(count, self._trimmed) : self._count].copy()
        self._count = min(count, self._count)
        self._length = length
        self._trimmed = min(self._trimmed, count)
        return dropped

    def shared(self, start: int, stop: int, refcounts: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """Indices of the entries that must be replaced before positions `[start, stop)` are written.

        Those are the entries which cover these positions and whose block has other holders: its count in
        `refcounts` (int32 `[num_blocks]`) is above 1. TableError when the table does not cover the range.
        """
        self._check_range(start, stop)
        if start == stop:
            return np.empty(0, dtype=np.intp)
        first, last = start // self._block_size, self.blocks_for(stop)
        if last - first == 1:  # the write of a decode step
            return np.array([first] if refcounts[self._buffer[first]] > 1 else [], dtype=np.intp)
        return np.flatnonzero(refcounts[self._buffer[first:last]] > 1) + first

    def filled(self, index: int, start: int) -> int:
        """Rows of entry `index` that lie before position `start`: what a copy of its block must carry over.

        Rows at and past `start` are about to be written, or are past the end once they are.
        """
        self._check_index(index)
        return min(max(start - index * self._block_size, 0), self._block_size)

    def replace(self, index: int, block: int) -> int:
        """Make entry `index` name `block`; returns the id that it named. TableError when there is no such entry."""
        self._check_index(index)
        old = int(self._buffer[index])
        self._buffer[index] = block
        return old

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Slots of positions `[start, stop)`: `block * block_size + offset`, int32 `[stop - start]`.

        TableError when the table does not cover the range.
        """
        self._check_range(start, stop)
        size = self._block_size
        if stop - start == 1:
            return np.array([self._buffer[start // size] * size + start % size], dtype=np.int32)
        index, offset = np.divmod(np.arange(start, stop, dtype=np.int32), np.int32(size))
        return self._buffer[index] * np.int32(size) + offset

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise TableError(f"length {length} is outside 0..{self._length}")

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.capacity:
            raise TableError(f"positions [{start}, {stop}) are outside the {self.capacity} that the blocks cover")
        if start < self._trimmed * self._block_size and start < stop:
            raise TableError(f"the blocks of positions before {self._trimmed * self._block_size} were given back")

    def _check_index(self, index: int) -> None:
        if not self._trimmed <= index < self._count:
            raise TableError(f"entry {index} is outside the table's [{self._trimmed}, {self._count})")
