"""What a sequence holds of the pool: its block table, and how far K and V in it are computed and published."""

from __future__ import annotations

import array
from collections.abc import Callable
from dataclasses import dataclass

from pagefork.cache.ledger import first_needed
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.errors import PoolExhausted
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


@dataclass(frozen=True)
class Window:
    """Every layer's window: no query reads more than the `size` last positions, so blocks before them are given back.

    part: tokens for which blocks are asked at a time beyond those that are computed, or beyond the window's size.
    """

    size: int
    part: int


def window_of(size: int | None, num_blocks: int, block_size: int, chunk: int) -> Window | None:
    """The window of a model in a pool, with parts of a prompt chunk where they fit.

    None where a layer has no window (`size` None), or the pool cannot hold a whole one: nothing is given back then.
    """
    if size is None:
        return None
    size = max(size, 2)  # as `first_needed` counts
    spare = num_blocks - -(-(size - 1) // block_size) - 1
    return Window(size, min(chunk, spare * block_size)) if spare > 0 else None


class Holdings:
    """The sequence's half of what it and the allocator say to each other. The allocator's ledger is the truth.

    The first `computed` tokens have K and V in the blocks of `table`. `tokens` gives all the sequence has. Of the
    `table`, the first `trimmed` entries name blocks no more: they were given back, and hold 0.
    """

    def __init__(
        self,
        owner: int,
        allocator: Allocator,
        block_size: int,
        tokens: Callable[[], Tokens[int]],
        *,
        priority: float = 0.0,
        window: Window | None = None,
    ) -> None:
        self.table = Tokens("i")
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
    def capacity(self) -> int:
        """Positions that the blocks cover."""
        return len(self.table) * self._block_size

    def goes_on(self, length: int) -> bool:
        """Whether a sequence of its first `length` tokens can go on with these blocks.

        Not where that needs some that were trimmed: a layer reads a window of what the layer below made of a window
        before it, so K and V are the same only if they are computed from the start.
        """
        return self.trimmed <= self._needed(min(self.computed, length - 1))

    def inherit(self, parent: Holdings, length: int) -> None:
        """Begin with what `parent` holds for its first `length` tokens."""
        self.table = parent.table[: -(-length // self._block_size)]
        self.computed = min(parent.computed, length)
        self.trimmed = parent.trimmed if self.table else 0

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
            tokens=None if self.table else tokens,
            priority=self._priority,
            patience=patience,
        )
        answer: Answer = await self._allocator.ask(reserve, late=late)
        return answer

    def adopt(self, answer: Granted | Exhausted) -> list[tuple[int, int, int]]:
        """Take a grant into the table; returns the copies to submit. Raises PoolExhausted."""
        if isinstance(answer, Exhausted):
            raise PoolExhausted(answer.wanted, answer.free, answer.total)
        if answer.hit:
            self.table = Tokens("i", [0]) * answer.first
            self.trimmed = answer.first
        self.table[answer.first :] = Tokens("i", answer.ids)
        if answer.hit:
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
        first = min(self._needed(position), len(self.table) - 1)
        if first > self.trimmed:
            self.table[self.trimmed : first] = Tokens("i", [0]) * (first - self.trimmed)
            self.trimmed = first
            self._allocator.post(Trim(self._owner, first * self._block_size))

    def shrink(self, length: int) -> None:
        """Give back the blocks past the first `length` tokens, and the others where those tokens cannot go on."""
        self._clip(length)
        if not self.goes_on(length):
            self.surrender()
        del self.table[-(-length // self._block_size) :]
        self._allocator.post(Shrink(self._owner, length))

    def surrender(self) -> None:
        """Give up every block; what was computed may be found again among the published ones."""
        self.publish(self.computed)
        del self.table[:]
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

    def _needed(self, position: int) -> int:
        """The first table entry that a query at or after `position` reads."""
        window = self._window
        return 0 if window is None else first_needed(position, window.size, self._block_size)

    def _clip(self, length: int) -> None:
        """Positions from `length` on will hold something else."""
        self.computed = min(self.computed, length)
        self._published = min(self._published, length // self._block_size)
