"""The allocator actor: owns the block pool and grants its blocks."""

from __future__ import annotations

from typing import Any

from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.ledger import Ledger
from pagefork.runtime.actor import Actor
from pagefork.runtime.messages import Audit, Copied, Exhausted, Granted, Message, Release, Reserve, Share, Shrink


class Allocator(Actor):
    """Serves Reserve, Share, Shrink, Copied and Release from its ledger, which is the truth (P2)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__("allocator", capacity=4096)
        self.ledger = Ledger(BlockPool(num_blocks, block_size))

    async def handle(self, message: Message) -> Any:
        ledger = self.ledger
        match message:
            case Reserve(owner=owner, length=length, write_from=write_from):
                try:
                    grant = ledger.reserve(owner, length, write_from)
                except BlocksExhausted as error:
                    return Exhausted(error.wanted, error.free, ledger.pool.num_blocks)
                return Granted(grant.first, grant.ids, grant.copies)
            case Share(owner=owner, children=children, length=length):
                ledger.share(owner, children, length)
            case Shrink(owner=owner, length=length):
                ledger.shrink(owner, length)
            case Copied(owner=owner):
                ledger.copied(owner)
            case Release(owner=owner):
                ledger.release(owner)
            case Audit():
                ledger.check()
                return ledger.pool.num_free
            case _:
                return await super().handle(message)
        return None
