"""What every sequence of a runtime shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from pagefork.runtime.allocator import Allocator
from pagefork.runtime.engine import Facts, Ints
from pagefork.runtime.errors import DeadlineExceeded, RuntimeClosed
from pagefork.runtime.groups import Window
from pagefork.runtime.messages import Preempt
from pagefork.runtime.worker import Worker

if TYPE_CHECKING:
    from pagefork.runtime.sequence import SequenceActor


class House:
    """The two actors that all sequences talk to, and the facts they need.

    block_size: tokens per block. lease: tokens a generation may run ahead of its reader. max_context: tokens. window:
    where blocks fall out of use while their sequence goes on.
    patience: seconds that an operation waits for blocks. max_sequences: how many may live at once, or None.
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
        window: Window | None,
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
        self.window = window
        self._room: deque[anyio.Event] = deque()
        self._called = 0
        self.spawn = spawn
        self.read_kv = read_kv
        self.sequences: dict[int, SequenceActor] = {}
        self.forks = 0
        self._owners = 0

    async def admit(self, patience: float) -> None:
        """Wait until one more sequence may live, first come, first served.

        The sequence must be made at once then. Raises RuntimeClosed, and DeadlineExceeded after `patience` seconds.
        Cancelled, it admitted nobody.
        """
        if self.accepting and not self.has_room():
            turn = anyio.Event()
            self._room.append(turn)
            try:
                with anyio.move_on_after(patience):
                    await turn.wait()
            except BaseException:
                self._give_up(turn)
                raise
            if not turn.is_set():
                self._give_up(turn)
                raise DeadlineExceeded(
                    f"{len(self.sequences)} sequences live, no more than max_sequences={self.max_sequences} may; "
                    "close some, or open the runtime with a higher limit"
                )
            self._called -= 1
        if not self.accepting:
            raise RuntimeClosed("the runtime has left its `async with` block; open another")

    def has_room(self, count: int = 1) -> bool:
        """Whether so many more sequences may live, those that were called in counted."""
        return self.max_sequences is None or len(self.sequences) + self._called + count <= self.max_sequences

    def leave(self, owner: int) -> None:
        """A sequence is gone: let in who waits."""
        self.sequences.pop(owner, None)
        self._call()

    def shut(self) -> None:
        """Let no more sequences in; who waits for it learns so at once."""
        self.accepting = False
        self._call()

    def _call(self) -> None:
        while self._room and (self.has_room() or not self.accepting):
            self._called += 1
            self._room.popleft().set()

    def _give_up(self, turn: anyio.Event) -> None:
        """Who waited leaves; its turn, if it had come, is the next one's."""
        if turn.is_set():
            self._called -= 1
            self._call()
        else:
            self._room.remove(turn)

    def preempt(self, owner: int) -> None:
        """Ask a sequence to surrender its blocks."""
        sequence = self.sequences.get(owner)
        if sequence is not None:
            sequence.post(Preempt())

    def owner(self) -> int:
        """A fresh owner id."""
        self._owners += 1
        return self._owners
