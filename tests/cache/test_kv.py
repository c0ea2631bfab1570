"""PagedKVCache and its mlx-lm adapter."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from pagefork import kernels
from pagefork.cache.adapter import SequenceCache
from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.kv import DTYPES, KVError, PagedKVCache, UnsupportedDtype
from pagefork.cache.table import BlockTable

CHUNKS = (7, 1, 1, 4, 1, 1)
LAYERS = [(2, 8), (1, 16)]


def rows(n: int, layer: tuple[int, int], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal((n, *layer), key=mx.random.key(seed)).astype(dtype)


def equal(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b))


def scattered_table(block_size: int, length: int) -> BlockTable:
    table = BlockTable(block_size)
    table.grow(np.random.default_rng(block_size).permutation(40)[: table.blocks_for(length)].astype(np.int32))
    table.advance(length)
    return table


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_what_is_written_through_a_table_is_read_back_exactly(block_size: int, dtype: mx.Dtype) -> None:
    kv = PagedKVCache(40, block_size, LAYERS, dtype)
    table = scattered_table(block_size, 15)
    for layer, shape in enumerate(LAYERS):
        k, v = rows(15, shape, dtype, 1), rows(15, shape, dtype, 2)
        kv.write(layer, k, v, table.slots(0, 15))
        for length in (0, 1, 14, 15):
            read_k, read_v = kv.read(layer, table.ids, length)
            assert equal(read_k, k[:length]) and equal(read_v, v[:length])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 4, 5, 16])
def test_chunks_fetch_what_mlx_lm_fetches(block_size: int, dtype: mx.Dtype) -> None:
    pool = BlockPool(40, block_size)
    pool.free(pool.allocate(7))  # so that the table is not in ascending order
    cache = SequenceCache(pool, PagedKVCache(40, block_size, LAYERS, dtype))
    oracle = [KVCache() for _ in LAYERS]
    for step, n in enumerate(CHUNKS):
        for ours, theirs, (heads, dim) in zip(cache.layers, oracle, LAYERS, strict=True):
            k, v = (rows(heads, (n, dim), dtype, 10 * step + part)[None] for part in (0, 1))
            for got, wanted in zip(ours.update_and_fetch(k, v), theirs.update_and_fetch(k, v), strict=True):
                assert equal(got, wanted)
            assert ours.offset == theirs.offset == ours.size()
    assert pool.num_used == -(-sum(CHUNKS) // block_size)


def test_trim_and_close_give_blocks_back_when_every_layer_let_go() -> None:
    pool = BlockPool(8, 2)
    cache = SequenceCache(pool, PagedKVCache(8, 2, LAYERS, mx.float32))
    for layer, (heads, dim) in zip(cache.layers, LAYERS, strict=True):
        layer.update_and_fetch(*[rows(heads, (7, dim), mx.float32, part)[None] for part in (1, 2)])
    kept = cache.layers[1].state[0][:, :, :3]
    assert cache.layers[0].trim(4) == 4 and pool.num_used == 4
    assert cache.layers[1].trim(4) == 4 and pool.num_used == 2
    assert equal(cache.layers[1].state[0], kept)
    with pytest.raises(BlocksExhausted):
        cache.layers[0].update_and_fetch(*[rows(2, (15, 8), mx.float32, part)[None] for part in (1, 2)])
    assert cache.layers[0].offset == 3 and pool.num_used == 2
    cache.close()
    assert pool.num_free == 8 and cache.layers[1].empty()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_masks_are_mlx_lms(n: int, return_array: bool, window: int | None) -> None:
    cache = SequenceCache(BlockPool(8, 4), PagedKVCache(8, 4, LAYERS, mx.float32)).layers[0]
    oracle = KVCache()
    for each in (cache, oracle):
        each.update_and_fetch(mx.zeros((1, 2, 6, 8)), mx.zeros((1, 2, 6, 8)))
    got, wanted = (each.make_mask(n, window_size=window, return_array=return_array) for each in (cache, oracle))
    assert type(got) is type(wanted)
    assert equal(got, wanted) if isinstance(got, mx.array) else got == wanted


def test_a_model_of_mlx_lm_gives_the_same_logits_on_a_paged_cache() -> None:
    args = ModelArgs("llama", 32, 2, 64, 4, 1e-5, 50, num_key_value_heads=2)
    mx.random.seed(0)
    model = Model(args)
    paged = SequenceCache(BlockPool(8, 4), PagedKVCache(8, 4, [(2, 8)] * 2, mx.float32)).layers
    plain = make_prompt_cache(model)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])
    start = 0
    for n in CHUNKS:
        chunk = tokens[:, start : start + n]
        assert mx.allclose(model(chunk, cache=paged), model(chunk, cache=plain), atol=1e-5)
        start += n


def test_block_copies_carry_only_their_filled_rows() -> None:
    kv = PagedKVCache(4, 4, [(1, 2)], mx.float32)
    old = rows(8, (1, 2), mx.float32, 1)
    kv.write(0, old, old, np.arange(8, dtype=np.int32))
    new = rows(1, (1, 2), mx.float32, 2)
    kv.write(0, new, new, np.array([3 * 4 + 2], dtype=np.int32), np.array([[1, 3, 2]], dtype=np.int32))
    fork, _ = kv.read(0, np.array([0, 3], dtype=np.int32), 8)
    assert equal(fork, mx.concatenate([old[:6], new, mx.zeros((1, 1, 2))]))
    assert equal(kv.read(0, np.array([0, 1], dtype=np.int32), 8)[0], old)


def test_attention_sees_the_visible_positions_and_nothing_else() -> None:
    """Foreign blocks and tail slots hold NaN, and the table's tail an id out of range."""
    kv = PagedKVCache(40, 4, [(2, 8)], mx.float32)
    poison = mx.full((160, 2, 8), mx.nan)
    kv.write(0, poison, poison, np.arange(160, dtype=np.int32))
    table = scattered_table(4, 11)
    kv.write(0, rows(11, (2, 8), mx.float32, 1), rows(11, (2, 8), mx.float32, 2), table.slots(0, 11))
    q = rows(11, (4, 8), mx.float32, 3)
    k, v = (x.transpose(1, 0, 2)[None] for x in kv.read(0, table.ids, 11))
    wanted = mx.fast.scaled_dot_product_attention(q.transpose(1, 0, 2)[None], k, v, scale=0.3, mask="causal")
    wanted = wanted[0].transpose(1, 0, 2)
    ids = mx.array([*table.ids.tolist(), 10**6, -5])
    decoded = kv.attend(0, q[-1:], ids[None], mx.array([11]), scale=0.3)
    assert mx.allclose(decoded, wanted[-1:], atol=1e-5)
    assert mx.allclose(kv.prefill(0, q[5:], ids, 5, scale=0.3), wanted[5:], atol=1e-5)


