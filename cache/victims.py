"""Whom to preempt: who holds blocks, in which order they must give them up, and what that returns."""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from pagefork.cache.blocks import Ids
from pagefork.cache.grant import Quote
from pagefork.cache.lazy_heap import LazyHeap
from pagefork.cache.ledger import Ledger

RESCAN = 0.05
"""Seconds after which owners whose preemption would have freed nothing are looked at again."""

_RESCAN_EACH = 0.0005  # more for each of them, so that looking at many takes a small part of the time

Rank = tuple[float, int]
_ONE = np.int32(1)


class Party:
    """An owner as the arbiter sees it. `rank` orders operations, smaller first.

    stamp: its entries in heaps that bear another are stale. leaving: the references that it was told to return.
    """

    __slots__ = ("active", "leaving", "listed", "owner", "rank", "since", "stamp")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.rank: Rank = (0.0, 0)
        self.since = 0.0
        self.stamp = 0
        self.active = self.listed = False
        self.leaving: Ids | None = None


class Victims:
    """The owners that hold blocks, in the order of preemption, and those of them that are about to leave.

    Idle owners come first, longest idle first, then active ones, the last rank first. What a set of owners would free
    together is counted by block: a block is promised when all its holders are leaving.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stamps = count(1)
        self._idle: LazyHeap[Party] = LazyHeap(lambda stamp, party: party.stamp == stamp)
        self._active: LazyHeap[Party] = LazyHeap(lambda stamp, party: party.stamp == stamp)
        self._named: dict[int, Party] = {}
        self._leaving = np.zeros(ledger.pool.num_blocks, dtype=np.int32)
        self._aside: list[tuple[int, Party]] = []
        self._aside_since = 0.0

    @property
    def rescan_at(self) -> float | None:
        """When owners that were of no use should be looked at again; None without such."""
        if not self._aside:
            return None
        return self._aside_since + RESCAN + _RESCAN_EACH * len(self._aside)

    def enlist(self, party: Party, renew: bool = False) -> None:
        """Have the party among the candidates, if it holds anything. `renew`: its place has changed."""
        if renew:
            party.stamp, party.listed = next(self._stamps), False
        if party.listed or not self._holds(party):
            return
        party.listed = True
        if party.active:
            key, order = party.rank
            self._active.push((-key, -order), party.stamp, party)
        else:
            self._idle.push(party.since, party.stamp, party)

    def left(self, party: Party) -> None:
        """The party returns its references now, or is no victim any more."""
        if party.leaving is not None:
            self._unmark(party)
            del self._named[party.owner]

    def name(self, rank: Rank, quote: Quote, now: float) -> list[Party]:
        """Further victims for an operation of this rank, until with those named before they cover what it lacks.

        Each frees at least one block, alone or with the others, or saves a copy. When nobody is left to name they may
        cover less.
        """
        if (due := self.rescan_at) is not None and now >= due:
            self._look_again()
        # A block to be copied needs no copy once its other holders are gone: as good as one freed. And what is to be
        # adopted is nothing to be won.
        own = np.array([block for _, _, block in quote.replaced], dtype=np.int32)
        adopted = np.array([block for ids in quote.adopted for block in ids], dtype=np.int32)
        np.add.at(self._leaving, own, _ONE)
        np.subtract.at(self._leaving, adopted, _ONE)
        before = [party.leaving for party in self._named.values() if party.leaving is not None]
        promised = self._promised(np.unique(np.concatenate([own, *before])))
        chosen: list[Party] = []
        while promised < quote.short and (party := self._candidate(rank)) is not None:
            promised += self._mark(party)
            chosen.append(party)
        victims: list[Party] = []
        for party in reversed(chosen):
            returns = self._promised(party.leaving)
            if not returns or promised - returns >= quote.short:
                promised -= returns
                self._spare(party, returns, now)
            else:
                victims.append(party)
        np.add.at(self._leaving, adopted, _ONE)
        np.subtract.at(self._leaving, own, _ONE)
        victims.reverse()
        self._named.update((party.owner, party) for party in victims)
        return victims

    def check(self) -> None:
        """Raise AssertionError unless the counts are what the victims said to leave. Cost: all blocks."""
        leaving = np.zeros_like(self._leaving)
        for party in self._named.values():
            if party.leaving is None:
                raise AssertionError(f"owner {party.owner} was named and leaves nothing")
            np.add.at(leaving, party.leaving, _ONE)
        if not np.array_equal(leaving, self._leaving):
            raise AssertionError("what leaves is not what the victims hold")

    def _holds(self, party: Party) -> bool:
        table = self._ledger.table(party.owner)
        return table is not None and len(table) > 0

    def _candidate(self, rank: Rank) -> Party | None:
        """The next to preempt for an operation of this rank; it is listed no more."""
        for heap in (self._idle, self._active):
            while (party := heap.peek()) is not None:
                if party.active and party.rank <= rank:
                    break
                heap.pop()
                party.listed = False
                if party.leaving is None and self._holds(party):
                    return party
        return None

    def _promised(self, ids: Ids | None) -> int:
        """How many of these distinct blocks will have no holder once all that leave are gone."""
        if ids is None or not len(ids):
            return 0
        holders: npt.NDArray[np.int32] = self._ledger.pool.refcounts[ids] - self._ledger.index.published[ids]
        return int(np.count_nonzero((holders > 0) & (holders <= self._leaving[ids])))

    def _mark(self, party: Party) -> int:
        """Count the party's references as leaving; returns how many blocks that adds to the promised ones."""
        ids = self._ledger.held(party.owner).copy()
        before = self._promised(ids)
        np.add.at(self._leaving, ids, _ONE)
        party.leaving = ids
        return self._promised(ids) - before

    def _unmark(self, party: Party) -> None:
        if party.leaving is not None:
            np.subtract.at(self._leaving, party.leaving, _ONE)
            party.leaving = None

    def _spare(self, party: Party, returns: int, now: float) -> None:
        """Not needed after all; or of no use, since others hold all that it holds: to be looked at again later."""
        self._unmark(party)
        if returns:
            self.enlist(party)
            return
        if not self._aside:
            self._aside_since = now
        party.listed = True
        self._aside.append((party.stamp, party))

    def _look_again(self) -> None:
        aside, self._aside = self._aside, []
        for stamp, party in aside:
            if party.stamp == stamp:
                party.listed = False
                self.enlist(party)
