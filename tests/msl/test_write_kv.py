"""The Metal kernel that writes K and V in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.kernels import metal

from .test_decode import DTYPES, HEAD_DIMS, name
from .writes import make_step, right, write


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rows_and_copies_of_every_dtype_and_head_dim(dtype: mx.Dtype, dim: int) -> None:
    assert right(make_step(dtype, slots=[12, -1, 127, 90], copies=[(0, 7, 9), (2, 3, 16)], dim=dim, kv_heads=3))


@pytest.mark.parametrize("block", [8, 16, 32])
def test_every_block_size(block: int) -> None:
    slots = [3 * block + row for row in range(block)]
    assert right(make_step(mx.float16, slots=slots, copies=[(0, 1, block - 1)], block=block))


def test_rows_alone_and_copies_alone() -> None:
    assert right(make_step(mx.float16, slots=[4], copies=[]))
    assert right(make_step(mx.float16, slots=[-1, -1], copies=[(1, 6, 5)]))


def test_a_copy_and_a_row_may_share_a_block() -> None:
    # A fork's first token: block 4 takes 7 rows from its parent's block 2, and the new token's row after them, while
    # the parent's own token goes on in block 2.
    assert right(make_step(mx.float16, slots=[4 * 16 + 7, 2 * 16 + 7], copies=[(2, 4, 7)]))


def test_a_copy_of_no_rows_does_nothing() -> None:
    assert right(make_step(mx.float16, slots=[-1], copies=[(2, 4, 0)]))


def test_rows_wider_than_a_threadgroup() -> None:
    assert right(make_step(mx.float32, slots=[9, 30], copies=[(0, 5, 3)], kv_heads=12, dim=128))


def test_a_write_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        metal.write_kv_spec(mx.float16, 2, 64, 16, rows=0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Copies out of blocks 0-3 into blocks 4-7, and rows anywhere that no copy reads or writes."""
    targets = draw(st.lists(st.integers(4, 7), unique=True, max_size=3))
    copies = [(draw(st.integers(0, 3)), target, draw(st.integers(0, 16))) for target in targets]
    taken = {
        block * 16 + row for source, target, filled in copies for block in (source, target) for row in range(filled)
    }
    free = [slot for slot in range(128) if slot not in taken]
    slots = draw(st.lists(st.sampled_from(free), unique=True, min_size=8, max_size=12))
    return [-1 if draw(st.integers(0, 5)) == 0 else slot for slot in slots], copies


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(0, 1000))
def test_any_step(step: tuple[list[int], list[tuple[int, int, int]]], seed: int) -> None:
    slots, copies = step
    assert right(make_step(mx.bfloat16, slots=slots, copies=copies), seed=seed)


def test_the_pools_are_written_where_they_are() -> None:
    step = make_step(mx.float16, slots=[3], copies=[])
    keys, _, order = write(step)
    assert (keys.reshape(-1, 2, 64)[3] == step.inputs["k"][0]).all()
    assert np.count_nonzero(keys != step.inputs["k_pool"]) == 2 * 64
    assert order.shape == (8,)