def test_every_access_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that write in place return a fresh order array; it must reach every later access of that layer only."""
    kv = PagedKVCache(4, 4, [(1, 2)] * 2, mx.float32)
    seen: list[mx.array | None] = []
    token, out = mx.array([1]), mx.array([2])

    def write_kv(k_pool, v_pool, k, v, slots, copies=None, order=None):  # type: ignore[no-untyped-def]
        seen.append(order)
        return k_pool, v_pool, token

    def paged_attention(q, k_pool, v_pool, tables, lengths, *, scale, order=None, **options):  # type: ignore[no-untyped-def]
        seen.append(order)
        return out if q.size else q

    def prefill_attention(q, *_, **options):  # type: ignore[no-untyped-def]
        return q

    monkeypatch.setattr(kernels, "write_kv", write_kv)
    monkeypatch.setattr(kernels, "paged_attention", paged_attention)
    monkeypatch.setattr(kernels, "prefill_attention", prefill_attention)
    one, slot = mx.zeros((1, 1, 2)), np.array([0], dtype=np.int32)
    kv.write(0, one, one, slot)
    kv.attend(0, one, slot[None], slot, scale=1.0)
    kv.write(0, one, one, slot)
    kv.write(0, one, one, slot)
    kv.read(0, slot, 1)
    kv.write(0, one, one, slot)
    kv.write(1, one, one, slot)
    assert seen[0] is None and seen[1] is token and seen[2] is out and seen[3] is token
    assert seen[4] is not None and seen[4] is not token and seen[5] is None
    none, rope = mx.array(slot[:0]), kernels.Rope(2, base=1e4)
    for nothing in (
        lambda: kv.read(0, slot, 0),
        lambda: kv.attend(0, one[:0], mx.zeros((0, 1), mx.int32), none, scale=1.0),
        lambda: kv.prefill(0, one[:0], mx.array(slot), 0, scale=1.0),
        lambda: kv.write(0, one[:0], one[:0], none),
        lambda: kv.rope_and_write(0, mx.zeros((0, 6)), none, none, heads=1, rope=rope),
    ):
        token = mx.array([1])
        kv.write(0, one, one, slot)
        nothing()
        kv.write(0, one, one, slot)
        assert seen[-1] is token, "what reads or writes nothing is waited for by nobody, and hides no other access"


def test_a_copy_is_independent_of_its_source() -> None:
    kv = PagedKVCache(4, 4, LAYERS, mx.bfloat16)
    ids, slots = np.arange(2, dtype=np.int32), np.arange(8, dtype=np.int32)
    for layer, shape in enumerate(LAYERS):
        kv.write(layer, rows(8, shape, mx.bfloat16, 1), rows(8, shape, mx.bfloat16, 2), slots)
    mx.eval(kv.pools(0), kv.pools(1))
    held = mx.get_active_memory()
    twin = kv.copy()
    assert mx.get_active_memory() - held >= kv.nbytes, "kernels that write in place need memory of their own"
    for layer, shape in enumerate(LAYERS):
        before = [mx.array(np.array(x.astype(mx.float32))) for x in kv.read(layer, ids, 8)]
        changed = rows(8, shape, mx.bfloat16, 3)
        kv.write(layer, changed, changed, slots)
        assert all(equal(x.astype(mx.float32), y) for x, y in zip(twin.read(layer, ids, 8), before, strict=True))
        twin.write(layer, -changed, -changed, slots)
        assert equal(kv.read(layer, ids, 8)[0], changed) and equal(twin.read(layer, ids, 8)[1], -changed)
    assert twin.nbytes == kv.nbytes == sum(2 * 16 * heads * dim * 2 for heads, dim in LAYERS)


def test_a_cache_names_no_pool_but_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever still names an old pool makes MLX's scatter copy it, in every step."""

    def write_kv(k_pool, v_pool, k, v, slots, copies=None, order=None):  # type: ignore[no-untyped-def]
        flat_k, flat_v = (pool.reshape(-1, 4, 64) for pool in (k_pool, v_pool))
        flat_k[slots], flat_v[slots] = k, v
        k_pool, v_pool = (flat.reshape(1024, 16, 4, 64) for flat in (flat_k, flat_v))
        return k_pool, v_pool, k_pool if order is None else order

    monkeypatch.setattr(kernels, "write_kv", write_kv)
    kv = PagedKVCache(1024, 16, [(4, 64)], mx.float32)
    one = mx.ones((1, 4, 64))
    mx.eval(one)
    peaks, start = [], mx.get_active_memory()
    for block in range(8):
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        kv.write(0, one, one, np.array([block], dtype=np.int32))
        mx.eval(kv.pools(0))
        peaks.append(mx.get_peak_memory() - held)
    # MLX itself may still hold an input for a moment after a step, so not every step must be in place.
    assert min(peaks[1:]) < kv.nbytes // 8
    assert mx.get_active_memory() - start < kv.nbytes // 8


