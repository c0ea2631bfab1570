"""What a sequence holds of the pool: its block table, and how far K and V in it are computed and published."""

from __future__ import annotations

import array
from collections.abc import Callable

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
    Yielded,
)

Tokens = array.array  # of C ints
Answer = Granted | Yielded | Exhausted


class Holdings:
    """The sequence's half of what it and the allocator say to each other. The allocator's ledger is the truth.

    The first `computed` tokens have K and V in the blocks of `table`. `tokens` gives all the sequence has.
    """

    def __init__(
        self,
        owner: int,
        allocator: Allocator,
        block_size: int,
        tokens: Callable[[], Tokens[int]],
        *,
        table: Tokens[int] | None = None,
        computed: int = 0,
        priority: float = 0.0,
    ) -> None:
        self.table = Tokens("i") if table is None else table
        self.computed = computed
        self._owner = owner
        self._allocator = allocator
        self._block_size = block_size
        self._tokens = tokens
        self._priority = priority
        self._published = 0
        self._active = False

    @property
    def capacity(self) -> int:
        """Positions that the blocks cover."""
        return len(self.table) * self._block_size

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

    def shrink(self, length: int) -> None:
        """Give back the blocks past the first `length` tokens."""
        self._clip(length)
        del self.table[-(-length // self._block_size) :]
        self._allocator.post(Shrink(self._owner, length))

    def surrender(self) -> None:
        """Give up every block; what was computed may be found again among the published ones."""
        self.publish(self.computed)
        del self.table[:]
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

    def _clip(self, length: int) -> None:
        """Positions from `length` on will hold something else."""
        self.computed = min(self.computed, length)
        self._published = min(self._published, length // self._block_size)
