"""The truth about who holds which block. No event loop, no model: the allocator actor and the simulator drive it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagefork.cache.blocks import BlockPool, BlocksExhausted, Ids
from pagefork.cache.grant import Grant, Quote
from pagefork.cache.prefix import Chain, PrefixIndex, Tokens
from pagefork.cache.table import BlockTable


class Ledger:
    """Tables by owner over one pool. Every call takes effect whole or, raising, not at all.

    An owner has a table for each group of layers, and all cover the same positions; where a group has a window its
    table may begin with holes. Any block may serve any group.

    An owner comes into being with its first `reserve` or as a child of `share`; `release` returns all that it
    holds, pins included. A copy's source stays pinned until `copied`, so nobody overwrites it before it was read.
    Blocks that were published stay in the pool when nobody holds them, found again by their tokens, until an
    allocation finds no free ones: free + idle + held = all. Costs depend on the blocks of a call, never on the pool.
    """

    def __init__(
        self, pool: BlockPool, prefix: bool = True, namespace: str = "", *, windows: Sequence[int | None] = (None,)
    ) -> None:
        """`prefix` False: nothing is published or adopted. `namespace` names the weights, see PrefixIndex.

        `windows`: of each group, a query at position i reads none before `i - window + 1`. None: it may read all. A
        sequence counts what all its windows gave back as one number: give those that have one the widest.
        """
        self.pool = pool
        self.prefix = prefix
        self.windows = tuple(windows)
        self.index = PrefixIndex(pool, namespace)
        names = [namespace, *(f"{namespace}\0{group}" for group in range(1, len(self.windows)))]
        self._roots = [self.index.root_of(name) for name in names]
        self.copies = 0
        self.copied_rows = 0
        self.hits = 0
        self.hit_tokens = 0
        self.peak = 0
        self._tables: dict[int, list[BlockTable]] = {}
        self._chains: dict[int, list[Chain]] = {}
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

    def table(self, owner: int, group: int = 0) -> BlockTable | None:
        """The owner's table for a group, not to be changed; None for an owner that holds nothing."""
        tables = self._tables.get(owner)
        return None if tables is None else tables[group]

    def held(self, owner: int) -> Ids:
        """The blocks whose references `release` would return, those of pins included, int32."""
        parts = [table.live for table in self._tables.get(owner, ())]
        if pins := self._pins.get(owner):
            parts.append(np.array(pins, dtype=np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def span(self, owner: int, length: int) -> int:
        """How many blocks the owner's tables name once they cover `length` tokens."""
        tables = self._tables.get(owner)
        if tables is None:
            return len(self.windows) * -(-length // self.pool.block_size)
        return sum(table.blocks_for(max(length, table.length)) - table.trimmed for table in tables)

    def quote(
        self,
        owner: int,
        length: int,
        write_from: int | None = None,
        tokens: Tokens | None = None,
        known: Sequence[Chain] = (),
    ) -> Quote:
        """What `reserve` with these arguments would take. Changes nothing.

        `known`: the chains of an earlier quote for the same tokens, from which the search goes on.
        """
        tables = self._tables.get(owner)
        if tables is not None and len(tables[0]):
            length = max(length, tables[0].length)
            replaced, withdrawn = self._unwritable(tables, length, write_from)
            new = len(tables) * tables[0].missing(length) + len(replaced)
            return Quote(new, self.available, replaced=replaced, withdrawn=withdrawn)
        size, groups = self.pool.block_size, len(self.windows)
        entries = -(-length // size)
        if tokens is None or not self.prefix or not len(self.index):
            return Quote(groups * entries, self.available)
        # The last token is left to compute, or there would be no logits to go on from. With a window, the blocks that
        # are found may be many and those that are needed few.
        stop = (len(tokens) - 1 if any(self.windows) else min(len(tokens) - 1, length)) // size
        chains = [self.index.follow(chain, tokens, stop) for chain in known or self._roots]
        depth = min(chain.depth for chain in chains)
        chains = [self.index.clip(chain, depth) for chain in chains]
        adopted = [
            self.index.ids(chain)[first_needed(depth * size, window, size) if window else 0 :]
            for chain, window in zip(chains, self.windows, strict=True)
        ]
        revived = sum(map(self.index.count_idle, adopted))
        return Quote(groups * max(0, entries - depth), self.available - revived, revived, chains, adopted)

    def reserve(self, owner: int, length: int, write_from: int | None = None, tokens: Tokens | None = None) -> Grant:
        """Cover `length` tokens; with `write_from`, make the blocks of positions `[write_from, length)` its own.

        A block shared with others is replaced by a fresh one and a copy of its rows before `write_from`; one that is
        only published is unpublished. An owner without blocks first adopts the longest published chain that `tokens`
        begin with, at most `(len(tokens) - 1) // block_size` blocks, and writes behind it: `write_from` does not
        matter then. With a window the chain may be longer than `length`, and of it a table with a window adopts the end
        that the next token needs, after holes. All or nothing: BlocksExhausted when too few blocks are free or idle.
        """
        quote = self.quote(owner, length, write_from, tokens)
        if quote.short:
            raise BlocksExhausted(quote.new, quote.spare)
        return self.take(owner, length, write_from, quote)

    def take(self, owner: int, length: int, write_from: int | None, quote: Quote) -> Grant:
        """Reserve what was just quoted for the same arguments, with nothing short and no call in between."""
        tables = self._tables_of(owner)
        hit = self._adopt(owner, tables, quote)
        length = max(length, tables[0].length)
        replaced, withdrawn = quote.replaced, quote.withdrawn
        if quote.new > self.pool.num_free:
            self.index.evict(quote.new - self.pool.num_free)
            # What went with the evicted blocks may have been published ones of these tables.
            if replaced or withdrawn:
                replaced, withdrawn = self._unwritable(tables, length, write_from)
        missing = tables[0].missing(length)
        fresh = self.pool.allocate(len(replaced) + len(tables) * missing)
        for block in withdrawn:
            if self.index.published[block]:
                self.index.unpublish(block)
        first = min(table.trimmed for table in tables) if hit else min([len(tables[0]), *(at for _, at, _ in replaced)])
        copies = self._replace(owner, tables, replaced, fresh.tolist(), write_from or 0)
        at = len(replaced)
        for table in tables:
            table.grow(fresh[at : at + missing])
            table.advance(length - table.length)
            at += missing
        self._tables[owner] = tables
        if write_from is not None and not hit:
            self._clip(owner, write_from)
        self.peak = max(self.peak, self.referenced)
        trimmed = max(table.trimmed for table in tables) if hit else 0
        return Grant(first, [table.ids[first:].tolist() for table in tables], copies, hit, trimmed)

    def publish(self, owner: int, tokens: Tokens, computed: int) -> None:
        """Let others find the owner's full blocks among those of its first `computed` tokens.

        `tokens`: the owner's, at least `computed` of them; K and V of those must be written, or be so before anything
        that a later grant lets read them. Costs what is new since the last call.
        """
        tables = self._tables.get(owner)
        if tables is None or not self.prefix:
            return
        stop = min(computed, tables[0].length) // self.pool.block_size
        chains = self._chains.setdefault(owner, self._roots[:])
        for group, (table, chain) in enumerate(zip(tables, chains, strict=True)):
            if table.trimmed and self.index.depth(chain) < table.trimmed:
                continue  # what comes before was evicted, and is not in the table either
            if stop > chain.depth:
                chains[group] = self.index.publish(chain, tokens, table.ids, stop)

    def share(self, owner: int, children: Sequence[int], length: int) -> None:
        """Give each child tables of the owner's first `length` tokens: the same blocks, one more reference each.

        They are empty where a window's table has nothing but holes for so many.
        """
        tables = self._tables_of(owner)
        length = min(table.readable(min(length, table.length)) for table in tables)
        chains = self._chains.get(owner)
        if chains is not None:
            chains = [self.index.clip(chain, length // self.pool.block_size) for chain in chains]
        for child in children:
            self._tables[child] = copies = [table.fork(length) for table in tables]
            for copy in copies:
                self.pool.retain(copy.live)
            if chains is not None:
                self._chains[child] = chains[:]

    def trim(self, owner: int, start: int) -> int:
        """Let go of the blocks whose positions all lie before `start`, in the tables with a window; returns how many
        became free or idle.

        Neither the owner nor a step in flight may read them. TableError when none would be left. While copies of the
        owner's are to be done it keeps all, since one of them may be the target. Cost: those let go.
        """
        tables = self._tables.get(owner)
        if tables is None or not len(tables[0]) or owner in self._pins:
            return 0
        windowed = [table for table, window in zip(tables, self.windows, strict=True) if window is not None]
        return sum(self._drop(table.trim(start)) for table in windowed)

    def shrink(self, owner: int, length: int) -> int:
        """Keep the blocks of the first `length` tokens; returns how many blocks became free or idle.

        None is kept where a window's table has nothing but holes for so many.
        """
        tables = self._tables.get(owner)
        if tables is None or length > tables[0].length:
            return 0
        length = min(table.readable(length) for table in tables)
        self._clip(owner, length)
        return sum(self._drop(table.truncate(length)) for table in tables)

    def copied(self, owner: int) -> int:
        """The owner's copies are done: let their sources go. Returns how many blocks became free or idle."""
        pins = self._pins.pop(owner, None)
        return self._drop(np.array(pins, dtype=np.int32)) if pins else 0

    def release(self, owner: int) -> int:
        """Return all that the owner holds; an unknown owner holds nothing.

        Returns how many blocks became free or idle.
        """
        freed = self.copied(owner)
        tables = self._tables.pop(owner, [])
        chains = self._chains.pop(owner, [])
        freed += sum(self._drop(table.live) for table in tables)
        for group, chain in enumerate(chains):
            if chain.borrowed or (tables and tables[group].trimmed):
                self.index.touch(chain)  # its head became idle first, but is to be evicted last
        return freed

    def check(self) -> None:
        """Raise AssertionError unless refcounts equal what tables, pins and index name (P1). Cost: all blocks."""
        expected = np.zeros(self.pool.num_blocks, dtype=np.int64)
        for tables in self._tables.values():
            if len({(len(table), table.length) for table in tables}) > 1:
                raise AssertionError("the tables of an owner differ in what they cover")
            for table in tables:
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

    def _tables_of(self, owner: int) -> list[BlockTable]:
        """The owner's tables, or empty ones."""
        return self._tables.get(owner) or [BlockTable(self.pool.block_size) for _ in self.windows]

    def _adopt(self, owner: int, tables: list[BlockTable], quote: Quote) -> int:
        if not any(quote.adopted):
            return 0
        for table, chain, ids in zip(tables, quote.chains, quote.adopted, strict=True):
            self.index.adopt(ids)
            if skipped := chain.depth - len(ids):
                table.skip(skipped)
                self.index.touch(chain)
            table.grow(ids)
            table.advance(table.capacity)
        hit = tables[0].length
        self._chains[owner] = list(quote.chains)
        self.hits += 1
        self.hit_tokens += hit
        return hit

    def _unwritable(
        self, tables: list[BlockTable], length: int, write_from: int | None
    ) -> tuple[Sequence[tuple[int, int, int]], Sequence[int]]:
        """Of what is to be written: (table, entry, block) with other holders, and blocks that are only published."""
        if write_from is None or write_from >= tables[0].capacity:
            return (), ()
        refcounts, stop = self.pool.refcounts, min(length, tables[0].capacity)
        replaced: list[tuple[int, int, int]] = []
        withdrawn: list[int] = []
        for group, table in enumerate(tables):
            for entry in table.shared(write_from, stop, refcounts).tolist():
                block = int(table.ids[entry])
                if refcounts[block] == 2 and self.index.published[block]:
                    withdrawn.append(block)
                else:
                    replaced.append((group, entry, block))
        return replaced, withdrawn

    def _replace(
        self,
        owner: int,
        tables: list[BlockTable],
        replaced: Sequence[tuple[int, int, int]],
        fresh: list[int],
        write_from: int,
    ) -> list[tuple[int, int, int]]:
        copies = []
        for (group, entry, old), block in zip(replaced, fresh, strict=False):
            tables[group].replace(entry, block)
            filled = tables[group].filled(entry, write_from)
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
        depth = length // self.pool.block_size
        chains = self._chains.get(owner, [])
        for group, chain in enumerate(chains):
            if chain.depth > depth:
                chains[group] = self.index.clip(chain, depth)

    def _drop(self, ids: Ids) -> int:
        return self.pool.free(ids) + self.index.settle(ids)


def first_needed(position: int, window: int, block_size: int) -> int:
    """The first table entry that a query at or after `position` reads, or one at the start of the block before it.

    That far back a sequence goes whose copies were granted and not done. A window of one position counts as two, so
    that a block stays which says where the sequence stands.
    """
    return max(0, position // block_size * block_size - max(window, 2) + 1) // block_size
