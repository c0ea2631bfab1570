"""What an owner asks a ledger for would take, and what it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefork.cache.prefix import Chain


@dataclass(frozen=True)
class Grant:
    """Each of an owner's tables from entry `first` on, and the copies (source, destination, filled rows) due before a
    write.

    hit: tokens at the tables' start whose K and V are in their blocks already, found in the prefix index. trimmed:
    with a hit, how many entries at the start of the tables with a window are holes.
    """

    first: int
    ids: list[list[int]]
    copies: list[tuple[int, int, int]]
    hit: int = 0
    trimmed: int = 0


@dataclass(slots=True)
class Quote:
    """What a `reserve` would take now: `new` blocks, when at most `spare` can be had. Good until the ledger changes.

    revived: idle blocks that it would adopt, not among those to spare. chains, adopted: for each table the published
    chain that it would begin with, all of one depth, and the blocks of it that the owner would hold. replaced: (table,
    entry, block) that would get a fresh block. withdrawn: block ids that would be unpublished and written in place.
    """

    new: int
    spare: int
    revived: int = 0
    chains: Sequence[Chain] = ()
    adopted: Sequence[Sequence[int]] = ()
    replaced: Sequence[tuple[int, int, int]] = ()
    withdrawn: Sequence[int] = ()

    @property
    def short(self) -> int:
        """Blocks that others must give up first; 0 when the reserve can be met."""
        return max(0, self.new - self.spare)

    @property
    def takes(self) -> int:
        """Blocks that would not be available to others any more."""
        return self.new + self.revived
