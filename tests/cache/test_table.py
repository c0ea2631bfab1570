"""BlockTable: positions, blocks and slots of one sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagefork.cache.table import HOLE, BlockTable, TableError


def table_of(ids: list[int], length: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(block_size)
    table.grow(np.array(ids, dtype=np.int32))
    table.advance(length)
    return table


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_started_block_counts_whole(length: int, blocks: int) -> None:
    table = table_of([7], 0)
    assert table.blocks_for(length) == blocks
    assert table.missing(length) == max(0, blocks - 1)


def test_growing_adds_blocks_and_advancing_fills_them() -> None:
    table = BlockTable(4)
    for block in range(40):
        table.grow([block])
    assert table.ids.tolist() == list(range(40)) and table.ids.dtype == np.int32
    assert (table.length, table.capacity, len(table)) == (0, 160, 40)
    table.advance(160)
    assert table.length == 160


def test_ids_cannot_be_written_through() -> None:
    with pytest.raises(ValueError, match="read-only"):
        table_of([1], 2).ids[0] = 3


@pytest.mark.parametrize("length", [0, 3, 4, 5, 9])
def test_a_fork_names_the_blocks_of_its_length_and_goes_its_own_way(length: int) -> None:
    parent = table_of([9, 8, 7, 6], 9)
    child = parent.fork(length)
    assert child.ids.tolist() == [9, 8, 7, 6][: -(-length // 4)] and child.length == length
    child.grow([1])
    if length:
        child.replace(0, 2)
    parent.replace(0, 5)
    assert parent.ids.tolist() == [5, 8, 7, 6] and 5 not in child.ids.tolist()


def test_a_fork_leaves_blocks_granted_ahead_to_its_parent() -> None:
    assert table_of([9, 8, 7, 6], 5).fork().ids.tolist() == [9, 8]


@pytest.mark.parametrize(
    ("length", "dropped"), [(9, [6]), (8, [7, 6]), (5, [7, 6]), (4, [8, 7, 6]), (1, [8, 7, 6]), (0, [9, 8, 7, 6])]
)
def test_truncating_drops_the_blocks_past_the_length(length: int, dropped: list[int]) -> None:
    table = table_of([9, 8, 7, 6], 9)
    gone = table.truncate(length)
    assert gone.tolist() == dropped and table.ids.tolist() == [9, 8, 7, 6][: 4 - len(dropped)]
    assert table.length == length
    table.grow([1])
    assert gone.tolist() == dropped


@pytest.mark.parametrize(
    ("start", "stop", "indices"),
    [(0, 0, []), (0, 1, [0]), (3, 5, [0]), (4, 8, []), (4, 9, [2]), (8, 9, [2]), (0, 16, [0, 2]), (12, 16, [])],
)
def test_shared_are_the_entries_to_replace_before_a_write(start: int, stop: int, indices: list[int]) -> None:
    refcounts = np.array([9, 1, 1, 3, 2], dtype=np.int32)
    assert table_of([4, 1, 3, 2], 9).shared(start, stop, refcounts).tolist() == indices


@pytest.mark.parametrize(("index", "start", "rows"), [(0, 6, 4), (1, 6, 2), (2, 6, 0), (1, 4, 0), (1, 8, 4)])
def test_filled_are_the_rows_before_the_write(index: int, start: int, rows: int) -> None:
    assert table_of([5, 6, 7], 9).filled(index, start) == rows


def test_replacing_returns_the_block_that_left() -> None:
    table = table_of([5, 6], 8)
    assert table.replace(1, 0) == 6 and table.ids.tolist() == [5, 0]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 3), (3, 4), (0, 9), (3, 12)])
def test_slots_are_block_times_size_plus_offset(start: int, stop: int) -> None:
    table = table_of([5, 0, 7], 9)
    slots = table.slots(start, stop)
    assert slots.tolist() == [[5, 0, 7][p // 4] * 4 + p % 4 for p in range(start, stop)]
    assert slots.dtype == np.int32


def test_the_last_slot_of_the_largest_pool_fits() -> None:
    table = BlockTable(16)
    table.grow([2**27 - 1, 0])
    assert table.slots(15, 16).tolist() == [2**31 - 1] and table.slots(14, 17).tolist() == [2**31 - 2, 2**31 - 1, 0]


NO_REFERENCES = np.zeros(8, dtype=np.int32)
REFUSALS: list[Callable[[BlockTable], object]] = [
    lambda table: table.advance(4),
    lambda table: table.advance(-1),
    lambda table: table.fork(6),
    lambda table: table.fork(-1),
    lambda table: table.truncate(6),
    lambda table: table.truncate(-1),
    lambda table: table.shared(0, 9, NO_REFERENCES),
    lambda table: table.shared(3, 2, NO_REFERENCES),
    lambda table: table.slots(-1, 2),
    lambda table: table.slots(7, 9),
    lambda table: table.replace(2, 0),
    lambda table: table.replace(-1, 0),
    lambda table: table.filled(2, 0),
]


@pytest.mark.parametrize("call", REFUSALS)
def test_what_the_table_does_not_cover_is_refused(call: Callable[[BlockTable], object]) -> None:
    table = table_of([5, 6], 5)
    with pytest.raises(TableError):
        call(table)
    assert table.length == 5 and table.ids.tolist() == [5, 6]


def test_a_block_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        BlockTable(0)


def trimmed_table() -> BlockTable:
    """Fifteen positions in blocks of four, of which the first two went back."""
    table = table_of([9, 8, 7, 6], 15)
    assert table.trim(9).tolist() == [9, 8]
    return table


def test_trimming_makes_holes_of_what_lies_wholly_before_a_position() -> None:
    table = table_of([9, 8, 7, 6], 15)
    assert table.trim(3).tolist() == [] and table.trim(7).tolist() == [9] and table.trim(7).tolist() == []
    assert table.trim(12).tolist() == [8, 7] and table.trim(4).tolist() == []
    assert table.ids.tolist() == [HOLE, HOLE, HOLE, 6] and table.live.tolist() == [6]
    assert (table.trimmed, table.length, table.capacity, len(table)) == (3, 15, 16, 4)
    assert table.slots(12, 14).tolist() == [24, 25]
    with pytest.raises(TableError, match="nothing would be left"):
        table.trim(16)


def test_what_was_given_back_cannot_be_named_again() -> None:
    table = trimmed_table()
    refcounts = np.ones(10, dtype=np.int32)
    for misuse in (
        lambda: table.slots(7, 9),
        lambda: table.shared(7, 9, refcounts),
        lambda: table.replace(1, 5),
        lambda: table.filled(1, 5),
    ):
        with pytest.raises(TableError):
            misuse()
    assert table.shared(8, 9, refcounts).tolist() == [] and table.ids.tolist() == [HOLE, HOLE, 7, 6]


@pytest.mark.parametrize("length", [15, 12, 9])
def test_a_fork_and_a_truncation_keep_the_holes_before_what_is_left(length: int) -> None:
    table = trimmed_table()
    child = table.fork(length)
    left = [7, 6][: -(-length // 4) - 2]
    assert (child.ids.tolist(), child.trimmed, child.length) == ([HOLE, HOLE, *left], 2, length)
    assert table.truncate(length).tolist() == [7, 6][len(left) :]
    assert (table.ids.tolist(), table.live.tolist(), table.length) == (child.ids.tolist(), left, length)
    table.grow([1])
    assert table.live.tolist() == [*left, 1]


@pytest.mark.parametrize("length", [8, 5, 0])
def test_where_nothing_but_holes_would_be_left_there_is_nothing(length: int) -> None:
    table = trimmed_table()
    child = table.fork(length)
    assert (len(child), child.length, child.trimmed) == (0, 0, 0)
    assert table.truncate(length).tolist() == [7, 6]
    assert (len(table), table.length, table.trimmed) == (0, 0, 0)
    table.grow([4])
    table.advance(2)
    assert table.slots(0, 2).tolist() == [16, 17]


def test_a_table_may_begin_with_holes() -> None:
    table = BlockTable(4)
    table.skip(2)
    table.grow([7])
    table.advance(11)
    assert table.ids.tolist() == [HOLE, HOLE, 7] and table.live.tolist() == [7] and table.trimmed == 2
    with pytest.raises(TableError):
        table.skip(1)
