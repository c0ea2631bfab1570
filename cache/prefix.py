"""Which blocks hold which tokens: full blocks, found again by what they and all before them say.

The idea of automatic prefix caching is vLLM's: a block's K and V depend on its own tokens and on those before, so a
hash over the chain names it. Here the hash only finds candidates; what decides is the tokens and the parent block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagefork.cache.blocks import BlockPool, Ids

Tokens = Sequence[int] | npt.NDArray[np.integer]
_NONE = -1


class Chain(NamedTuple):
    """The first `depth` blocks of some tokens, as published: the last of them and the number of its publication.

    Goes stale when that block is unpublished. root: the namespace's. borrowed: some of its blocks are not the ones
    that the publishing sequence holds, since others had published the same tokens before.
    """

    depth: int
    block: int
    serial: int
    root: int
    borrowed: bool = False


def chain_hash(parent: int, chunk: bytes) -> int:
    return hash((parent, chunk))


class PrefixIndex:
    """Published blocks of a pool, the idle ones among them in the order in which they will be evicted.

    Each published block has one reference of the index's own; it is idle when it has no other. With every published
    block its parent is published, so whatever is kept can be found. Costs depend on the blocks of a call, never on the
    pool; about 0.25 kB per published block of 16 tokens.
    """

    def __init__(self, pool: BlockPool, namespace: str = "", hasher: Callable[[int, bytes], int] = chain_hash) -> None:
        """`namespace` names the weights (model, adapter): K and V of other weights have chains of their own."""
        self.evictions = 0
        self._pool = pool
        self._hasher = hasher
        self._roots: dict[str, int] = {}
        self._seeds: dict[int, int] = {}
        self.root = self.root_of(namespace)
        n = pool.num_blocks
        self._blocks: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._published = np.zeros(n, dtype=np.bool_)
        self._serials = 0
        # By block. Flat arrays and not nodes, so that a large index gives the garbage collector nothing to walk.
        self._chunk: list[bytes | None] = [None] * n
        self._hash = array("q", [0]) * n
        self._serial = array("q", [0]) * n
        self._parent = array("i", [_NONE]) * n
        self._child = array("i", [_NONE]) * n
        self._next = array("i", [_NONE]) * n
        self._previous = array("i", [_NONE]) * n

    def __len__(self) -> int:
        """How many blocks are published."""
        return len(self._blocks)

    @property
    def idle(self) -> int:
        """Published blocks that nobody but the index holds: each can be evicted."""
        return len(self._idle)

    @property
    def published(self) -> npt.NDArray[np.bool_]:
        """Whether each block is published, `[num_blocks]`: a live view, not to be changed."""
        return self._published

    def root_of(self, namespace: str) -> Chain:
        """The empty chain of a namespace."""
        root = self._roots.setdefault(namespace, -1 - len(self._roots))
        self._seeds[root] = hash(namespace)
        return Chain(0, root, 0, root)

    def lookup(self, tokens: Tokens) -> list[int]:
        """Block ids of the longest published chain that `tokens` begin with."""
        return self.ids(self.follow(self.root, tokens, len(tokens) // self._pool.block_size))

    def follow(self, chain: Chain, tokens: Tokens, stop: int) -> Chain:
        """Continue `chain`, a published chain of these tokens, as far as there is one of at most `stop` blocks.

        A stale chain starts again from the root.
        """
        depth, block, _, root, borrowed = self._current(chain)
        step = self._step
        name = self._name(block)
        raw = self._raw(tokens, depth, stop)
        for at in range(0, len(raw), step):
            chunk = raw[at : at + step]
            name = self._hasher(name, chunk)
            found = self._blocks.get(name)
            if found is None or self._parent[found] != block or self._chunk[found] != chunk:
                break
            block = found
            depth += 1
        return Chain(depth, block, self._serial_of(block), root, borrowed)

    def publish(self, chain: Chain, tokens: Tokens, ids: Ids, stop: int) -> Chain:
        """Publish the blocks `ids[chain.depth:stop]`, which hold these tokens; returns the chain that they end.

        `chain` must be a published chain of the same tokens. Where other blocks are published under the same chain
        those stay. Where the hash belongs to a different chain the rest stays unpublished.
        """
        depth, block, _, root, borrowed = self._current(chain)
        step = self._step
        name = self._name(block)
        raw = self._raw(tokens, depth, stop)
        fresh: list[int] = []
        for at, own in zip(range(0, len(raw), step), ids[depth:stop].tolist(), strict=False):
            chunk = raw[at : at + step]
            name = self._hasher(name, chunk)
            found = self._blocks.get(name)
            if found is None:
                if self._chunk[own] is not None:
                    break
                self._link(own, block, name, chunk)
                fresh.append(own)
                found = own
            elif self._parent[found] != block or self._chunk[found] != chunk:
                break
            else:
                borrowed = borrowed or found != own
            block = found
            depth += 1
        if fresh:
            self._pool.retain(fresh)
            self._published[fresh] = True
        return Chain(depth, block, self._serial_of(block), root, borrowed)

    def clip(self, chain: Chain, depth: int) -> Chain:
        """The first `depth` blocks of the chain, or all of it if it is shorter."""
        if chain.depth <= depth:
            return chain
        at, block, _, root, borrowed = self._current(chain)
        while at > depth:
            block = self._parent[block]
            at -= 1
        return Chain(at, block, self._serial_of(block), root, borrowed)

    def depth(self, chain: Chain) -> int:
        """How many blocks the chain has; none when it is stale."""
        return self._current(chain).depth

    def ids(self, chain: Chain) -> list[int]:
        """The chain's block ids, head first; none when it is stale."""
        block = self._current(chain).block
        out: list[int] = []
        parent = self._parent
        while block >= 0:
            out.append(block)
            block = parent[block]
        out.reverse()
        return out

    def count_idle(self, ids: Sequence[int]) -> int:
        idle = self._idle
        return sum(block in idle for block in ids) if idle else 0

    def adopt(self, ids: Sequence[int]) -> None:
        """One more reference to each of these published blocks: they are not idle any more."""
        self._pool.retain(ids)
        if self._idle:
            for block in ids:
                self._idle.pop(block, None)

    def settle(self, ids: Ids) -> int:
        """Blocks in table order of which references were just released; returns how many became idle.

        The last of them will be evicted first: a head is of use to more sequences than a tail.
        """
        if not self._blocks or not len(ids):
            return 0
        idle = ids[self._published[ids] & (self._pool.refcounts[ids] == 1)]
        if not len(idle):
            return 0
        before = len(self._idle)
        self._idle.update(dict.fromkeys(idle[::-1].tolist()))
        return len(self._idle) - before

    def touch(self, chain: Chain) -> None:
        """Count the chain's idle blocks as just used."""
        for block in reversed(self.ids(chain)):
            if block in self._idle:
                self._idle.move_to_end(block)

    def evict(self, n: int) -> int:
        """Free at least `n` idle blocks, or all there are, least recently used first; returns how many became free."""
        gone: list[int] = []
        before = len(self._idle)
        wanted = before - min(n, before)
        while len(self._idle) > wanted:
            self._cut(next(iter(self._idle)), gone)
        self.evictions += before - len(self._idle)
        return self._pool.free(gone)

    def unpublish(self, block: int) -> int:
        """Take a published block out, and with it the chains that go through it; returns how many became free."""
        gone: list[int] = []
        self._cut(block, gone)
        return self._pool.free(gone)

    def check(self) -> None:
        """Raise AssertionError unless the links agree and `idle` holds what has no holder. Cost: all blocks."""
        named = set(self._blocks.values())
        if named != set(np.flatnonzero(self._published).tolist()) or len(named) != len(self._blocks):
            raise AssertionError("published blocks and names differ")
        if set(self._idle) != {block for block in named if self._pool.refcounts[block] == 1}:
            raise AssertionError("idle blocks are not those without a holder")
        for name, block in self._blocks.items():
            parent, following = self._parent[block], self._next[block]
            if self._hash[block] != name or self._chunk[block] is None:
                raise AssertionError(f"block {block} does not know its name")
            if parent >= 0 and parent not in named:
                raise AssertionError(f"block {block} is published and its parent is not")
            if following >= 0 and (self._previous[following] != block or self._parent[following] != parent):
                raise AssertionError(f"the siblings of block {block} are tangled")

    @property
    def _step(self) -> int:
        return 4 * self._pool.block_size

    def _raw(self, tokens: Tokens, depth: int, stop: int) -> bytes:
        """Tokens of the blocks `[depth, stop)` as int32; whole blocks only."""
        size = self._pool.block_size
        stop = min(stop, len(tokens) // size)
        if stop <= depth:
            return b""
        return np.asarray(tokens[depth * size : stop * size], dtype=np.int32).tobytes()

    def _current(self, chain: Chain) -> Chain:
        if chain.block >= 0 and self._serial[chain.block] != chain.serial:
            return Chain(0, chain.root, 0, chain.root)
        return chain

    def _name(self, block: int) -> int:
        return self._hash[block] if block >= 0 else self._seeds[block]

    def _serial_of(self, block: int) -> int:
        return self._serial[block] if block >= 0 else 0

    def _link(self, block: int, parent: int, name: int, chunk: bytes) -> None:
        self._serials += 1
        self._blocks[name] = block
        self._chunk[block] = chunk
        self._hash[block] = name
        self._serial[block] = self._serials
        self._parent[block] = parent
        if parent >= 0:
            sibling = self._child[parent]
            self._child[parent] = block
            self._next[block] = sibling
            if sibling >= 0:
                self._previous[sibling] = block

    def _unlink(self, block: int) -> None:
        """Take the block out of its parent's list of children."""
        previous, following = self._previous[block], self._next[block]
        if previous >= 0:
            self._next[previous] = following
        elif self._parent[block] >= 0:
            self._child[self._parent[block]] = following
        if following >= 0:
            self._previous[following] = previous

    def _cut(self, block: int, gone: list[int]) -> None:
        """Forget the block and every chain through it, which could not be found without it; adds them to `gone`."""
        self._unlink(block)
        first = len(gone)
        gone.append(block)
        while first < len(gone):
            block = gone[first]
            first += 1
            child = self._child[block]
            while child >= 0:
                gone.append(child)
                child = self._next[child]
            del self._blocks[self._hash[block]]
            self._idle.pop(block, None)
            self._published[block] = False
            self._chunk[block] = None
            self._serial[block] = 0
            self._parent[block] = self._child[block] = self._next[block] = self._previous[block] = _NONE
