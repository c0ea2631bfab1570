"""The kernels in plain MLX operations: correct on any device, and what every fused kernel is compared with.

Shapes, here and in the fused kernels:

- pools `[num_blocks, block_size, kv_heads, head_dim]`, one for K and one for V in each layer
- `slots` int32 `[rows]`: `block * block_size + offset`; -1 is ignored
- `positions` int32 `[rows]`: the place of each row in its sequence
- `qkv` `[rows, (heads + 2 * kv_heads) * head_dim]`: each row's query heads, then its key heads, then its value heads
- `tables` int32 `[rows, max_blocks]`: the block ids of each row's sequence; entries past its length may hold anything
- `lengths` int32 `[rows]`: how many positions of the sequence are visible to the row, its own included
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork.kernels.spec import Rope


def write_kv(
    k_pool: mx.array,
    v_pool: mx.array,
    k: mx.array,
    v: mx.array,
    slots: mx.array,
    copies: mx.array | None = None,
    order: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Copy blocks, then write a step's K and V rows into their slots.

    `k`, `v`: `[rows, kv_heads, head_dim]` of the pools' dtype. `copies`: int32 `[n, 3]` of
    (source block, destination block, filled rows), or None; a destination may also be written by `slots`
    at or past its filled rows, but is no other copy's source. `order`: the last array that read or wrote these
    pools; on a GPU `dispatch` makes the write come after it. Returns `(k_pool, v_pool, order)`: use these in place of
    what was passed in. MLX scatters in place only while nothing unevaluated names the old pools, so evaluate once a
    step.
    """
    if copies is not None and copies.shape[0]:
        k_pool, v_pool = copy_blocks([k_pool, v_pool], np.array(copies))
    kept = np.flatnonzero(np.array(slots) >= 0)
    if len(kept) < k.shape[0]:
        chosen = mx.array(kept)
        k, v, slots = k[chosen], v[chosen], slots[chosen]
    if len(kept):
        k_pool, v_pool = _scatter(k_pool, k, slots), _scatter(v_pool, v, slots)
    return k_pool, v_pool, k_pool if order is None else order


