"""The public kernels: the best implementation for the device, behind the functions of `reference`.

Every function takes `backend`: "metal", "cuda" or "reference". None is the best for MLX's default device, or the
reference path where the self-test of the variant failed. A back end that this device has not is a ValueError. All calls
must come from one thread: MLX's streams belong to it.

On a GPU back end the pools are written in place, behind MLX's back: `write_kv` returns the pools that it was given.
What keeps reads and writes in order, within a step and between steps in flight, is `order` alone: pass the array that
the last reader or writer of these pools returned. An edge of the graph that names the pool would not do: CUDA graphs
order two kernels only where one takes what the other put out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx

from pagefork.kernels import cuda, metal, reference
from pagefork.kernels.device import Device, device
from pagefork.kernels.launch import Launch
from pagefork.kernels.spec import Attention, Case, Linear, Pools, Rope, Rotation, Variant, pools_of

_LENGTH_STEP = 256
"""Bounds of lengths are rounded up to this, so that a growing sequence finds its launches in the cache."""

_fallbacks: set[Variant] = set()


def write_kv(
    k_pool: mx.array,
    v_pool: mx.array,
    k: mx.array,
    v: mx.array,
    slots: mx.array,
    copies: mx.array | None = None,
    order: mx.array | None = None,
    *,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Copy blocks, then write a step's K and V rows into their slots: `reference.write_kv` says the shapes.

    On a GPU: one launch, in place, no pool copied. `order`: what must be done before, normally the attention
    output of this layer's step before; without it the write waits for nothing. Returns
    `(k_pool, v_pool, order)`; the attention that reads these rows must be given this `order`.
    """
    _, block_size, kv_heads, head_dim = k_pool.shape
    pools = Pools(k_pool.dtype, kv_heads, head_dim, block_size)
    target = _target(backend, pools)
    if target.backend == "reference":
        if order is not None and target.on_gpu:
            slots = _after(slots, order)
        return reference.write_kv(k_pool, v_pool, k, v, slots, copies, order)
    rows, copied = k.shape[0], 0 if copies is None else copies.shape[0]
    if rows + copied == 0:
        return k_pool, v_pool, _order(order, pools.dtype)
    if rows == 0:  # a kernel's input is never empty
        k = v = mx.zeros((1, kv_heads, head_dim), dtype=pools.dtype)
        slots, rows = mx.array([-1]), 1
    written = _write_launch(target.backend, pools, rows, copied)(
        {
            "k_pool": k_pool,
            "v_pool": v_pool,
            "k": _cast(k, pools.dtype),
            "v": _cast(v, pools.dtype),
            "slots": _cast(slots, mx.int32),
            "copies": _no_copies() if copies is None or not copied else _cast(copies, mx.int32),
            "order": _order(order, pools.dtype),
        }
    )
    return k_pool, v_pool, written["written"]


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
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Rotate a step's queries and keys and write its keys and values: `reference.rope_and_write` says the shapes.

    On a GPU: one launch, in place. `order` is as for `write_kv`. Returns `(k_pool, v_pool, q, order)`; the attention
    that reads these rows must be given this `order`. A variant whose self-test failed takes MLX's rope and `write_kv`.
    """
    _, block_size, kv_heads, head_dim = k_pool.shape
    dtype, periods = k_pool.dtype, rope.freqs is not None
    rotation = Rotation(dtype, heads, kv_heads, head_dim, block_size, rope.dims, rope.traditional, periods)
    target = _target(backend, rotation)
    if target.backend == "reference":
        q, k, v = reference.rotate(qkv, positions, rope, heads, kv_heads, head_dim)
        k_pool, v_pool, order = write_kv(k_pool, v_pool, k, v, slots, None, order, backend=backend)
        return k_pool, v_pool, q, order
    reference.check_width(qkv, heads, kv_heads, head_dim)
    rows = qkv.shape[0]
    if rows == 0:
        return k_pool, v_pool, mx.zeros((0, heads, head_dim), dtype=dtype), _order(order, dtype)
    arrays = {
        "k_pool": k_pool,
        "v_pool": v_pool,
        "qkv": _cast(qkv, dtype),
        "slots": _cast(slots, mx.int32),
        "positions": _cast(positions, mx.int32),
        "params": _params(rope.scale, math.log2(rope.base) if rope.base is not None else 0.0, 0.0),
        "order": _order(order, dtype),
    }
    if rope.freqs is not None:
        arrays["freqs"] = _cast(rope.freqs, mx.float32)
    q = _rotation_launch(target.backend, rotation, rows)(arrays)["q"]
    return k_pool, v_pool, q, q


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
    backend: str | None = None,
) -> mx.array:
    """Attend each row of `q` to the blocks of its own table: `reference.paged_attention` says the shapes.

    `order`: what `write_kv` returned for the rows that are read. The result is the `order` of this layer's next write;
    of no rows it is empty and orders nothing, so keep the one you had.
    On CUDA take `lengths` of one or two rows from a longer array: MLX keeps arrays of at most 8 bytes where the host
    can reach them, and a launch waits 20 us for them (docs/cuda.md).
    """
    _, block_size, kv_heads, head_dim = k_pool.shape
    features = (window is not None, sinks is not None, softcap is not None)
    case = Attention(k_pool.dtype, q.shape[1], kv_heads, head_dim, block_size, *features)
    target = _target(backend, case)
    if target.backend == "reference":
        if order is not None:
            tables = _after(tables, order)
        return reference.paged_attention(
            q, k_pool, v_pool, tables, lengths, scale=scale, window=window, sinks=sinks, softcap=softcap
        )
    rows, width = tables.shape
    if rows == 0:
        return q
    bound = -(-(max_length or width * block_size) // _LENGTH_STEP) * _LENGTH_STEP
    arrays = {
        "q": _cast(q, case.dtype),
        "k_pool": k_pool,
        "v_pool": v_pool,
        "tables": _cast(tables, mx.int32),
        "lengths": _cast(lengths, mx.int32),
        "params": _params(scale, softcap or 0.0, float(window or 0)),
        "order": _order(order, case.dtype),
    }
    if sinks is not None:
        arrays["sinks"] = _cast(sinks, case.dtype)
    for launch in _decode_launches(target, case, rows, width, min(bound, width * block_size)):
        arrays.update(launch(arrays))
    return _cast(arrays["out"], q.dtype)


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
    backend: str | None = None,
) -> mx.array:
    """Causal attention of one sequence's chunk, by gather and MLX's own attention on every back end.

    `order`: what `write_kv` returned; the gather comes after it. `reference.prefill_attention` says the shapes.
    """
    if order is not None:
        table = _after(table, order)
    return reference.prefill_attention(
        q, k_pool, v_pool, table, start, scale=scale, window=window, sinks=sinks, softcap=softcap
    )


def linear(
    x: mx.array,
    weights: mx.array,
    *,
    gain: mx.array | None = None,
    eps: float = 0.0,
    bias: mx.array | None = None,
    glu: bool = False,
    add: mx.array | None = None,
    backend: str | None = None,
) -> mx.array:
    """A product of few rows with what stands around it in a layer: `reference.linear` says what, and the shapes.

    On CUDA one launch where `can_multiply`, that reads the weights once and about as fast as memory gives them; MLX's
    own operations elsewhere. `x`, `weights` and `gain` must begin at a multiple of 16 bytes, as whole arrays do.

    :raises ValueError: if the shapes do not fit each other, or on CUDA the dtypes are not one.
    """
    rows, inputs = x.shape
    case = Linear(x.dtype, 0 if gain is None else inputs, bias is not None, glu, add is not None)
    target = _target(backend, case)
    launch = _linear_launch(target, case, rows, inputs, weights.shape[0])
    if launch is None:
        return reference.linear(x, weights, gain=gain, eps=eps, bias=bias, glu=glu, add=add)
    reference.check_product(x, weights, gain, bias, glu, add)
    given = {"x": x, "weights": weights, "gain": gain, "bias": bias, "add": add}
    arrays = {name: array for name, array in given.items() if array is not None}
    if any(array.dtype != x.dtype for array in arrays.values()):
        raise ValueError(f"a product takes one dtype, not {[str(array.dtype) for array in arrays.values()]}")
    return launch(arrays | {"params": _params(eps, 0.0, 0.0)})["y"]


def can_multiply(case: Linear, rows: int, inputs: int, outputs: int) -> bool:
    """Whether `linear` is one launch on this device for so many rows of weights `[outputs, inputs]`."""
    return _linear_launch(device(), case, rows, inputs, outputs) is not None


def in_place(cases: Sequence[Case]) -> bool:
    """Whether every write and read of these cases is fused, so that steps may be in flight together.

    The reference path scatters, which copies a whole pool unless each step is evaluated before the next is built. A
    rotation that is not fused does not count: its write is one by itself.
    """
    if device().backend == "reference":
        return False
    attentions = [case for case in cases if isinstance(case, Attention)]
    return not _fallbacks.intersection([*attentions, *pools_of(cases)])


def can_rotate(rotation: Rotation) -> bool:
    """Whether this device has a kernel for it; where not, `rope_and_write` is MLX's rope and a write."""
    backend = device().backend
    try:
        if backend != "reference":
            (metal if backend == "metal" else cuda).rope_and_write_spec(rotation, rows=1)
    except ValueError:
        return False
    return True