@pytest.mark.parametrize("dtype", [mx.int32, mx.float64, mx.uint8, mx.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: mx.Dtype) -> None:
    with pytest.raises(UnsupportedDtype, match="float32, float16 or bfloat16"):
        PagedKVCache(4, 4, LAYERS, dtype)


@pytest.mark.parametrize(
    "sizes", [(0, 4, LAYERS), (4, 0, LAYERS), (4, 4, []), (4, 4, [(2, 0)]), (2**20, 2**11, [(1, 1)])]
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, list[tuple[int, int]]]) -> None:
    with pytest.raises(KVError):
        PagedKVCache(*sizes)


def test_rows_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    kv = PagedKVCache(4, 4, LAYERS, mx.float32)
    good, slots = rows(2, LAYERS[0], mx.float32, 1), np.arange(2, dtype=np.int32)
    for k, v in [(good[:1], good), (good, good.astype(mx.float16)), (good, rows(2, LAYERS[1], mx.float32, 1))]:
        with pytest.raises(KVError, match="layer 0 takes"):
            kv.write(0, k, v, slots)
    with pytest.raises(KVError, match="do not cover"):
        kv.read(0, np.array([0], dtype=np.int32), 5)
    assert equal(kv.read(0, np.array([0], dtype=np.int32), 4)[0], mx.zeros((4, *LAYERS[0])))


def test_orders_have_two_shapes_whatever_came_before() -> None:
    kv = PagedKVCache(4, 8, [(2, 16)] * 4, mx.float32)
    kv.set_orders([mx.zeros((3, 4, 16)), mx.zeros((5, 4, 16)), mx.ones((2,)), mx.zeros((8,))])
    assert [order.shape for order in kv.orders(3)] == [(3, 4, 16), (8,), (2,), (8,)]
    assert [order.shape for order in kv.orders(5)] == [(8,), (5, 4, 16), (2,), (8,)]
    assert [order.shape for order in PagedKVCache(4, 8, [(2, 16)], mx.float16).orders(1)] == [(8,)]