def rope_and_write(
    k_pool: mx.array,
    v_pool: mx.array,
    qkv: mx.array,
    slots: mx.array,
    positions: mx.array,
    *,
    heads: int,
    rope: Rope,
    order: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Rotate the rows' queries and keys, and write their keys and values into their slots.

    `qkv` is of the pools' dtype and not yet rotated. A row with slot -1 is rotated, but not written. Returns
    `(k_pool, v_pool, q, order)`, `q` `[rows, heads, head_dim]`; pools and order are `write_kv`'s.

    :raises ValueError: if the width of `qkv` or `rope.dims` does not suit the heads.
    """
    q, k, v = rotate(qkv, positions, rope, heads, *k_pool.shape[2:])
    k_pool, v_pool, order = write_kv(k_pool, v_pool, k, v, slots, None, order)
    return k_pool, v_pool, q, order


def rotate(
    qkv: mx.array, positions: mx.array, rope: Rope, heads: int, kv_heads: int, head_dim: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Rotated queries and keys, and values, each `[rows, its heads, head_dim]`."""
    check_width(qkv, heads, kv_heads, head_dim)
    split = qkv.reshape(-1, heads + 2 * kv_heads, head_dim)
    turning, values = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
    turned = _turn(turning, positions, rope) if _on_cpu() else _rope(turning, positions, rope)
    return turned[:, :heads], turned[:, heads:], values


def _rope(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    return mx.fast.rope(
        x[:, :, None],
        rope.dims,
        traditional=rope.traditional,
        base=rope.base,
        scale=rope.scale,
        offset=positions,
        freqs=rope.freqs,
    ).squeeze(2)


def _turn(x: mx.array, positions: mx.array, rope: Rope) -> mx.array:
    """`_rope` for a CPU, where MLX has no kernel of it and would take the cosines of every layer's positions anew."""
    cosine, sine = _turns(positions, rope)
    part = x[..., : rope.dims].astype(mx.float32).reshape(*x.shape[:2], *cosine.shape[2:])
    other = part[..., ::-1] if rope.traditional else part[..., ::-1, :]
    turned = (part * cosine + other * sine).reshape(*x.shape[:2], rope.dims).astype(x.dtype)
    return turned if rope.dims == x.shape[-1] else mx.concatenate([turned, x[..., rope.dims :]], axis=-1)


def _turns(positions: mx.array, rope: Rope) -> tuple[mx.array, mx.array]:
    """Cosines, and sines with the sign that they have in either half of a pair; the last answer is kept.

    float32 `[rows, 1, 2, dims / 2]`, or `[rows, 1, dims / 2, 2]` where neighbours make a pair.
    """
    global _turned
    if _turned is None or _turned[0] is not positions or _turned[1] is not rope:
        half = rope.dims // 2
        if rope.freqs is not None:
            frequencies = 1 / rope.freqs
        else:
            assert rope.base is not None
            frequencies = mx.exp(-mx.arange(half).astype(mx.float32) * (math.log(rope.base) / half))
        angles = (positions.astype(mx.float32) * rope.scale)[:, None, None] * frequencies
        cosine, sine, axis = mx.cos(angles), mx.sin(angles), -1 if rope.traditional else -2
        turns = mx.stack([cosine, cosine], axis=axis), mx.stack([-sine, sine], axis=axis)
        _turned = (positions, rope, *turns)
    return _turned[2], _turned[3]


_turned: tuple[mx.array, Rope, mx.array, mx.array] | None = None


def check_width(qkv: mx.array, heads: int, kv_heads: int, head_dim: int) -> None:
    """:raises ValueError: if the rows of `qkv` are not of these heads."""
    width = (heads + 2 * kv_heads) * head_dim
    if qkv.shape[-1] != width:
        raise ValueError(f"{heads} + 2 * {kv_heads} heads of {head_dim} make rows of {width}, not {qkv.shape[-1]}")


def copy_blocks(pools: Sequence[mx.array], copies: npt.NDArray[np.int32]) -> list[mx.array]:
    """Do block copies, int32 `[n, 3]` as for `write_kv`, in pools of one block size; returns the new pools.

    Waits once for all of them: a gather that still names a pool would turn the scatter into a copy of it all.
    """
    source, destination = _copied_slots(copies, pools[0].shape[1])
    carried = [_flat(pool)[source] for pool in pools]
    mx.eval(carried)
    return [_scatter(pool, rows, destination) for pool, rows in zip(pools, carried, strict=True)]


def paged_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    tables: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    max_length: int | None = None,
    order: mx.array | None = None,
) -> mx.array:
    """Attend each row of `q` `[rows, heads, head_dim]` to the blocks of its own table; returns the same shape.

    `window`: only the last `window` positions are visible. `sinks`: `[heads]`, a logit per head that takes
    part in the softmax and carries no value. `softcap`: scores become `softcap * tanh(scores / softcap)`.
    Rows of length 0 give zeros. `max_length`: an upper bound of `lengths` known to the host; fused kernels choose
    their number of splits by it. `order`: what must have been computed before (see `write_kv`). Both change nothing
    here.
    Source of the layout: PagedAttention (Kwon et al. 2023).
    """
    rows, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    visible, at = _visible(tables, lengths, window, block_size, kv_heads)
    k, v = (pool.reshape(-1, head_dim)[at] for pool in (k_pool, v_pool))
    if softcap is None and not _on_cpu():
        out = _softmax_attention(q[:, :, None], k, v, scale=scale, mask=visible, sinks=sinks)
    else:
        q = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        sink = None if sinks is None else sinks.reshape(1, kv_heads, heads // kv_heads, 1)
        if not _on_cpu():  # query by query: MLX's product of a matrix is TF32 on CUDA, that of a vector is not
            q, k, v, visible = q[:, :, :, None], k[:, :, None], v[:, :, None], visible[:, :, None]
            sink = None if sink is None else sink[..., None]
        out = _attend(q, k, v, visible, scale, sink, softcap)
    return mx.where(lengths[:, None, None] > 0, out.reshape(rows, heads, head_dim), 0.0).astype(q.dtype)


def prefill_attention(
    q: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    table: mx.array,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    order: mx.array | None = None,
) -> mx.array:
    """Causal attention of one sequence's chunk: `q` `[n, heads, head_dim]` stands at positions `start .. start+n-1`.

    `table`: int32 `[max_blocks]`. Only the blocks that the chunk can see are gathered. Returns `q`'s shape.
    """
    n, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    stop = start + n
    first = 0 if window is None else max(0, start - window + 1) // block_size
    blocks = table[first : math.ceil(stop / block_size)]
    base = first * block_size
    keys = stop - base
    k, v = (pool[blocks].reshape(-1, kv_heads, head_dim)[:keys].transpose(1, 0, 2)[None] for pool in (k_pool, v_pool))
    queries = q.transpose(1, 0, 2)[None]
    plain = window is None and softcap is None
    if plain:
        out = _softmax_attention(queries, k, v, scale=scale, mask="causal", sinks=sinks)
    else:
        row, column = mx.arange(start, stop)[:, None], mx.arange(base, stop)[None]
        visible = column <= row
        if window is not None:
            visible = visible & (column > row - window)
        if softcap is None:
            out = _softmax_attention(queries, k, v, scale=scale, mask=visible, sinks=sinks)
        else:
            group = heads // kv_heads
            sink = None if sinks is None else mx.repeat(sinks.reshape(1, kv_heads, group, 1), n, axis=2)
            seen = mx.tile(visible, (group, 1))
            out = _attend(queries.reshape(1, kv_heads, group * n, head_dim), k, v, seen, scale, sink, softcap)
            out = out.astype(queries.dtype)
    return out.reshape(heads, n, head_dim).transpose(1, 0, 2)


def linear(
    x: mx.array,
    weights: mx.array,
    *,
    gain: mx.array | None = None,
    eps: float = 0.0,
    bias: mx.array | None = None,
    glu: bool = False,
    add: mx.array | None = None,
) -> mx.array:
    """`x` `[rows, inputs]` times `weights` `[outputs, inputs]`, and what stands around that in a layer.

    `gain` `[inputs]`: `x` is first divided by its root mean square, with `eps` added to the mean, and multiplied by it.
    `bias`: `[outputs]`. `glu`: silu of the first half of the outputs times the second half comes out. `add`: of the
    shape of what comes out, and added to it. Returns `[rows, outputs]`, with `glu` half as wide.
    Sources: RMSNorm (Zhang & Sennrich 2019), SwiGLU (Shazeer 2020).

    :raises ValueError: if the shapes do not fit each other.
    """
    check_product(x, weights, gain, bias, glu, add)
    if gain is not None:
        x = mx.fast.rms_norm(x, gain, eps)
    y = x @ weights.T
    if bias is not None:
        y = y + bias
    if glu:
        gate, up = mx.split(y, 2, axis=-1)
        y = gate * mx.sigmoid(gate) * up
    return y if add is None else add + y


def check_product(
    x: mx.array, weights: mx.array, gain: mx.array | None, bias: mx.array | None, glu: bool, add: mx.array | None
) -> None:
    """:raises ValueError: if these are not the arguments of one product."""
    rows, inputs = x.shape
    outputs = weights.shape[0]
    expected = {"weights": (outputs, inputs), "gain": (inputs,), "bias": (outputs,)}
    expected["add"] = (rows, outputs // 2 if glu else outputs)
    for name, array in (("weights", weights), ("gain", gain), ("bias", bias), ("add", add)):
        if array is not None and array.shape != expected[name]:
            raise ValueError(f"`{name}` of a product of {x.shape} inputs is {expected[name]}, not {array.shape}")


def _softmax_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array | str, sinks: mx.array | None
) -> mx.array:
    """MLX's attention, in float32 where it would round every step to 16 bits and be slower: on a CPU."""
    dtype = q.dtype
    if dtype != mx.float32 and _on_cpu():
        q, k, v = (array.astype(mx.float32) for array in (q, k, v))
        sinks = None if sinks is None else sinks.astype(mx.float32)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks).astype(dtype)


def _on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def _flat(pool: mx.array) -> mx.array:
    return pool.reshape(-1, *pool.shape[2:])


def _scatter(pool: mx.array, rows: mx.array, slots: mx.array) -> mx.array:
    flat = _flat(pool)
    flat[slots] = rows
    return flat.reshape(pool.shape)


def _copied_slots(copies: npt.NDArray[np.int32], block_size: int) -> tuple[mx.array, mx.array]:
    """The slots that block copies read and write, row by row."""
    offsets = np.arange(block_size)
    filled = offsets[None] < copies[:, 2:]
    source, destination = ((copies[:, i, None] * block_size + offsets)[filled] for i in (0, 1))
    return mx.array(source), mx.array(destination)


def _visible(
    tables: mx.array, lengths: mx.array, window: int | None, block_size: int, kv_heads: int
) -> tuple[mx.array, mx.array]:
    """Which positions each row sees, bool `[rows, 1, 1, positions]`; and where each of them lies for each KV head.

    The places, int32 `[rows, kv_heads, positions]`, count in heads of a pool. Positions that are not seen lie where the
    row's last one does: whatever stands in their own place, a NaN for one, would not go away by a weight of zero.
    The last answer is kept: every layer of a step asks the same.
    """
    global _seen
    asked = (window, block_size, kv_heads)
    if _seen is None or _seen[0] is not tables or _seen[1] is not lengths or _seen[2] != asked:
        positions, last = mx.arange(tables.shape[1] * block_size)[None], mx.maximum(lengths[:, None] - 1, 0)
        visible = positions <= lengths[:, None] - 1
        if window is not None:
            visible = visible & (positions > last - window)
        places = mx.where(visible, positions, last)
        slots = mx.take_along_axis(tables, places // block_size, axis=1) * block_size + places % block_size
        slots = mx.where(lengths[:, None] > 0, slots, 0)  # an empty row's table may hold anything
        at = slots[:, None] * kv_heads + mx.arange(kv_heads)[:, None]
        _seen = (tables, lengths, asked, visible[:, None, None], at)
    return _seen[3], _seen[4]


_seen: tuple[mx.array, mx.array, tuple[int | None, int, int], mx.array, mx.array] | None = None


def _attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    visible: mx.array,
    scale: float,
    sink: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """Softmax attention in float32: `q` `[..., n, head_dim]`, `k`, `v` `[..., keys, head_dim]`.

    `visible` broadcasts to `[..., n, keys]`, `sink` to `[..., n, 1]`.
    """
    q, k, v = (array.astype(mx.float32) for array in (q, k, v))
    scores = (q * scale) @ k.swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(visible, scores, -mx.inf)
    if sink is None:
        return mx.softmax(scores, axis=-1) @ v
    sink = mx.broadcast_to(sink.astype(mx.float32), (*scores.shape[:-1], 1))
    return mx.softmax(mx.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1] @ v