def fall_back(variant: Variant) -> None:
    """From now on, take the reference path for this variant unless a back end is named."""
    _fallbacks.add(variant)


def _target(backend: str | None, variant: Variant) -> Device:
    found = device()
    if backend is None:
        return found.without_kernels() if _fallbacks and variant in _fallbacks else found
    if backend == "reference":
        return found.without_kernels()
    if backend != found.backend:
        raise ValueError(f"no {backend} kernels on this device ({found.name}): leave `backend` out or say 'reference'")
    return found


@lru_cache(maxsize=4096)
def _write_launch(backend: str, pools: Pools, rows: int, copies: int) -> Launch:
    module = metal if backend == "metal" else cuda
    spec = module.write_kv_spec(pools.dtype, pools.kv_heads, pools.head_dim, pools.block_size, rows=rows, copies=copies)
    return Launch(backend, spec)


@lru_cache(maxsize=4096)
def _rotation_launch(backend: str, rotation: Rotation, rows: int) -> Launch:
    module = metal if backend == "metal" else cuda
    return Launch(backend, module.rope_and_write_spec(rotation, rows=rows))


@lru_cache(maxsize=4096)
def _decode_launches(target: Device, case: Attention, rows: int, width: int, bound: int) -> tuple[Launch, ...]:
    if target.backend == "metal":
        specs = metal.decode_specs(case, rows=rows, max_blocks=width, max_length=bound, cores=target.cores)
    else:
        specs = cuda.decode_specs(
            case,
            rows=rows,
            max_blocks=width,
            max_length=bound,
            cores=target.cores,
            shared_memory=target.shared_memory,
        )
    return tuple(Launch(target.backend, spec) for spec in specs)


