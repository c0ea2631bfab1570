"""BlockPool: who is free, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefork.cache.blocks import (
    BlockError,
    BlockOutOfRange,
    BlockPool,
    BlocksExhausted,
    DoubleFree,
    RetainOfFreeBlock,
)


def drain(pool: BlockPool) -> list[int]:
    """The order in which the free blocks would be handed out."""
    order: list[int] = pool.allocate(pool.num_free).tolist()
    pool.free(order[::-1])
    return order


def test_a_new_pool_hands_out_lowest_ids_first() -> None:
    pool = BlockPool(6, 16)
    assert pool.allocate(2).tolist() == [0, 1]
    ids = pool.allocate(3)
    assert ids.tolist() == [2, 3, 4] and ids.dtype == np.int32
    assert (pool.num_free, pool.num_used, pool.num_blocks, pool.block_size) == (1, 5, 6, 16)


def test_the_last_freed_block_is_the_first_reused() -> None:
    pool = BlockPool(6, 16)
    pool.allocate(4)
    pool.free([1])
    pool.free([3, 0])
    assert pool.allocate(4).tolist() == [0, 3, 1, 4]


def test_granted_ids_are_the_callers_own() -> None:
    pool = BlockPool(4, 16)
    ids = pool.allocate(4)
    ids[:] = 2
    assert pool.free(np.arange(4)) == 4
    assert sorted(drain(pool)) == [0, 1, 2, 3]


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4, 16)
    ids = pool.allocate(2)
    pool.retain(ids)
    pool.retain(ids[:1])
    assert pool.refcounts.tolist() == [3, 2, 0, 0]
    assert [pool.free(ids) for _ in range(2)] == [0, 1]
    assert pool.free(ids[:1]) == 1 and pool.num_free == 4


def test_repeated_ids_count_each_time() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(4)
    pool.retain([3, 3, 1])
    assert pool.refcounts.tolist() == [1, 2, 1, 3]
    assert pool.free([3, 1, 3, 1, 3]) == 2
    assert pool.allocate(2).tolist() == [3, 1]


def test_peak_is_the_high_water_mark() -> None:
    pool = BlockPool(8, 16)
    pool.free(pool.allocate(5))
    pool.allocate(2)
    assert pool.peak_used == 5


def test_refcounts_are_read_only_and_live() -> None:
    pool = BlockPool(2, 16)
    refcounts = pool.refcounts
    with pytest.raises(ValueError, match="read-only"):
        refcounts[0] = 1
    pool.allocate(1)
    assert refcounts.tolist() == [1, 0]


def test_empty_calls_do_nothing() -> None:
    pool = BlockPool(2, 16)
    pool.retain([])
    assert pool.allocate(0).tolist() == [] and pool.free([]) == 0 and pool.free(np.empty(0, np.int32)) == 0


def test_exhaustion_names_what_was_wanted_and_what_is_free() -> None:
    pool = BlockPool(4, 16)
    pool.allocate(1)
    with pytest.raises(BlocksExhausted, match="5 blocks wanted, 3 free") as refused:
        pool.allocate(5)
    assert (refused.value.wanted, refused.value.free) == (5, 3)


MANY = list(range(60))  # long calls take a path of their own
REFUSALS: list[tuple[type[Exception], str, Callable[[BlockPool], object]]] = [
    (BlocksExhausted, "wanted", lambda pool: pool.allocate(65)),
    (ValueError, "-1", lambda pool: pool.allocate(-1)),
    (DoubleFree, "have: 99$", lambda pool: pool.free([98, 99])),
    (DoubleFree, "have: 4$", lambda pool: pool.free([3, 4, 4])),
    (DoubleFree, "have: 2$", lambda pool: pool.free([2, 5, 2, 2])),
    (DoubleFree, "have: 99$", lambda pool: pool.free([*MANY, 99])),
    (DoubleFree, "have: 9$", lambda pool: pool.free([*MANY, 9])),
    (RetainOfFreeBlock, "free blocks: 99$", lambda pool: pool.retain([0, 99])),
    (RetainOfFreeBlock, "free blocks: 99$", lambda pool: pool.retain([*MANY, 99])),
    (BlockOutOfRange, "pool: 128$", lambda pool: pool.free([0, 128])),
    (BlockOutOfRange, "pool: -30$", lambda pool: pool.free([5, -30])),
    (BlockOutOfRange, "pool: -128, 128$", lambda pool: pool.free([*MANY, -128, 128])),
    (BlockOutOfRange, "pool: -1$", lambda pool: pool.retain([-1, 0])),
    (BlockOutOfRange, "pool: 4294967295", lambda pool: pool.retain(np.array([2**32 - 1]))),
    (TypeError, "float64", lambda pool: pool.free(np.array([0.0]))),
    (TypeError, "2 dimensions", lambda pool: pool.free(np.zeros((1, 1), dtype=np.int32))),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSALS)
def test_a_refused_call_leaves_the_pool_as_it_was(
    error: type[Exception], message: str, call: Callable[[BlockPool], object]
) -> None:
    pool = BlockPool(128, 16)
    pool.retain(pool.allocate(100)[:3])
    pool.free([99])
    counts, order = pool.refcounts.tolist(), drain(pool)
    assert len(order) == 29
    with pytest.raises(error, match=message):
        call(pool)
    assert (pool.refcounts.tolist(), pool.num_free) == (counts, 29) and drain(pool) == order


def test_every_refusal_is_a_block_error() -> None:
    assert all(issubclass(e, BlockError) for e in (BlocksExhausted, DoubleFree, RetainOfFreeBlock, BlockOutOfRange))


@pytest.mark.parametrize("sizes", [(0, 16), (4, 0), (-1, 4), (2**28, 16)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"positive|int32"):
        BlockPool(*sizes)


@st.composite
def call_on_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    size = draw(st.sampled_from([3, 3, 120]))
    return draw(st.sampled_from(["free", "retain"])), draw(st.lists(st.integers(0, 63), max_size=size))


@given(st.lists(call_on_ids(), max_size=12))
def test_a_call_equals_the_same_calls_one_by_one(calls: list[tuple[str, list[int]]]) -> None:
    whole, single = BlockPool(64, 1), BlockPool(64, 1)
    for pool in (whole, single):
        pool.retain(pool.allocate(60)[:40])
    for name, ids in calls:
        if name == "free":
            fits = all(ids.count(i) <= whole.refcounts[i] for i in ids)
        else:
            fits = all(whole.refcounts[i] for i in ids)
        if not fits:
            with pytest.raises((DoubleFree, RetainOfFreeBlock)):
                getattr(whole, name)(np.array(ids, dtype=np.int32))
            continue
        total = getattr(whole, name)(np.array(ids, dtype=np.int32))
        parts = [getattr(single, name)([i]) for i in ids]
        assert name == "retain" or total == sum(parts)
        assert whole.refcounts.tolist() == single.refcounts.tolist()
        assert drain(whole) == drain(single)
