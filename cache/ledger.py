"""The truth about who holds which block. No event loop, no model: the allocator actor and the simulator drive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagefork.cache.blocks import BlockPool, BlocksExhausted, Ids
from pagefork.cache.prefix import Chain, PrefixIndex, Tokens
from pagefork.cache.table import BlockTable


@dataclass(frozen=True)
class Grant:
    """An owner's table from entry `first` on, and the copies (source, destination, filled rows) due before a write.

    hit: tokens at the table's start whose K and V are in its blocks already, found in the prefix index.
    """

    first: int
    ids: list[int]
    copies: list[tuple[int, int, int]]
    hit: int = 0


@dataclass(slots=True)
class Quote:
    """What a `reserve` would take now: `new` blocks, when at most `spare` can be had. Good until the ledger changes.

    revived: idle blocks that it would adopt, not among those to spare. chain, adopted: the published chain that the
    owner would begin with, and its block ids. replaced: table entries that would get a fresh block. withdrawn: block
    ids that would be unpublished and written in place.
    """

    new: int
    spare: int
    revived: int = 0
    chain: Chain | None = None
    adopted: Sequence[int] = ()
    replaced: Sequence[int] = ()
    withdrawn: Sequence[int] = ()

    @property
    def short(self) -> int:
        """Blocks that others must give up first; 0 when the reserve can be met."""
        return max(0, self.new - self.spare)

    @property
    def takes(self) -> int:
        """Blocks that would not be available to others any more."""
        return self.new + self.revived


class Ledger:
    """Tables by owner over one pool. Every call takes effect whole or, raising, not at all.

    An owner comes into being with its first `reserve` or as a child of `share`; `release` returns all that it
    holds, pins included. A copy's source stays pinned until `copied`, so nobody overwrites it before it was read.
    Blocks that were published stay in the pool when nobody holds them, found again by their tokens, until an
    allocation finds no free ones: free + idle + held = all. Costs depend on the blocks of a call, never on the pool.
    """

    def __init__(self, pool: BlockPool, prefix: bool = True, namespace: str = "", *, window: int | None = None) -> None:
        """`prefix` False: nothing is published or adopted. `namespace` names the weights, see PrefixIndex.

        `window`: a query at position i reads none before `i - window + 1`, in any layer. None: it may read all.
        """
        self.pool = pool
        self.prefix = prefix
        self.window = window
        self.index = PrefixIndex(pool, namespace)
        self.copies = 0
        self.copied_rows = 0
        self.hits = 0
        self.hit_tokens = 0
        self.peak = 0
        self._tables: dict[int, BlockTable] = {}
        self._chains: dict[int, Chain] = {}
        self._pins: dict[int, list[int]] = {}

    @property
    def owners(self) -> int:
        return len(self._tables)

    @property
    def cached(self) -> int:
        """Idle blocks: published, held by nobody, to be evicted when others need them."""
        return self.index.idle

    @property
    def available(self) -> int:
        """Blocks that an allocation could take: free and idle ones."""
        return self.pool.num_free + self.index.idle

    @property
    def referenced(self) -> int:
        """Blocks that some table or pin names."""
        return self.pool.num_used - self.index.idle

    @property
    def evictions(self) -> int:
        """How many idle blocks were given to others so far."""
        return self.index.evictions

    def table(self, owner: int) -> BlockTable | None:
        """The owner's table, not to be changed; None for an owner that holds nothing."""
        return self._tables.get(owner)

    def held(self, owner: int) -> Ids:
        """The blocks whose references `release` would return, those of pins included, int32."""
        table, pins = self._tables.get(owner), self._pins.get(owner)
        ids = np.empty(0, dtype=np.int32) if table is None else table.live
        return np.concatenate([ids, np.array(pins, dtype=np.int32)]) if pins else ids

    def span(self, owner: int, length: int) -> int:
        """How many blocks the owner's table names once it covers `length` tokens."""
        table = self._tables.get(owner)
        if table is None:
            return -(-length // self.pool.block_size)
        return table.blocks_for(max(length, table.length)) - table.trimmed

    def quote(
        self,
        owner: int,
        length: int,
        write_from: int | None = None,
        tokens: Tokens | None = None,
        known: Chain | None = None,
    ) -> Quote:
        """What `reserve` with these arguments would take. Changes nothing.

        `known`: the chain of an earlier quote for the same tokens, from which the search goes on.
        """
        table = self._tables.get(owner)
        if table is not None and len(table):
            length = max(length, table.length)
            replaced, withdrawn = self._unwritable(table, length, write_from)
            new = table.missing(length) + len(replaced)
            return Quote(new, self.available, replaced=replaced, withdrawn=withdrawn)
        size = self.pool.block_size
        new = -(-length // size)
        if tokens is None or not self.prefix or not len(self.index):
            return Quote(new, self.available)
        # The last token is left to compute, or there would be no logits to go on from. With a window, the blocks that
        # are found may be many and those that are needed few.
        stop = (len(tokens) - 1 if self.window else min(len(tokens) - 1, length)) // size
        chain = self.index.follow(known or self.index.root, tokens, stop)
        adopted = self.index.ids(chain)
        if self.window:
            adopted = adopted[first_needed(chain.depth * size, self.window, size) :]
        revived = self.index.count_idle(adopted)
        return Quote(max(0, new - chain.depth), self.available - revived, revived, chain, adopted)

    def reserve(self, owner: int, length: int, write_from: int | None = None, tokens: Tokens | None = None) -> Grant:
        """Cover `length` tokens; with `write_from`, make the blocks of positions `[write_from, length)` its own.

        A block shared with others is replaced by a fresh one and a copy of its rows before `write_from`; one that is
        only published is unpublished. An owner without blocks first adopts the longest published chain that `tokens`
        begin with, at most `(len(tokens) - 1) // block_size` blocks, and writes behind it: `write_from` does not
        matter then. With a window the chain may be longer than `length`, and the owner adopts the end of it that the
        next token needs, after holes. All or nothing: BlocksExhausted when too few blocks are free or idle.
        """
        quote = self.quote(owner, length, write_from, tokens)
        if quote.short:
            raise BlocksExhausted(quote.new, quote.spare)
        return self.take(owner, length, write_from, quote)

    def take(self, owner: int, length: int, write_from: int | None, quote: Quote) -> Grant:
        """Reserve what was just quoted for the same arguments, with nothing short and no call in between."""
        table = self._tables.get(owner)
        if table is None:
            table = BlockTable(self.pool.block_size)
        hit = self._adopt(owner, table, quote)
        length = max(length, table.length)
        replaced, withdrawn = quote.replaced, quote.withdrawn
        if quote.new > self.pool.num_free:
            self.index.evict(quote.new - self.pool.num_free)
            # What went with the evicted blocks may have been published ones of this table.
            if replaced or withdrawn:
                replaced, withdrawn = self._unwritable(table, length, write_from)
        missing = table.missing(length)
        fresh = self.pool.allocate(len(replaced) + missing)
        for block in withdrawn:
            if self.index.published[block]:
                self.index.unpublish(block)
        first = table.trimmed if hit else min([len(table), *replaced])
        copies = self._replace(owner, table, replaced, fresh.tolist(), write_from or 0)
        table.grow(fresh[len(replaced) :])
        table.advance(length - table.length)
        self._tables[owner] = table
        if write_from is not None and not hit:
            self._clip(owner, write_from)
        self.peak = max(self.peak, self.referenced)
        return Grant(first, table.ids[first:].tolist(), copies, hit)

    def publish(self, owner: int, tokens: Tokens, computed: int) -> None:
        """Let others find the owner's full blocks among those of its first `computed` tokens.

        `tokens`: the owner's, at least `computed` of them; K and V of those must be written, or be so before anything
        that a later grant lets read them. Costs what is new since the last call.
        """
        table = self._tables.get(owner)
        if table is None or not self.prefix:
            return
        stop = min(computed, table.length) // self.pool.block_size
        chain = self._chains.get(owner, self.index.root)
        if table.trimmed and self.index.depth(chain) < table.trimmed:
            return  # what comes before was evicted, and is not in the table either
        if stop > chain.depth:
            self._chains[owner] = self.index.publish(chain, tokens, table.ids, stop)

    def share(self, owner: int, children: Sequence[int], length: int) -> None:
        """Give each child a table of the owner's first `length` tokens: the same blocks, one more reference each."""
        table = self._tables.get(owner) or BlockTable(self.pool.block_size)
        length = min(length, table.length)
        chain = self._chains.get(owner)
        if chain is not None:
            chain = self.index.clip(chain, length // self.pool.block_size)
        for child in children:
            copy = table.fork(length)
            self.pool.retain(copy.live)
            self._tables[child] = copy
            if chain is not None:
                self._chains[child] = chain

    def trim(self, owner: int, start: int) -> int:
        """Let go of the blocks whose positions all lie before `start`; returns how many became free or idle.

        Neither the owner nor a step in flight may read them. TableError when none would be left. While copies of the
        owner's are to be done it keeps all, since one of them may be the target. Cost: those let go.
        """
        table = self._tables.get(owner)
        if table is None or not len(table) or owner in self._pins:
            return 0
        return self._drop(table.trim(start))

    def shrink(self, owner: int, length: int) -> int:
        """Keep the blocks of the first `length` tokens; returns how many blocks became free or idle."""
        table = self._tables.get(owner)
        if table is None or length > table.length:
            return 0
        self._clip(owner, length)
        return self._drop(table.truncate(length))

    def copied(self, owner: int) -> int:
        """The owner's copies are done: let their sources go. Returns how many blocks became free or idle."""
        pins = self._pins.pop(owner, None)
        return self._drop(np.array(pins, dtype=np.int32)) if pins else 0

    def release(self, owner: int) -> int:
        """Return all that the owner holds; an unknown owner holds nothing.

        Returns how many blocks became free or idle.
        """
        freed = self.copied(owner)
        table = self._tables.pop(owner, None)
        chain = self._chains.pop(owner, None)
        if table is not None:
            freed += self._drop(table.live)
        if chain is not None and (chain.borrowed or (table is not None and table.trimmed)):
            self.index.touch(chain)  # its head became idle first, but is to be evicted last
        return freed

    def check(self) -> None:
        """Raise AssertionError unless refcounts equal what tables, pins and index name (P1). Cost: all blocks."""
        expected = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for table in self._tables.values():
            np.add.at(expected, table.live, 1)
        for pins in self._pins.values():
            np.add.at(expected, pins, 1)
        held = int((expected > 0).sum())
        expected += self.index.published
        if not np.array_equal(expected, self.pool.refcounts):
            wrong = np.flatnonzero(expected != self.pool.refcounts)
            raise AssertionError(f"refcounts differ from what is held at blocks {wrong[:8].tolist()}")
        if self.pool.num_free + self.cached + held != self.pool.num_blocks:
            raise AssertionError("free, idle and held blocks do not add up to the pool")
        self.index.check()

    def _adopt(self, owner: int, table: BlockTable, quote: Quote) -> int:
        if not quote.adopted or quote.chain is None:
            return 0
        self.index.adopt(quote.adopted)
        if skipped := quote.chain.depth - len(quote.adopted):
            table.skip(skipped)
            self.index.touch(quote.chain)
        table.grow(quote.adopted)
        hit = table.capacity
        table.advance(hit)
        self._chains[owner] = quote.chain
        self.hits += 1
        self.hit_tokens += hit
        return hit

    def _unwritable(
        self, table: BlockTable, length: int, write_from: int | None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Of what is to be written: entries whose block has other holders, and blocks that are only published."""
        if write_from is None or write_from >= table.capacity:
            return (), ()
        refcounts = self.pool.refcounts
        entries = table.shared(write_from, min(length, table.capacity), refcounts).tolist()
        if not entries:
            return (), ()
        replaced: list[int] = []
        withdrawn: list[int] = []
        for entry in entries:
            block = int(table.ids[entry])
            if refcounts[block] == 2 and self.index.published[block]:
                withdrawn.append(block)
            else:
                replaced.append(entry)
        return replaced, withdrawn

    def _replace(
        self, owner: int, table: BlockTable, entries: Sequence[int], fresh: list[int], write_from: int
    ) -> list[tuple[int, int, int]]:
        copies = []
        for entry, block in zip(entries, fresh, strict=False):
            old = table.replace(entry, block)
            filled = table.filled(entry, write_from)
            if filled:
                copies.append((old, block, filled))
                self._pins.setdefault(owner, []).append(old)
                self.copied_rows += filled
            else:
                self._drop(np.array([old], dtype=np.int32))
        self.copies += len(copies)
        return copies

    def _clip(self, owner: int, length: int) -> None:
        """Positions from `length` on will hold something else: the owner's chain ends before them."""
        chain = self._chains.get(owner)
        depth = length // self.pool.block_size
        if chain is not None and chain.depth > depth:
            self._chains[owner] = self.index.clip(chain, depth)

    def _drop(self, ids: Ids) -> int:
        return self.pool.free(ids) + self.index.settle(ids)


def first_needed(position: int, window: int, block_size: int) -> int:
    """The first table entry that a query at or after `position` reads, or one at the start of the block before it.

    That far back a sequence goes whose copies were granted and not done. A window of one position counts as two, so
    that a block stays which says where the sequence stands.
    """
    return max(0, position // block_size * block_size - max(window, 2) + 1) // block_size
