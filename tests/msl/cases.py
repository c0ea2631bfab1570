"""Random decode cases, their answer in float64, and the run of a case through the Metal text.

What a row must not touch is poisoned twice: it holds NaN (or a block id far outside the pool), and the harness is told
that it is not the kernel's to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention, KernelSpec

from .harness import NUMPY, Array, run

Floats = npt.NDArray[np.float64]

STRAY = 2**30 - 1
TOLERANCE = {mx.float32: 2e-3, mx.float16: 2e-3, mx.bfloat16: 1e-2}

Mutation = Callable[[KernelSpec], KernelSpec]


@dataclass(frozen=True)
class Options:
    """The values behind the features that an `Attention` compiles in."""

    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class Case:
    """Inputs as the kernels take them, the masks of what may be read, and the values behind the raw arrays."""

    attention: Attention
    inputs: dict[str, Array]
    readable: dict[str, npt.NDArray[np.bool_]]
    options: Options


@dataclass(frozen=True)
class Decoded:
    """The output in float64, the raw one, and the bytes that all launches loaded from K and V."""

    out: Floats
    raw: Array
    loaded: int


def encode(values: npt.ArrayLike, dtype: mx.Dtype) -> Array:
    """Round to `dtype`; bfloat16 becomes uint16 bits."""
    single = np.asarray(values, np.float32)
    if dtype != mx.bfloat16:
        return np.ascontiguousarray(single.astype(NUMPY[dtype]))
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)


def decode(raw: Array) -> Floats:
    """The values of a raw array."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


def make_case(attention: Attention, lengths: list[int], options: Options | None = None, *, seed: int = 0) -> Case:
    """Rows of `lengths`, each of blocks of its own in a random order."""
    rng = np.random.default_rng(seed)
    options = options or Options()
    block, kv_heads, dim = attention.block_size, attention.kv_heads, attention.head_dim
    counts = [-(-length // block) for length in lengths]
    total, width = sum(counts) + 2, max(counts) + 2
    pools = np.full((2, total, block, kv_heads, dim), np.nan)
    slots = np.zeros((total, block), bool)
    tables = rng.choice([STRAY, -STRAY], (len(lengths), width)).astype(np.int32)
    entries = np.zeros(tables.shape, bool)
    free = rng.permutation(total)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        low = _low(length, options)
        positions = np.arange(low, length)
        first = low // block if length else 0
        tables[row, first:count], free = free[first:count], free[count:]
        entries[row, first:count] = True
        at = tables[row, positions // block], positions % block
        slots[at] = True
        pools[:, at[0], at[1]] = rng.standard_normal((2, len(positions), kv_heads, dim))
    mask = np.broadcast_to(slots[:, :, None, None], pools.shape[1:])
    inputs = {
        "q": encode(rng.standard_normal((len(lengths), attention.heads, dim)) * 2, attention.dtype),
        "k_pool": encode(pools[0], attention.dtype),
        "v_pool": encode(pools[1], attention.dtype),
        "tables": tables,
        "lengths": np.array(lengths, np.int32),
        "params": np.array([dim**-0.5, options.softcap, options.window, 0], np.float32),
        "order": encode(np.zeros(8), attention.dtype),
    }
    if attention.sinks:
        inputs["sinks"] = encode(rng.standard_normal(attention.heads) * 2, attention.dtype)
    return Case(attention, inputs, {"k_pool": mask, "v_pool": mask, "tables": entries}, options)


def expected(case: Case) -> Floats:
    """Attention from its definition, row by row and head by head."""
    q, k_pool, v_pool = (decode(case.inputs[name]) for name in ("q", "k_pool", "v_pool"))
    group = case.attention.heads // case.attention.kv_heads
    out = np.zeros(q.shape)
    for row, length in enumerate(case.inputs["lengths"].tolist()):
        positions = np.arange(_low(length, case.options), length)
        blocks = case.inputs["tables"][row, positions // case.attention.block_size]
        offsets = positions % case.attention.block_size
        for head in range(q.shape[1] if length else 0):
            scores = k_pool[blocks, offsets, head // group] @ q[row, head] * float(case.inputs["params"][0])
            if case.options.softcap:
                scores = case.options.softcap * np.tanh(scores / case.options.softcap)
            sink = [decode(case.inputs["sinks"])[head]] if case.attention.sinks else []
            logits = np.concatenate([scores, sink])
            weights = np.exp(logits - logits.max())
            out[row, head] = weights[: len(positions)] @ v_pool[blocks, offsets, head // group] / weights.sum()
    return out


def attend(case: Case, *, cores: int = 1, seed: int = 0, mutation: Mutation = lambda spec: spec) -> Decoded:
    """Run the launches of `case`; `cores` decides the number of splits.

    :raises KernelFault: see `harness.run`.
    """
    rows, width = case.inputs["tables"].shape
    longest = int(case.inputs["lengths"].max())
    specs = metal.decode_specs(case.attention, rows=rows, max_blocks=width, max_length=longest, cores=cores)
    arrays, readable = dict(case.inputs), dict(case.readable)
    loaded = 0
    for spec in map(mutation, specs):
        # A row that needs fewer splits than its launch has leaves the rest unwritten; the merge must not read them.
        result = run(spec, arrays, seed=seed, readable=readable, partly_written=("partial",))
        arrays.update(result.outputs)
        readable.update(result.written)
        loaded += sum(result.loaded.get(name, 0) for name in ("k_pool", "v_pool"))
    return Decoded(decode(arrays["out"]), arrays["out"], loaded)


def error(found: Floats, wanted: Floats) -> float:
    """The largest difference within a row's head, relative to the largest value there; infinite for a NaN."""
    if not np.isfinite(found).all():
        return float("inf")
    size = np.maximum(np.abs(wanted).max(axis=-1), 1e-6)
    return float((np.abs(found - wanted).max(axis=-1) / size).max())


def least_bytes(case: Case) -> int:
    """Bytes of K and V that a decode must load: each visible row of each KV head once."""
    visible = sum(length - _low(length, case.options) for length in case.inputs["lengths"].tolist())
    kind = case.attention
    return 2 * visible * kind.kv_heads * kind.head_dim * kind.dtype.size


def variant(base: Attention, **changes: object) -> Attention:
    """`base` with some fields changed."""
    return replace(base, **changes)  # type: ignore[arg-type]


def _low(length: int, options: Options) -> int:
    return max(0, length - options.window) if options.window else 0