@lru_cache(maxsize=4096)
def _linear_launch(target: Device, case: Linear, rows: int, inputs: int, outputs: int) -> Launch | None:
    """None where there is no kernel for it: on Metal MLX's own are used."""
    if target.backend != "cuda":
        return None
    sizes = {"rows": rows, "inputs": inputs, "outputs": outputs}
    try:
        spec = cuda.linear_spec(case, **sizes, cores=target.cores, shared_memory=target.shared_memory)
    except ValueError:
        return None
    return Launch("cuda", spec)


@lru_cache(maxsize=256)
def _params(first: float, second: float, third: float) -> mx.array:
    return mx.array([first, second, third, 0.0], dtype=mx.float32)


@cache
def _no_copies() -> mx.array:
    return mx.array([[0, 0, 0]], dtype=mx.int32)


@cache
def _no_order(dtype: mx.Dtype) -> mx.array:
    return mx.array([0.0] * 8, dtype=dtype)  # no operation, so no stream of some thread


def _order(order: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """An array that a kernel can take only after `order`: one of the pools' dtype, since that is compiled in.

    An empty array orders nothing: nothing was read or written.
    """
    if order is None or order.size == 0:
        return _no_order(dtype)
    if order.size < 8:
        order = mx.broadcast_to(order.reshape(-1)[:1], (8,))
    return _cast(order, dtype)


def _after(indices: mx.array, order: mx.array) -> mx.array:
    """`indices` unchanged, by a kernel that takes `order`: what is gathered by them is gathered after `order`."""
    if order.size == 0:
        return indices
    never = mx.isnan(order.reshape(-1)[:1]) & False
    return indices + never.astype(indices.dtype)


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array if array.dtype == dtype else array.astype(dtype)
