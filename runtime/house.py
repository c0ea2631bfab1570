"""What every sequence of a runtime shares."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from pagefork.runtime.allocator import Allocator
from pagefork.runtime.engine import Facts, Ints
from pagefork.runtime.worker import Worker

if TYPE_CHECKING:
    from pagefork.runtime.sequence import SequenceActor


class House:
    """The two actors that all sequences talk to, and the facts they need.

    block_size: tokens per block. lease: tokens a generation may run ahead of its reader. max_context: tokens.
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
        self.spawn = spawn
        self.read_kv = read_kv
        self.sequences: dict[int, SequenceActor] = {}
        self.forks = 0
        self._owners = 0

    def owner(self) -> int:
        """A fresh owner id."""
        self._owners += 1
        return self._owners
