"""One sequence of a paged cache behind the interface of mlx-lm's KVCache: the reference path, gather then SDPA."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from pagefork.cache.blocks import BlockPool
from pagefork.cache.kv import KVError, PagedKVCache
from pagefork.cache.table import BlockTable


class SequenceCache:
    """Holds the blocks of one sequence; `layers` goes where mlx-lm takes a prompt cache."""

    def __init__(self, pool: BlockPool, kv: PagedKVCache) -> None:
        """`pool` and `kv` may be shared with other sequences. ValueError when their sizes differ."""
        if (pool.num_blocks, pool.block_size) != (kv.num_blocks, kv.block_size):
            raise ValueError(f"{pool!r} does not fit a cache of {kv.num_blocks} x {kv.block_size}")
        self.kv = kv
        self.table = BlockTable(pool.block_size)
        self.layers = [PagedLayerCache(self, layer) for layer in range(len(kv.layers))]
        self._pool = pool

    def cover(self, length: int) -> None:
        """Take the blocks that `length` tokens need; BlocksExhausted leaves everything as it was."""
        self.table.grow(self._pool.allocate(self.table.missing(length)))
        self.table.advance(max(0, length - self.table.length))

    def trim(self) -> None:
        """Free the blocks that no layer uses any more."""
        self._pool.free(self.table.truncate(max(layer.offset for layer in self.layers)))

    def close(self) -> None:
        """Free every block; the sequence is empty again."""
        for layer in self.layers:
            layer.offset = 0
        self.trim()


class PagedLayerCache:
    """One layer of a SequenceCache, with what mlx-lm's models and generation ask of a KVCache."""

    def __init__(self, sequence: SequenceCache, layer: int) -> None:
        self.offset = 0
        self._sequence = sequence
        self._layer = layer

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys`, `values` `[1, kv_heads, n, head_dim]`; returns all `[1, kv_heads, offset, head_dim]`.

        BlocksExhausted when the pool cannot cover them, KVError when they do not fit the layer: nothing was appended,
        though blocks taken for them stay until the next `trim` or `close`.
        """
        if keys.shape[0] != 1:
            raise KVError(f"one sequence at a time, not a batch of {keys.shape[0]}")
        sequence, start = self._sequence, self.offset
        stop = start + keys.shape[2]
        sequence.cover(stop)
        k, v = (rows[0].transpose(1, 0, 2) for rows in (keys, values))
        sequence.kv.write(self._layer, k, v, sequence.table.slots(start, stop))
        self.offset = stop
        return self._fetch()

    def _fetch(self) -> tuple[mx.array, mx.array]:
        k, v = self._sequence.kv.read(self._layer, self._sequence.table.ids, self.offset)
        return k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | Literal["causal"] | None:
        """The mask of the next `N` tokens against all `offset + N`: None, "causal", or bool `[N, offset + N]`."""
        if window_size is None and N == 1:
            return None
        if window_size is None and not return_array:
            return "causal"
        row = mx.arange(self.offset, self.offset + N)[:, None]
        column = mx.arange(self.offset + N)[None]
        visible = column <= row
        return visible if window_size is None else visible & (column > row - window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens; returns how many were. Blocks are freed when every layer has let go."""
        n = min(n, self.offset)
        self.offset -= n
        self._sequence.trim()
        return n

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """The sequence's K and V, `[1, kv_heads, offset, head_dim]`."""
        return self._fetch()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the sequence holds in this layer."""
        k, v = self._sequence.kv.pools(self._layer)
        return len(self._sequence.table) * (k.nbytes + v.nbytes) // self._sequence.kv.num_blocks
