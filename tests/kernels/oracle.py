"""Paged attention in float64 numpy, written from the definition, and random cases that punish a stray read.

Every slot that no visible position owns holds NaN, and every table entry past a row's length is out of range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

STRAY = 2**30 - 1
"""A block id far outside any pool."""


@dataclass
class Case:
    """Inputs as float64 (already rounded to the dtype under test), and the options of `paged_attention`."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    scale: float
    window: int | None = None
    sinks: np.ndarray | None = None
    softcap: float | None = None

    def arrays(self, dtype: mx.Dtype) -> tuple[mx.array, ...]:
        pools = (to_mlx(array, dtype) for array in (self.q, self.k_pool, self.v_pool))
        return (*pools, mx.array(self.tables), mx.array(self.lengths))

    def options(self, dtype: mx.Dtype) -> dict[str, object]:
        sinks = None if self.sinks is None else to_mlx(self.sinks, dtype)
        return {"scale": self.scale, "window": self.window, "sinks": sinks, "softcap": self.softcap}


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array.astype(np.float32)).astype(dtype)


def to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def rounded(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """What is left of `array` in `dtype`."""
    return to_numpy(to_mlx(array, dtype))


def random_case(
    rng: np.random.Generator,
    dtype: mx.Dtype,
    *,
    lengths: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int | None = None,
    sinks: bool = False,
    softcap: float | None = None,
) -> Case:
    needed = [math.ceil(length / block_size) for length in lengths]
    width = max(*needed, 1) + 2
    total = sum(needed) + 3
    tables = np.full((len(lengths), width), STRAY, np.int32)
    free = rng.permutation(total)
    pools = np.full((2, total, block_size, kv_heads, head_dim), np.nan)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[row, :count], free = free[:count], free[count:]
        low = 0 if window is None else max(0, length - window)
        for position in range(low, length):
            block = tables[row, position // block_size]
            pools[:, block, position % block_size] = rng.standard_normal((2, kv_heads, head_dim))
        tables[row, : low // block_size] = -STRAY
    # Queries that are large enough for a softmax that prefers some positions, and one row whose scores are huge.
    q = rng.standard_normal((len(lengths), heads, head_dim)) * 2
    return Case(
        rounded(q, dtype),
        rounded(pools[0], dtype),
        rounded(pools[1], dtype),
        tables,
        np.array(lengths, np.int32),
        head_dim**-0.5,
        window,
        rounded(rng.standard_normal(heads) * 2, dtype) if sinks else None,
        softcap,
    )


def attend(case: Case) -> np.ndarray:
    rows, heads, head_dim = case.q.shape
    _, block_size, kv_heads, _ = case.k_pool.shape
    out = np.zeros((rows, heads, head_dim))
    for row in range(rows):
        length = int(case.lengths[row])
        low = 0 if case.window is None else max(0, length - case.window)
        if length == 0:
            continue
        positions = np.arange(low, length)
        blocks = case.tables[row, positions // block_size]
        keys, values = (pool[blocks, positions % block_size] for pool in (case.k_pool, case.v_pool))
        for head in range(heads):
            sink = None if case.sinks is None else float(case.sinks[head])
            kv = head // (heads // kv_heads)
            scores = keys[:, kv] @ case.q[row, head] * case.scale
            out[row, head] = softmax(scores, case.softcap, sink) @ values[:, kv]
    return out


def softmax(scores: np.ndarray, softcap: float | None, sink: float | None) -> np.ndarray:
    """Over the last axis; a sink takes its share of the whole and stands for no value."""
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    top = scores.max(axis=-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / (total if sink is None else total + np.exp(sink - top))


def rotate(x: np.ndarray, angles: np.ndarray, traditional: bool) -> np.ndarray:
    """`x` `[rows, heads, head_dim]`, whose first pairs of values turn by `angles` `[rows, dims / 2]`."""
    pairs = angles.shape[1]
    near, far = slice(0, pairs), slice(pairs, 2 * pairs)
    if traditional:
        near, far = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    turned = (x[..., near] + 1j * x[..., far]) * np.exp(1j * angles)[:, None]
    out = x.copy()
    out[..., near], out[..., far] = turned.real, turned.imag
    return out


def error(found: mx.array, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest expected value; infinite where anything is not finite."""
    values = to_numpy(found)
    if not np.isfinite(values).all():
        return math.inf
    return float(np.abs(values - expected).max() / max(np.abs(expected).max(), 1e-6))


def multiply(
    x: np.ndarray,
    weights: np.ndarray,
    *,
    gain: np.ndarray | None = None,
    eps: float = 0.0,
    bias: np.ndarray | None = None,
    glu: bool = False,
    add: np.ndarray | None = None,
) -> np.ndarray:
    """`x` `[rows, inputs]`, normed where there is a gain, times `weights` `[outputs, inputs]`, and what follows."""
    if gain is not None:
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * gain
    y = x @ weights.T + (0.0 if bias is None else bias)
    if glu:
        gate, up = np.split(y, 2, axis=-1)
        y = gate / (1 + np.exp(-gate)) * up
    return y if add is None else y + add
