"""A heap whose entries may be given up without being searched for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Smallest rank first. An entry that is not `fresh` any more is dropped when it comes up.

    All stale ones are dropped at once when they could be the most, so memory stays within twice that of the fresh, and
    a push costs the logarithm of their number, amortised. `stamp` tells an item's entries apart and breaks ties.
    """

    def __init__(self, fresh: Callable[[int, T], bool]) -> None:
        """`fresh(stamp, item)`: whether the entry still counts."""
        self._fresh = fresh
        self._entries: list[tuple[Any, int, T]] = []
        self._kept = 0

    def push(self, rank: Any, stamp: int, item: T) -> None:
        heapq.heappush(self._entries, (rank, stamp, item))
        if len(self._entries) > 2 * self._kept + 64:
            self._entries = [entry for entry in self._entries if self._fresh(entry[1], entry[2])]
            heapq.heapify(self._entries)
            self._kept = len(self._entries)

    def peek(self) -> T | None:
        """The first item, or None."""
        entries = self._entries
        while entries and not self._fresh(entries[0][1], entries[0][2]):
            heapq.heappop(entries)
        return entries[0][2] if entries else None

    def pop(self) -> None:
        """Drop the entry of which `peek` just gave the item."""
        heapq.heappop(self._entries)
