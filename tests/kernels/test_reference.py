"""The reference path, which every fused kernel is compared with, against attention in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.kernels import Rope, dispatch, linear, paged_attention, prefill_attention, rope_and_write, write_kv
from pagefork.kernels.device import Device

from .oracle import STRAY, attend, error, multiply, random_case, rotate, rounded, softmax, to_mlx, to_numpy

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
    table = np.array(tables[0])
    table[: 0 if window is None else max(0, start - window + 1) // 16] = STRAY
    found = prefill_attention(to_mlx(q, mx.float32), k_pool, v_pool, mx.array(table), start, **options, order=order)
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


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(1, 9),
    ignored=st.integers(0, 9),
    dims=st.sampled_from([2, 8, 20, 32]),
    traditional=st.booleans(),
    freqs=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
)
def test_rotation_turns_queries_and_keys_and_writes(
    seed, dtype, rows, ignored, dims, traditional, freqs, scale
) -> None:
    rng = np.random.default_rng(seed)
    before = rounded(rng.standard_normal((2, 12, 8, 2, 32)), dtype)
    qkv = rounded(rng.standard_normal((rows, 5 + 2 + 2, 32)), dtype)
    slots = rng.permutation(96)[:rows].astype(np.int32)
    slots[rng.permutation(rows)[:ignored]] = -1
    positions = rng.integers(0, 1000, rows).astype(np.int32)
    periods = 500.0 ** (np.arange(dims // 2) / (dims // 2)) * (3 if freqs else 1)
    base, given = (None, mx.array(periods.astype(np.float32))) if freqs else (500.0, None)
    k_pool, v_pool, q, order = rope_and_write(
        *(to_mlx(pool, dtype) for pool in before),
        to_mlx(qkv.reshape(rows, -1), dtype),
        mx.array(slots),
        mx.array(positions),
        heads=5,
        rope=Rope(dims, traditional, base, scale, given),
        backend="reference",
    )
    mx.eval(k_pool, v_pool, q, order)
    turned = rotate(qkv[:, :7], positions[:, None] * scale / periods, traditional)
    expected = before.copy()
    expected.reshape(2, -1, 2, 32)[0, slots[slots >= 0]] = turned[slots >= 0, 5:]
    expected.reshape(2, -1, 2, 32)[1, slots[slots >= 0]] = qkv[slots >= 0, 7:]
    tolerance = max(TOLERANCE[dtype], 2e-4)  # of an angle in float32
    assert error(q, turned[:, :5]) <= tolerance
    assert error(k_pool, expected[0]) <= tolerance
    np.testing.assert_array_equal(to_numpy(v_pool), expected[1])
    untouched = np.delete(np.arange(96), slots[slots >= 0])
    np.testing.assert_array_equal(
        to_numpy(k_pool).reshape(96, 2, 32)[untouched], before[0].reshape(96, 2, 32)[untouched]
    )


def test_a_rotation_is_what_mlx_makes_of_each_head() -> None:
    rope, positions = Rope(16, base=10000.0), mx.array([131_072, 7])
    pools, qkv = [mx.zeros((2, 8, 1, 32)) for _ in range(2)], mx.random.normal((2, 4 * 32))
    _, _, q, _ = rope_and_write(*pools, qkv, mx.array([-1, -1]), positions, heads=2, rope=rope, backend="reference")
    for row, head in ((0, 0), (0, 1), (1, 1)):
        one = qkv.reshape(2, 4, 1, 1, 32)[row, head][None]
        options = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": int(positions[row].item())}
        assert error(q[row, head], to_numpy(mx.fast.rope(one, 16, **options)).reshape(32)) <= 1e-6


def test_no_rows_change_nothing() -> None:
    pools = [mx.ones((2, 8, 1, 32)) for _ in range(2)]
    nothing = mx.zeros((0,), dtype=mx.int32)
    *after, q, _ = rope_and_write(*pools, mx.zeros((0, 128)), nothing, nothing, heads=2, rope=Rope(32, base=10.0))
    assert q.shape == (0, 2, 32)
    assert all(mx.array_equal(*pair) for pair in zip(pools, after, strict=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 96},
        {"dims": 34},
        {"dims": 7},
        {"base": None},
        {"freqs": mx.ones(16)},
        {"base": None, "freqs": mx.ones(15)},
    ],
)
def test_a_rotation_that_does_not_suit_is_refused(wrong: dict) -> None:
    values = {"width": 128, "dims": 32, "base": 10.0, "freqs": None} | wrong
    pools, one = [mx.ones((2, 8, 1, 32)) for _ in range(2)], mx.array([0])
    with pytest.raises(ValueError, match=r"heads of|rotate in pairs|either `base` or `freqs`|by 16 periods"):
        rope = Rope(values["dims"], base=values["base"], freqs=values["freqs"])
        rope_and_write(*pools, mx.zeros((1, values["width"])), one, one, heads=2, rope=rope)


def test_an_unknown_back_end_is_refused() -> None:
    case = random_case(np.random.default_rng(0), mx.float32, lengths=[3])
    with pytest.raises(ValueError, match="no abacus kernels"):
        paged_attention(*case.arrays(mx.float32), **case.options(mx.float32), backend="abacus")


def test_the_table_of_an_empty_row_is_not_looked_at() -> None:
    k_pool = v_pool = mx.full((4, 8, 1, 16), float("nan"))
    k_pool[1], v_pool[1] = 1.0, 2.0
    tables, lengths = mx.array([[1], [10**6], [-(10**6)]]), mx.array([3, 0, 0])
    out = paged_attention(mx.ones((3, 2, 16)), k_pool, v_pool, tables, lengths, scale=0.25, backend="reference")
    assert mx.array_equal(out, mx.array([2.0, 0.0, 0.0])[:, None, None] * mx.ones((3, 2, 16)))


@pytest.mark.parametrize("options", ["", "gain", "bias", "add", "gain bias glu add"])
def test_a_product_norms_before_and_gates_and_adds_after(options: str) -> None:
    rng = np.random.default_rng(0)
    glu = "glu" in options
    shapes = {"x": (3, 40), "weights": (32, 40), "gain": (40,), "bias": (32,), "add": (3, 16 if glu else 32)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items() if name in f"x weights {options}"}
    found = linear(**{name: to_mlx(array, mx.float32) for name, array in arrays.items()}, eps=0.1, glu=glu)
    exact = mx.default_device().type != mx.gpu  # on CUDA MLX multiplies float32 in TF32
    assert error(found, multiply(**arrays, eps=0.1, glu=glu)) <= (1e-5 if exact else 2e-3)


@pytest.mark.parametrize("wrong", ["weights", "gain", "bias", "add"])
def test_a_product_of_shapes_that_do_not_fit_is_refused(wrong: str) -> None:
    shapes = {"x": (3, 40), "weights": (32, 40), "gain": (40,), "bias": (32,), "add": (3, 32)}
    shapes[wrong] = (*shapes[wrong][:-1], shapes[wrong][-1] - 8)
    with pytest.raises(ValueError, match=f"`{wrong}` of a product"):
        linear(**{name: mx.zeros(shape) for name, shape in shapes.items()})


def test_an_empty_order_orders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device", lambda: Device("reference", "some GPU", 1))
    pool, row = mx.zeros((2, 4, 1, 8)), mx.ones((1, 1, 8))
    k, _, _ = write_kv(pool, pool, row, row, mx.array([5]), order=mx.zeros((0, 8)))
    assert mx.array_equal(k[1, 1], row[0])
    out = paged_attention(row, k, k, mx.array([[1]]), mx.array([2]), scale=1.0, order=mx.zeros((0,)))
    assert out.shape == (1, 1, 8)
