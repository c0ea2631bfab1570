"""What every sequence of a runtime shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from pagefork.runtime.allocator import Allocator
from pagefork.runtime.engine import Facts, Ints
from pagefork.runtime.errors import DeadlineExceeded, RuntimeClosed
from pagefork.runtime.messages import Preempt
from pagefork.runtime.worker import Worker

if TYPE_CHECKING:
    from pagefork.runtime.sequence import SequenceActor


class House:
    """The two actors that all sequences talk to, and the facts they need.

    block_size: tokens per block. lease: tokens a generation may run ahead of its reader. max_context: tokens.
    patience: seconds that an operation waits for blocks.
    spawn starts an actor's task; `read_kv(layer, table, length)` asks the engine.
    """

    def __init__(
        self,
        allocator: Allocator,
        worker: Worker,
        facts: Facts,
        *,
        block_size: int,
        lease: int,
        max_context: int,
        patience: float,
        max_sequences: int | None,
        spawn: Callable[[SequenceActor], None],
        read_kv: Callable[[int, Ints, int], Awaitable[Any]],
    ) -> None:
        self.allocator = allocator
        self.worker = worker
        self.facts = facts
        self.accepting = True
        self.block_size = block_size
        self.lease = lease
        self.max_context = max_context
        self.patience = patience
        self.max_sequences = max_sequences
        self._room: deque[anyio.Event] = deque()
        self.spawn = spawn
        self.read_kv = read_kv
        self.sequences: dict[int, SequenceActor] = {}
        self.forks = 0
        self._owners = 0

    async def admit(self, patience: float) -> None:
        """Wait until one more sequence may live, first come, first served.

        Raises RuntimeClosed, and DeadlineExceeded after `patience` seconds. Cancelled, it admitted nobody.
        """
        if self.full or self._room:
            turn = anyio.Event()
            self._room.append(turn)
            try:
                with anyio.move_on_after(patience):
                    await turn.wait()
            finally:
                if not turn.is_set():
                    self._room.remove(turn)
            if not turn.is_set():
                raise DeadlineExceeded(
                    f"{len(self.sequences)} sequences live, no more than max_sequences={self.max_sequences} may; "
                    "close some, or open the runtime with a higher limit"
                )
        if not self.accepting:
            raise RuntimeClosed("the runtime has left its `async with` block; open another")

    @property
    def full(self) -> bool:
        """No more sequences may live."""
        return self.max_sequences is not None and len(self.sequences) >= self.max_sequences

    def leave(self, owner: int) -> None:
        """A sequence is gone: let one in that waits."""
        if self.sequences.pop(owner, None) is not None and self._room and not self.full:
            self._room.popleft().set()

    def preempt(self, owner: int) -> None:
        """Ask a sequence to surrender its blocks."""
        sequence = self.sequences.get(owner)
        if sequence is not None:
            sequence.post(Preempt())

    def owner(self) -> int:
        """A fresh owner id."""
        self._owners += 1
        return self._owners
