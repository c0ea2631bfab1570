"""The arrays behind the blocks: one K and one V pool per layer, allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork import kernels
from pagefork.cache.blocks import Ids
from pagefork.kernels.reference import copy_blocks

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class KVError(Exception):
    """Arrays or arguments that do not fit the pools; nothing was written."""


class UnsupportedDtype(KVError):
    """K and V are kept in float32, float16 or bfloat16: cast the model or choose one of these."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__(f"K and V are kept in float32, float16 or bfloat16, not {dtype}")
        self.dtype = dtype


class PagedKVCache:
    """K and V of every block in every layer: pools `[num_blocks, block_size, kv_heads, head_dim]`.

    It knows arrays, not owners: who may write which slot is decided by a BlockPool and BlockTables. Calls build MLX's
    graph; evaluate once a step, since the reference kernels write in place only while nothing unevaluated names a pool.
    One thread. Source of the layout: PagedAttention (Kwon et al. 2023).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[tuple[int, int]],
        dtype: mx.Dtype = mx.float16,
    ) -> None:
        """Allocate the pools. `layers`: (kv_heads, head_dim) of each layer.

        UnsupportedDtype; KVError when a size is not positive or slots would not fit int32.
        """
        if dtype not in DTYPES:
            raise UnsupportedDtype(dtype)
        if not layers or min(num_blocks, block_size, *(n for layer in layers for n in layer)) < 1:
            raise KVError(f"sizes must be positive: {num_blocks} blocks of {block_size}, layers {list(layers)}")
        if num_blocks * block_size > np.iinfo(np.int32).max:
            raise KVError(f"{num_blocks} blocks of {block_size} positions exceed int32 slots")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple((heads, dim) for heads, dim in layers)
        self.dtype = dtype
        shapes = [(num_blocks, block_size, heads, dim) for heads, dim in self.layers]
        self._k = [mx.zeros(shape, dtype) for shape in shapes]
        self._v = [mx.zeros(shape, dtype) for shape in shapes]
        # The last array that read or wrote a layer's pools, where the pools themselves do not carry the dependency;
        # and the last in-place write among those.
        self._order: list[mx.array | None] = [None] * len(shapes)
        self._written: list[mx.array | None] = [None] * len(shapes)
        mx.eval(self._k, self._v)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools; constant."""
        return sum(pool.nbytes for pool in (*self._k, *self._v))

    def pools(self, layer: int) -> tuple[mx.array, mx.array]:
        """The layer's K and V pools; in use only until the next `write`, which may replace them."""
        return self._k[layer], self._v[layer]

    def write(
        self,
        layer: int,
        k: mx.array,
        v: mx.array,
        slots: mx.array | npt.NDArray[np.int32],
        copies: mx.array | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Do the block copies, then put rows `k`, `v` `[rows, kv_heads, head_dim]` into `slots`, int32 `[rows]`.

        `copies`: int32 `[n, 3]` of (source block, destination block, filled rows). Slot -1 is ignored.
        KVError when shapes or dtype are not the layer's.
        """
        expected = (slots.shape[0], *self.layers[layer])
        if k.shape != expected or v.shape != expected or k.dtype != self.dtype or v.dtype != self.dtype:
            given = f"{k.shape} {k.dtype} and {v.shape} {v.dtype}"
            raise KVError(f"layer {layer} takes {self.dtype} rows of shape {expected}, not {given}")
        before = self._order[layer]
        copied = None if copies is None else _array(copies)
        *written, order = kernels.write_kv(self._k[layer], self._v[layer], k, v, _array(slots), copied, before)
        self._keep(layer, written, order)

    def rope_and_write(
        self, layer: int, qkv: mx.array, slots: mx.array, positions: mx.array, *, heads: int, rope: kernels.Rope
    ) -> mx.array:
        """Rotate the rows `qkv` `[rows, (heads + 2 * kv_heads) * head_dim]` and write their keys and values.

        Returns the rotated queries, `[rows, heads, head_dim]`. `slots`, `positions` int32 `[rows]`.
        """
        pools, before = (self._k[layer], self._v[layer]), self._order[layer]
        *written, q, order = kernels.rope_and_write(*pools, qkv, slots, positions, heads=heads, rope=rope, order=before)
        self._keep(layer, written, order)
        return q

    def copy_blocks(self, copies: npt.NDArray[np.int32]) -> None:
        """Do block copies in every layer at once: for pools that are not written in place, instead of `write`'s.

        There each layer's copies would wait for the layers before it.
        """
        layers = len(self.layers)
        pools = copy_blocks([*self._k, *self._v], copies)
        self._k, self._v = pools[:layers], pools[layers:]

    def attend(
        self,
        layer: int,
        q: mx.array,
        tables: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
        max_length: int | None = None,
    ) -> mx.array:
        """`kernels.paged_attention` over this layer's pools, after its last write: `[rows, heads, head_dim]`.

        `q` `[rows, heads, head_dim]`; `tables` int32 `[rows, max_blocks]`; `lengths` int32 `[rows]`.
        """
        out = kernels.paged_attention(
            q,
            self._k[layer],
            self._v[layer],
            tables,
            lengths,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            max_length=max_length,
            order=self._order[layer],
        )
        self._wait_for(layer, out)
        return out

    def prefill(
        self,
        layer: int,
        q: mx.array,
        table: mx.array,
        start: int,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """`kernels.prefill_attention` over this layer's pools, after its last write: `[n, heads, head_dim]`.

        `q` `[n, heads, head_dim]` stands at positions from `start` on; `table` int32 `[max_blocks]`.
        """
        out = kernels.prefill_attention(
            q,
            self._k[layer],
            self._v[layer],
            table,
            start,
            scale=scale,
            window=window,
            sinks=sinks,
            softcap=softcap,
            order=self._order[layer],
        )
        self._wait_for(layer, out)
        return out

    def pending(self) -> list[mx.array]:
        """What a step must evaluate for its writes to happen: every pool, and what last read or wrote it."""
        return [*self._k, *self._v, *(order for order in self._order if order is not None)]

    def orders(self, rows: int) -> list[mx.array]:
        """What last read or wrote each layer's pools, where they are written in place; see `set_orders`.

        For a step of `rows` rows: of two shapes only, whatever the step before was, since a trace is for one shape.
        """
        return [mx.zeros((8,), self.dtype) if order is None else _as_order(order, rows) for order in self._order]

    def set_orders(self, orders: Sequence[mx.array]) -> None:
        """Say what last read or wrote each layer's pools: for a trace, which knows only its own arrays."""
        self._order = list(orders)
        self._written = list(orders)

    def read(self, layer: int, table_ids: mx.array | Ids, length: int) -> tuple[mx.array, mx.array]:
        """The first `length` positions of a table as contiguous K and V, each `[length, kv_heads, head_dim]`.

        A gather, for reference and inspection: it waits for an in-place write that is not evaluated yet.
        KVError when the table does not cover `length`.
        """
        blocks = -(-length // self.block_size)
        if length < 0 or table_ids.shape[0] < blocks:
            raise KVError(f"{table_ids.shape[0]} blocks of {self.block_size} do not cover length {length}")
        ids = _array(table_ids[:blocks])
        self._settle(layer)
        k, v = (pool[ids].reshape(-1, *pool.shape[2:])[:length] for pool in (self._k[layer], self._v[layer]))
        # An in-place write must come after both gathers, and takes one array to wait for.
        self._wait_for(layer, mx.concatenate([k.reshape(-1)[:1], v.reshape(-1)[:1]]))
        return k, v

    def copy(self) -> PagedKVCache:
        """A cache of the same content in memory of its own; waits for what is queued."""
        other = PagedKVCache.__new__(PagedKVCache)
        other.num_blocks, other.block_size = self.num_blocks, self.block_size
        other.layers, other.dtype = self.layers, self.dtype
        for layer in range(len(self.layers)):
            self._settle(layer)
        other._k, other._v = ([_duplicate(pool) for pool in pools] for pools in (self._k, self._v))
        other._order = [None] * len(self.layers)
        other._written = [None] * len(self.layers)
        mx.eval(other._k, other._v)
        return other

    def _keep(self, layer: int, pools: list[mx.array], order: mx.array) -> None:
        """Take what a write returned."""
        # A write that returns new pools orders its readers through them. To keep the pool as `order` too would
        # pin the old one and turn the next write into a copy.
        in_place = pools[0] is self._k[layer] and order is not pools[0]
        self._k[layer], self._v[layer] = pools
        self._order[layer] = self._written[layer] = order if in_place else None

    def _wait_for(self, layer: int, read: mx.array) -> None:
        """The layer's next write comes after what was read; nothing was where it is empty."""
        if read.size:
            self._order[layer] = read

    def _settle(self, layer: int) -> None:
        # A plain MLX operation names the pool and not the write, so only evaluation orders it after one in place.
        written = self._written[layer]
        if written is not None:
            mx.eval(written)
            self._written[layer] = None


def _as_order(order: mx.array, rows: int) -> mx.array:
    return order if order.ndim == 3 and order.shape[0] == rows else order.reshape(-1)[:8]


def _array(values: mx.array | npt.NDArray[np.int32]) -> mx.array:
    return values if isinstance(values, mx.array) else mx.array(values)


def _duplicate(pool: mx.array) -> mx.array:
    # A select always fills a new buffer and keeps every bit; an assignment or a reshape would share it.
    return mx.where(mx.array(True), pool, pool)
