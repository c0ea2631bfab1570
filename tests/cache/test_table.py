"""BlockTable: positions, blocks and slots of one sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pagefork.cache.table import BlockTable, TableError


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
