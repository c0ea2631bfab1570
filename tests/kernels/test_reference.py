"""The reference path, which every fused kernel is compared with, against attention in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.kernels import paged_attention, prefill_attention, write_kv

from .oracle import attend, error, random_case, rounded, softmax, to_mlx, to_numpy

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(list(TOLERANCE)),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64]),
    block_size=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 80),
    sinks=st.booleans(),
    softcap=st.none() | st.floats(1, 50),
)
def test_decode_attends_to_visible_positions_alone(
    seed, dtype, lengths, group, kv_heads, head_dim, block_size, window, sinks, softcap
) -> None:
    case = random_case(
        np.random.default_rng(seed),
        dtype,
        lengths=lengths,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )
    found = paged_attention(*case.arrays(dtype), **case.options(dtype), backend="reference")
    assert error(found, attend(case)) <= TOLERANCE[dtype]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 20),
    start=st.integers(0, 40),
    window=st.none() | st.integers(1, 50),
    sinks=st.booleans(),
    softcap=st.none() | st.just(10.0),
    ordered=st.booleans(),
)
def test_prefill_is_causal_and_reads_its_own_blocks_alone(seed, count, start, window, sinks, softcap, ordered) -> None:
    rng = np.random.default_rng(seed)
    # As a decode over start + count positions, whose last `count` rows are asked for.
    case = random_case(rng, mx.float32, lengths=[start + count], heads=6, kv_heads=2, softcap=softcap, sinks=sinks)
    q = rounded(rng.standard_normal((count, 6, 64)), mx.float32)
    _, k_pool, v_pool, tables, _ = case.arrays(mx.float32)
    options = case.options(mx.float32) | {"window": window}
    order = mx.zeros((8,)) if ordered else None
    found = prefill_attention(to_mlx(q, mx.float32), k_pool, v_pool, tables[0], start, **options, order=order)
    on_gpu = mx.default_device().type == mx.gpu  # where MLX multiplies float32 matrices in TF32
    assert error(found, causal(q, case, start, window)) <= (2e-3 if on_gpu else 1e-5)


def causal(q: np.ndarray, case, start: int, window: int | None) -> np.ndarray:
    out = np.zeros(q.shape)
    for i in range(len(q)):
        stop = start + i + 1
        positions = np.arange(0 if window is None else max(0, stop - window), stop)
        slots = case.tables[0, positions // 16], positions % 16
        for head in range(q.shape[1]):
            sink = None if case.sinks is None else float(case.sinks[head])
            scores = case.k_pool[slots][:, head // 3] @ q[i, head] * case.scale
            out[i, head] = softmax(scores, case.softcap, sink) @ case.v_pool[slots][:, head // 3]
    return out


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 6),
    copies=st.integers(0, 3),
    filled=st.integers(0, 8),
    ignored=st.integers(0, 6),
)
def test_write_copies_then_writes_and_leaves_the_rest(seed, rows, copies, filled, ignored) -> None:
    rng = np.random.default_rng(seed)
    before = rng.standard_normal((2, 12, 8, 2, 16)).astype(np.float32)
    new = rng.standard_normal((2, rows, 2, 16)).astype(np.float32)
    copy = np.array([(i, 3 + i, filled) for i in range(copies)], np.int32).reshape(-1, 3)
    # The first rows go to what the copies leave free of their destinations, the rest anywhere else.
    own = [(3 + i) * 8 + filled for i in range(copies)] if filled < 8 else []
    slots = np.array([*own, *(48 + rng.permutation(40))][:rows], np.int32)
    slots[rng.permutation(rows)[:ignored]] = -1
    expected = before.copy()
    for source, destination, count in copy:
        expected[:, destination, :count] = before[:, source, :count]
    kept = slots >= 0
    expected.reshape(2, -1, 2, 16)[:, slots[kept]] = new[:, kept]
    k_pool, v_pool, order = write_kv(
        *(mx.array(array) for array in (*before, *new)), mx.array(slots), mx.array(copy) if copies else None
    )
    mx.eval(k_pool, v_pool, order)  # on a GPU, the write happens when `order` is computed
    np.testing.assert_array_equal(to_numpy(k_pool), expected[0])
    np.testing.assert_array_equal(to_numpy(v_pool), expected[1])


def test_an_unknown_back_end_is_refused() -> None:
    case = random_case(np.random.default_rng(0), mx.float32, lengths=[3])
    with pytest.raises(ValueError, match="no abacus kernels"):
        paged_attention(*case.arrays(mx.float32), **case.options(mx.float32), backend="abacus")
