"""The fused kernels on a GPU, against attention in float64."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from pagefork.kernels import (
    Rope,
    can_multiply,
    land,
    linear,
    paged_attention,
    prefill_attention,
    rope_and_write,
    selftest,
    write_kv,
)
from pagefork.kernels.device import device
from pagefork.kernels.spec import Linear

from .oracle import attend, error, multiply, random_case, rotate, to_numpy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(mx.default_device().type != mx.gpu, reason="no GPU back end of MLX"),
]

TOLERANCE = {mx.float32: 2e-3, mx.float16: 2e-3, mx.bfloat16: 1e-2}
DTYPES = list(TOLERANCE)
RAGGED = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 0, 257, 640, 1500]


def check(dtype: mx.Dtype, **options: object) -> None:
    case = random_case(np.random.default_rng(0), dtype, **{"lengths": RAGGED, **options})
    arrays = case.arrays(dtype)
    found = paged_attention(*arrays, **case.options(dtype), backend=device().backend)
    assert error(found, attend(case)) <= TOLERANCE[dtype]
    again = paged_attention(*arrays, **case.options(dtype), backend=device().backend)
    assert mx.array_equal(found, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_dims(dtype: mx.Dtype, head_dim: int) -> None:
    check(dtype, head_dim=head_dim, heads=8, kv_heads=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_block_sizes(dtype: mx.Dtype, block_size: int) -> None:
    check(dtype, block_size=block_size, heads=6, kv_heads=2)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 2), (9, 3), (16, 4), (10, 2), (12, 2), (7, 1), (32, 4), (16, 1)]
)
def test_gqa_ratios(dtype: mx.Dtype, heads: int, kv_heads: int) -> None:
    check(dtype, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 1, 256), (71, 1, 64), (64, 2, 128), (40, 40, 128), (24, 24, 64)]
)
def test_large_groups_and_many_kv_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    check(mx.float16, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "sinks", "softcap"), list(itertools.product([None, 37], [False, True], [None, 12.0]))
)
def test_features(dtype: mx.Dtype, window: int | None, sinks: bool, softcap: float | None) -> None:
    check(dtype, block_size=8, heads=8, kv_heads=2, window=window, sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 5000])
def test_windows(window: int) -> None:
    check(mx.float16, heads=8, kv_heads=2, window=window)
    check(mx.float16, block_size=8, heads=8, kv_heads=2, window=window)


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [1], [20_000], [20_000, 0, 1, 3], [0] * 40 + [5000] + [0] * 60])
def test_lopsided_lengths(lengths: list[int]) -> None:
    check(mx.bfloat16, lengths=lengths, heads=8, kv_heads=2)


def test_many_ragged_rows() -> None:
    rng = np.random.default_rng(1)
    lengths = np.where(rng.random(300) < 0.2, 0, rng.integers(1, 1200, 300))
    check(mx.bfloat16, lengths=lengths.tolist(), heads=8, kv_heads=4)


def test_selftest_passes() -> None:
    assert [result for result in selftest() if not result.passed] == []


def pools(blocks: int, dtype: mx.Dtype = mx.bfloat16, kv_heads: int = 8, dim: int = 128) -> tuple[mx.array, mx.array]:
    made = tuple(mx.zeros((blocks, 16, kv_heads, dim), dtype=dtype) for _ in range(2))
    mx.eval(made)
    return made


def test_a_thousand_pipelined_steps_write_in_place() -> None:
    """128 sequences grow by a row a step in a 4 GB pool, while 8 blocks a step are copied; nothing is ever awaited."""
    rows, copied, steps = 128, 8, 1000
    k_pool, v_pool = pools(1 << 16)
    tables = np.random.default_rng(0).permutation(1 << 15)[: rows * 63].reshape(rows, 63).astype(np.int32)
    base = mx.random.randint(0, 8, (2, rows, 8, 128)).astype(mx.bfloat16)
    q = mx.random.normal((rows, 32, 128)).astype(mx.bfloat16)
    table = mx.array(tables)
    scale = 128**-0.5
    lengths, slots, copies, additions = [], [], [], []
    for step in range(steps):
        slot = tables[:, step // 16] * 16 + step % 16
        slots.append(mx.array(np.where(np.arange(rows) == step % 131, -1, slot).astype(np.int32)))
        target = (1 << 15) + step * copied + np.arange(copied)
        filled = np.full(copied, min(5, step % 16))  # of the block that is being filled, what is full before
        copies.append(mx.array(np.stack([tables[:copied, step // 16], target, filled], 1).astype(np.int32)))
        lengths.append(mx.full((rows,), step + 1, dtype=mx.int32))
        additions.append(mx.array(step % 31 * 8, dtype=mx.bfloat16))
    mx.eval(base, q, table, lengths, slots, copies, additions)

    def advance(step: int, order: mx.array | None) -> mx.array:
        new = base + additions[step]
        _, _, order = write_kv(k_pool, v_pool, new[0], new[1], slots[step], copies[step], order)
        options = {"scale": scale, "max_length": step + 1, "order": order}
        return paged_attention(q, k_pool, v_pool, table, lengths[step], **options)

    order = advance(0, None)
    mx.eval(order)
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for step in range(1, steps):
        order = advance(step, order)
        mx.async_eval(order)
    mx.eval(order)
    mx.synchronize()
    # What the steps hold in flight (new rows, partial results), but nothing of a pool's size.
    assert mx.get_peak_memory() - before < 128 << 20 < k_pool.nbytes
    assert mx.get_active_memory() - before < 16 << 20

    offsets = np.arange(steps) % 31 * 8
    written = to_numpy(base)[:, None] + offsets[None, :, None, None, None]
    skipped = [step for step in range(steps) if step % 131 < rows]
    written[:, skipped, [step % 131 for step in skipped]] = 0
    for pool, expected in zip((k_pool, v_pool), written, strict=True):
        found = to_numpy(pool[mx.array(tables)].reshape(rows, -1, 8, 128)[:, :steps])
        np.testing.assert_array_equal(found, expected.swapaxes(0, 1))
        for step in (3, 16, 20, 500, 999):
            target = (1 << 15) + step * copied
            copy = np.zeros((copied, 16, 8, 128))
            filled, first = min(5, step % 16), step // 16 * 16
            copy[:, :filled] = expected[first : first + filled, :copied].swapaxes(0, 1)
            np.testing.assert_array_equal(to_numpy(pool[target : target + copied]), copy)
    # Scores go into the hundreds here, where 16 bits would not do: some rows of the last step against float64.
    some = slice(None, None, 16)
    keys, values = written[:, :, some].transpose(0, 2, 3, 1, 4)
    scores = to_numpy(q[some]).reshape(-1, 8, 4, 128) @ keys.swapaxes(-1, -2) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended = (weights / weights.sum(axis=-1, keepdims=True)) @ values
    assert error(order[some], attended.reshape(-1, 32, 128)) <= 1e-2


def test_a_write_alone_adds_no_memory() -> None:
    k_pool, v_pool = pools(1 << 16)
    new = mx.ones((128, 8, 128), dtype=mx.bfloat16)
    slots = mx.arange(128) * 16
    copies = mx.array([(i, 1000 + i, 16) for i in range(8)])
    mx.eval(new, slots, copies, write_kv(k_pool, v_pool, new, new, slots, copies)[2])
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, order = mx.get_active_memory(), None
    for _ in range(1000):
        order = write_kv(k_pool, v_pool, new, new, slots, copies, order)[2]
        mx.async_eval(order)
    mx.eval(order)
    mx.synchronize()
    # Each write puts out its `order` of 16 bytes, of which some are in flight.
    assert mx.get_peak_memory() - before <= 1 << 20
    np.testing.assert_array_equal(to_numpy(k_pool[1000:1008, 0]), 1)


@pytest.mark.parametrize("reader", ["decode", "prefill"])
def test_order_keeps_each_step_between_its_write_and_the_next(reader: str) -> None:
    """Every step overwrites what the step before reads, at length, and nothing else ties the steps."""
    length, rows, steps = 4096, 16, 200
    k_pool, v_pool = pools(length // 16)
    table = mx.array(np.random.default_rng(0).permutation(length // 16).astype(np.int32))
    slots = (table[:, None] * 16 + mx.arange(16)).reshape(-1).astype(mx.int32)
    zeros = mx.zeros((length, 8, 128), dtype=mx.bfloat16)
    values = [mx.full((length, 8, 128), step % 128, dtype=mx.bfloat16) for step in range(steps)]
    q = mx.random.normal((rows, 32, 128)).astype(mx.bfloat16)
    tables, lengths = mx.broadcast_to(table, (rows, len(table))) + 0, mx.full((rows,), length, dtype=mx.int32)
    mx.eval(slots, zeros, values, q, tables, lengths)
    order, outputs = None, []
    for step in range(steps):
        _, _, order = write_kv(k_pool, v_pool, zeros, values[step], slots, None, order)
        if reader == "decode":
            order = paged_attention(q, k_pool, v_pool, tables, lengths, scale=1.0, order=order)
        else:
            order = prefill_attention(q, k_pool, v_pool, table, length - rows, scale=1.0, order=order)
        outputs.append(order)
        if step % 3 == 0:
            mx.async_eval(order)
    found = to_numpy(mx.stack(outputs))
    expected = np.broadcast_to((np.arange(steps) % 128)[:, None, None, None], found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-2)


def random_turn(rows: int, dtype: mx.Dtype, dim: int = 128, kv_heads: int = 2, heads: int = 6) -> list[mx.array]:
    """Pools, joint rows and their slots, of which some are -1."""
    shapes = (rows + 1, 16, kv_heads, dim), (rows + 1, 16, kv_heads, dim), (rows, (heads + 2 * kv_heads) * dim)
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    slots = np.random.default_rng(rows).permutation((rows + 1) * 16)[:rows]
    slots[1::5] = -1
    arrays.append(mx.array(slots.astype(np.int32)))
    mx.eval(arrays)
    return arrays


def periods_of(base: float, dims: int) -> mx.array:
    return mx.array((base ** (np.arange(dims // 2) / (dims // 2))).astype(np.float32))


def check_rotation(dtype: mx.Dtype, rope: Rope, dim: int, furthest: int = 4096, tolerance: float | None = None) -> None:
    """Against the reference path on the same device, which is `mx.fast.rope` and a scatter.

    MLX's own kernel cannot be launched on CUDA for many rows of fewer than 16 pairs (mlx 0.32.4).
    """
    for rows in (1, 32, 200) if rope.dims >= 32 else (1, 32):
        arrays = random_turn(rows, dtype, dim)
        positions = mx.random.randint(0, furthest, (rows,))
        positions[-1] = furthest
        options = {"heads": 6, "rope": rope}
        expected = rope_and_write(*arrays, positions, **options, backend="reference")[:3]
        mx.eval(expected)
        k_pool, v_pool, q, order = rope_and_write(*arrays, positions, **options, backend=device().backend)
        mx.eval(order)
        mx.synchronize()
        assert k_pool is arrays[0] and v_pool is arrays[1]
        assert order.size >= 8 and order.dtype == dtype
        for found, wanted in zip((k_pool, v_pool, q), expected, strict=True):
            assert error(found, to_numpy(wanted)) <= (TOLERANCE[dtype] if tolerance is None else tolerance)
        assert mx.array_equal(v_pool, expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
def test_rotations(dtype: mx.Dtype, dim: int, traditional: bool) -> None:
    check_rotation(dtype, Rope(dim, traditional, base=10000.0), dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [16, 24, 32, 64, *([2, 20] if mx.cuda.is_available() else [])])
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
def test_rotations_of_a_part_of_a_head(dtype: mx.Dtype, dims: int, traditional: bool) -> None:
    check_rotation(dtype, Rope(dims, traditional, base=10000.0, scale=0.25), 80)
    check_rotation(dtype, Rope(dims, traditional, freqs=periods_of(500_000.0, dims) * 2), 80)


@pytest.mark.skipif(not mx.cuda.is_available(), reason="on Metal MLX's own rope uses fast functions")
@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1_000_000.0])
def test_rotations_at_large_positions_are_those_of_mlx(base: float) -> None:
    check_rotation(mx.float32, Rope(128, base=base), 128, furthest=131_072, tolerance=1e-6)
    check_rotation(mx.float32, Rope(128, freqs=periods_of(base, 128)), 128, furthest=131_072, tolerance=1e-6)


def test_rotations_at_large_positions_are_exact() -> None:
    """Cosine and sine of the angle in float32, which periods determine to the last bit."""
    periods = periods_of(10_000.0, 128)
    *arrays, slots = random_turn(32, mx.float32)
    positions = np.random.default_rng(0).integers(100_000, 1_000_000, 32)
    before = to_numpy(arrays[2]).reshape(32, -1, 128)[:, :6]
    options = {"heads": 6, "rope": Rope(128, freqs=periods), "backend": device().backend}
    _, _, q, _ = rope_and_write(*arrays, slots, mx.array(positions.astype(np.int32)), **options)
    angles = positions.astype(np.float32)[:, None] * (np.float32(1) / np.array(periods))
    assert error(q, rotate(before, angles.astype(np.float64), False)) <= 1e-6


def test_pipelined_rotations_stay_between_the_reads_around_them() -> None:
    """Every step overwrites the last position that the step before attends to, and nothing is awaited."""
    length, rows, steps, heads, scale = 2048, 32, 60, 32, 128**-0.5
    width = length // 16
    tables = mx.array(np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32))
    slots = tables[:, -1] * 16 + 15
    start = [mx.random.normal((rows * width, 16, 8, 128)).astype(mx.bfloat16) for _ in range(2)]
    qkv = mx.random.normal((steps, rows, (heads + 16) * 128)).astype(mx.bfloat16) * 2
    lengths, rope = mx.full((rows,), length, dtype=mx.int32), Rope(128, base=500_000.0)
    positions = [mx.full((rows,), length + 7 * step, dtype=mx.int32) for step in range(steps)]
    mx.eval(tables, slots, start, qkv, lengths, positions)

    def outputs(backend: str, await_steps: bool) -> list[mx.array]:
        k_pool, v_pool = (pool + 0 for pool in start)
        mx.eval(k_pool, v_pool)
        order, made = None, []
        for step in range(steps):
            k_pool, v_pool, q, order = rope_and_write(
                k_pool, v_pool, qkv[step], slots, positions[step], heads=heads, rope=rope, order=order, backend=backend
            )
            options = {"scale": scale, "order": order, "backend": backend}
            order = paged_attention(q, k_pool, v_pool, tables, lengths, **options)
            made.append(order)
            (mx.eval if await_steps else mx.async_eval)(order, k_pool)
        return made

    found, expected = outputs(device().backend, False), outputs("reference", True)
    for one, other in zip(found, expected, strict=True):
        assert error(one, to_numpy(other)) <= 2 * TOLERANCE[mx.bfloat16]  # either is rounded


PRODUCTS = [(64, 16), (576, 1536), (1096, 48), (4096, 8192), (8192, 64), (14336, 272)]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="on Metal MLX's own products are used")
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), PRODUCTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_products_of_few_rows(dtype: mx.Dtype, inputs: int, outputs: int, rows: int) -> None:
    if not can_multiply(Linear(dtype), rows, inputs, outputs):
        pytest.skip("more shared memory than a block has here")
    rng = np.random.default_rng(inputs + rows)

    def random(*shape: int, scale: float = 1.0) -> mx.array:
        return mx.array((rng.standard_normal(shape) * scale).astype(np.float32)).astype(dtype)

    x, weights = random(rows, inputs), random(outputs, inputs, scale=inputs**-0.5)
    gain, bias, add, half = random(inputs), random(outputs), random(rows, outputs), random(rows, outputs // 2)
    for options in (
        {},
        {"gain": gain, "eps": 1e-5},
        {"bias": bias},
        {"add": add},
        {"gain": gain, "eps": 0.5, "glu": True},
        {"gain": gain, "eps": 1e-5, "bias": bias, "glu": True, "add": half},
    ):
        found = linear(x, weights, **options, backend="cuda")
        wide = {name: to_numpy(value) if isinstance(value, mx.array) else value for name, value in options.items()}
        assert error(found, multiply(to_numpy(x), to_numpy(weights), **wide)) <= TOLERANCE[dtype]
        assert mx.array_equal(found, linear(x, weights, **options, backend="cuda"))


@pytest.mark.skipif(not mx.cuda.is_available(), reason="on Metal MLX's own products are used")
def test_other_products_are_those_of_mlx() -> None:
    for dtype, rows, inputs, outputs in (
        (mx.float32, 1, 64, 64),
        (mx.bfloat16, 5, 64, 64),
        (mx.bfloat16, 1, 60, 64),
        (mx.bfloat16, 1, 64, 40),
        (mx.bfloat16, 4, 28672, 64),
    ):
        assert not can_multiply(Linear(dtype), rows, inputs, outputs)
        x, weights = mx.random.normal((rows, inputs)).astype(dtype), mx.random.normal((outputs, inputs)).astype(dtype)
        assert error(linear(x, weights), to_numpy(x) @ to_numpy(weights).T) <= TOLERANCE[mx.bfloat16]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="on Metal the host reads all arrays alike")
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_arrays_land_one_behind_the_other(rows: int) -> None:
    target = mx.full((rows * 5 + 7,), -1, dtype=mx.int32)
    ids, values = mx.arange(rows), mx.random.normal((rows,))
    top = mx.random.randint(-9, 9, (rows, 3))
    mx.eval(target, ids, values, top)
    mx.eval(land(target, [ids, values, top]))
    found = np.array(target)
    assert (found[:rows] == np.array(ids)).all()
    assert (found[rows : 2 * rows].view(np.float32) == np.array(values)).all()
    assert (found[2 * rows : 5 * rows] == np.array(top).ravel()).all()
    assert (found[5 * rows :] == -1).all()


@pytest.mark.skipif(not mx.cuda.is_available(), reason="nothing lands there")
def test_bad_landings_are_refused() -> None:
    target, three = mx.zeros((4,), dtype=mx.int32), mx.zeros((3,))
    for place, arrays, why in (
        (target, [three, three], "cannot land"),
        (target.astype(mx.float32), [three], "cannot land"),
        (target[None], [three], "cannot land"),
        (target, [three.astype(mx.float16)], "4 bytes"),
    ):
        with pytest.raises(ValueError, match=why):
            land(place, arrays)
