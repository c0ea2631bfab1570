"""What a sequence holds of the pool: its block tables, and how far K and V in it are computed and published."""

from __future__ import annotations

import array
from collections.abc import Callable

from pagefork.cache.ledger import first_needed
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.errors import PoolExhausted
from pagefork.runtime.groups import Window
from pagefork.runtime.messages import (
    Copied,
    Exhausted,
    Granted,
    Idle,
    Publish,
    Release,
    Reserve,
    Shrink,
    Surrender,
    Trim,
    Yielded,
)

Tokens = array.array  # of C ints
Answer = Granted | Yielded | Exhausted


class Holdings:
    """The sequence's half of what it and the allocator say to each other. The allocator's ledger is the truth.

    There is a table for each group of layers, and all have as many `entries`. The first `computed` tokens have K and V
    in their blocks. `tokens` gives all the sequence has. Of the tables with a window, the first `trimmed` entries name
    blocks no more: they were given back, and hold 0.
    """

    def __init__(
        self,
        owner: int,
        allocator: Allocator,
        block_size: int,
        tokens: Callable[[], Tokens[int]],
        *,
        groups: int = 1,
        priority: float = 0.0,
        window: Window | None = None,
    ) -> None:
        self.tables = [Tokens("i") for _ in range(groups)]
        self.computed = 0
        self.trimmed = 0
        self._owner = owner
        self._allocator = allocator
        self._block_size = block_size
        self._tokens = tokens
        self._priority = priority
        self._window = window
        self._published = 0
        self._active = False

    @property
    def entries(self) -> int:
        """How many each table has."""
        return len(self.tables[0])

    @property
    def capacity(self) -> int:
        """Positions that the blocks cover."""
        return self.entries * self._block_size

    def goes_on(self, length: int) -> bool:
        """Whether a sequence of its first `length` tokens can go on with these blocks.

        Not where that needs some that were trimmed: a layer reads a window of what the layer below made of a window
        before it, so K and V are the same only if they are computed from the start.
        """
        return self.trimmed <= self._needed(min(self.computed, length - 1))

    def inherit(self, parent: Holdings, length: int) -> None:
        """Begin with what `parent` holds for its first `length` tokens."""
        self.tables = [table[: -(-length // self._block_size)] for table in parent.tables]
        self.computed = min(parent.computed, length)
        self.trimmed = parent.trimmed if self.entries else 0

    def reach(self, length: int) -> int:
        """For how many of `length` tokens to ask for blocks now: with a window, for no more than are held at once."""
        window = self._window
        return length if window is None else min(length, max(self.computed, window.size) + window.part)

    async def ask(
        self,
        length: int,
        write_from: int | None = None,
        tokens: Tokens[int] | None = None,
        *,
        patience: float,
        yielded: Callable[[], None],
    ) -> Answer:
        """Ask for blocks for `length` tokens, those from `write_from` on its own; see Reserve.

        Cancelled, a grant that came all the same is kept, and for Yielded `yielded` is called.
        """

        def late(answer: Answer) -> None:
            if isinstance(answer, Granted):
                self.forget(self.adopt(answer), write_from or 0)
            elif isinstance(answer, Yielded):
                yielded()

        if write_from is not None:
            self._clip(write_from)
        self._active = True
        reserve = Reserve(
            self._owner,
            length,
            write_from,
            tokens=None if self.entries else tokens,
            priority=self._priority,
            patience=patience,
        )
        answer: Answer = await self._allocator.ask(reserve, late=late)
        return answer

    def adopt(self, answer: Granted | Exhausted) -> list[tuple[int, int, int]]:
        """Take a grant into the tables; returns the copies to submit. Raises PoolExhausted."""
        if isinstance(answer, Exhausted):
            raise PoolExhausted(answer.wanted, answer.free, answer.total)
        if answer.hit:
            self.tables = [Tokens("i", [0]) * answer.first for _ in self.tables]
        for table, ids in zip(self.tables, answer.ids, strict=True):
            table[answer.first :] = Tokens("i", ids)
        if answer.hit:
            self._blank(0, answer.trimmed)
            self.computed = answer.hit
            self._published = answer.hit // self._block_size
        return answer.copies

    def forget(self, copies: list[tuple[int, int, int]], write_from: int) -> None:
        """Copies that nobody will do: their block counts as not computed, and their sources may go."""
        if copies:
            self.computed = min(self.computed, write_from // self._block_size * self._block_size)
            self._allocator.post(Copied(self._owner))

    def publish(self, computed: int) -> None:
        """Let other sequences have the full blocks of the first `computed` tokens."""
        blocks = min(computed, self.capacity) // self._block_size
        if blocks > self._published:
            self._published = blocks
            self._allocator.post(Publish(self._owner, self._tokens(), computed))

    def trim(self, position: int) -> None:
        """Give back the blocks that no query at or after `position` reads; no step in flight has one before it."""
        first = min(self._needed(position), self.entries - 1)
        if first > self.trimmed:
            self._blank(self.trimmed, first)
            self._allocator.post(Trim(self._owner, first * self._block_size))

    def shrink(self, length: int) -> None:
        """Give back the blocks past the first `length` tokens, and the others where those tokens cannot go on."""
        self._clip(length)
        if not self.goes_on(length):
            self.surrender()
        for table in self.tables:
            del table[-(-length // self._block_size) :]
        self._allocator.post(Shrink(self._owner, length))

    def surrender(self) -> None:
        """Give up every block; what was computed may be found again among the published ones."""
        self.publish(self.computed)
        for table in self.tables:
            del table[:]
        self.trimmed = 0
        self._clip(0)
        self._allocator.post(Surrender(self._owner))

    def rest(self) -> None:
        """The operation is over: the blocks may be wanted by others before those of operations in progress."""
        if self._active:
            self._active = False
            self._allocator.post(Idle(self._owner))

    def release(self) -> None:
        """Return everything, for good."""
        self._active = False
        self._allocator.post(Release(self._owner))

    def _blank(self, start: int, stop: int) -> None:
        """The entries `[start, stop)` of the tables with a window name no block any more, and none before them does."""
        self.trimmed = stop
        if self._window is not None:
            for table in self.tables[self._window.first :]:
                table[start:stop] = Tokens("i", [0]) * (stop - start)

    def _needed(self, position: int) -> int:
        """The first table entry that a query at or after `position` reads."""
        window = self._window
        return 0 if window is None else first_needed(position, window.size, self._block_size)

    def _clip(self, length: int) -> None:
        """Positions from `length` on will hold something else."""
        self.computed = min(self.computed, length)
        self._published = min(self._published, length // self._block_size)
