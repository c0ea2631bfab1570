"""The Metal kernel that rotates Q and K and writes K and V in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.kernels import metal
from pagefork.kernels.spec import Rotation

from .harness import run
from .rotations import make_turn, tolerance, turn_error
from .test_decode import DTYPES, HEAD_DIMS, name


def check(rotation: Rotation, slots: list[int], positions: list[int], **options: float) -> None:
    assert turn_error(make_turn(rotation, slots=slots, positions=positions, **options)) <= tolerance(rotation.dtype)


@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_dtype_and_head_dim(dtype: mx.Dtype, dim: int, traditional: bool) -> None:
    check(Rotation(dtype, 6, 2, dim, 16, dim, traditional), [12, -1, 63, 30], [1, 700, 0, 1500])


@pytest.mark.parametrize("freqs", [False, True], ids=["base", "freqs"])
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dims", [8, 16, 32, 72])
def test_a_part_of_a_head(dims: int, traditional: bool, freqs: bool) -> None:
    check(Rotation(mx.float32, 3, 1, 80, 8, dims, traditional, freqs), [5, 31], [900, 3], scale=0.25)


@pytest.mark.parametrize("rows", [1, 7, 8, 20])
def test_any_number_of_rows(rows: int) -> None:
    check(Rotation(mx.float16, 4, 4, 64, 16, 64), list(range(3, 3 + rows)), [40 * row for row in range(rows)])


def test_an_angle_of_many_turns_keeps_its_place() -> None:
    # A period of one, so that the angle is exact.
    turn = make_turn(Rotation(mx.float32, 2, 1, 64, 16, 8, freqs=True), slots=[0, 1], positions=[131_071, 1_000_003])
    turn.inputs["freqs"][:] = 1
    angles = turn.inputs["positions"].astype(np.float64)
    q = run(metal.rope_and_write_spec(turn.rotation, rows=2), turn.inputs).outputs["q"][:, 0]
    given = turn.inputs["qkv"].reshape(2, 4, 64)[:, 0].astype(np.float64)
    wanted = (given[:, :4] + 1j * given[:, 4:8]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(q[:, :4], wanted.real, atol=2e-6)
    np.testing.assert_allclose(q[:, 4:8], wanted.imag, atol=2e-6)


@settings(max_examples=30, deadline=None)
@given(
    slots=st.lists(st.integers(0, 63), unique=True, min_size=8, max_size=12),
    ignored=st.sets(st.integers(0, 11)),
    positions=st.lists(st.integers(0, 2000), min_size=12, max_size=12),
    seed=st.integers(0, 1000),
)
def test_any_step(slots: list[int], ignored: set[int], positions: list[int], seed: int) -> None:
    slots = [-1 if row in ignored else slot for row, slot in enumerate(slots)]
    turn = make_turn(Rotation(mx.bfloat16, 4, 2, 64, 16, 64), slots=slots, positions=positions[: len(slots)])
    assert turn_error(turn, seed=seed) <= tolerance(mx.bfloat16)


@pytest.mark.parametrize(("dim", "dims"), [(64, 20), (60, 16)])
def test_what_the_kernel_does_not_take_is_refused(dim: int, dims: int) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        metal.rope_and_write_spec(Rotation(mx.float16, 4, 2, dim, 16, dims), rows=1)
