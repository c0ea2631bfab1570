"""The Metal decode kernels against attention in float64, on a CPU."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention

from .cases import TOLERANCE, Case, Options, attend, error, expected, least_bytes, make_case, variant

BASE = Attention(mx.float16, heads=8, kv_heads=2, head_dim=64, block_size=16)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
RAGGED = [1, 37, 0, 300]
WHOLE, SPLIT = 1, 8


def name(value: object) -> str:
    return str(value).removeprefix("mlx.core.")


def check(case: Case, cores: int) -> None:
    assert error(attend(case, cores=cores).out, expected(case)) <= TOLERANCE[case.attention.dtype]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "shape"),
    [
        (dtype, dim, shape)
        for (dtype, dim), shape in zip(
            itertools.product(DTYPES, HEAD_DIMS),
            # (GQA ratio, KV heads, block size); 5 and 21 have no common factor with 3 or 7
            itertools.cycle([(4, 2, 16), (1, 3, 8), (8, 1, 32), (3, 2, 16), (2, 2, 8)]),
            strict=False,
        )
    ],
    ids=name,
)
def test_every_dtype_and_head_dim(dtype: mx.Dtype, head_dim: int, shape: tuple[int, int, int]) -> None:
    group, kv_heads, block = shape
    case = make_case(Attention(dtype, group * kv_heads, kv_heads, head_dim, block), RAGGED)
    check(case, SPLIT)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("block", [8, 16, 32])
def test_every_block_size(dtype: mx.Dtype, block: int) -> None:
    lengths = [block - 1, block, block + 1, 5 * block, 0, 1, 3 * block + 2, 2]
    case = make_case(variant(BASE, dtype=dtype, block_size=block), lengths)
    check(case, WHOLE)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 9, 12, 16, 71])
def test_any_gqa_ratio(group: int) -> None:
    case = make_case(variant(BASE, heads=group * 2, head_dim=128), [1, 190, 45])
    check(case, SPLIT if group % 2 else WHOLE)


@pytest.mark.parametrize("cores", [WHOLE, SPLIT])
@pytest.mark.parametrize(("window", "sinks", "softcap"), list(itertools.product([0, 40], [False, True], [0.0, 3.0])))
def test_every_feature_with_every_other(window: int, sinks: bool, softcap: float, cores: int) -> None:
    kind = variant(BASE, dtype=mx.float32, window=window > 0, sinks=sinks, softcap=softcap > 0)
    check(make_case(kind, [1, 40, 41, 0, 290], Options(window, softcap)), cores)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_all_features_where_heads_are_many(dtype: mx.Dtype, head_dim: int) -> None:
    kind = Attention(dtype, 16, 1, head_dim, 16, window=True, sinks=True, softcap=True)
    case = make_case(kind, [1, 100, 0, 333], Options(130, 20.0))
    assert metal.tiling(kind).wide
    check(case, SPLIT)


@pytest.mark.parametrize("window", [1, 7, 16, 129, 1000])
def test_windows_of_any_size(window: int) -> None:
    case = make_case(variant(BASE, window=True), [3, 16, 150, 400], Options(window))
    check(case, SPLIT)


def test_rows_of_length_zero_give_zeros() -> None:
    for cores in (WHOLE, SPLIT):
        case = make_case(variant(BASE, sinks=True), [0, 300, 0])
        out = attend(case, cores=cores).out
        assert (out[[0, 2]] == 0).all()
        assert (out[1] != 0).any()


def test_nothing_but_empty_rows() -> None:
    assert (attend(make_case(BASE, [0])).out == 0).all()


@pytest.mark.parametrize("heads", [4, 8])
def test_a_single_row_whose_small_arrays_are_constants(heads: int) -> None:
    case = make_case(variant(BASE, heads=heads, sinks=True), [33])
    check(case, WHOLE)


def test_many_rows_whose_small_arrays_are_in_device_memory() -> None:
    check(make_case(variant(BASE, sinks=True), list(range(0, 60, 5))), WHOLE)


@pytest.mark.parametrize("lengths", [[700, 3, 129, 128, 127, 0], [1025], [256, 256]])
def test_splits_of_any_raggedness(lengths: list[int]) -> None:
    case = make_case(BASE, lengths)
    for cores in (2, 5, 64):
        check(case, cores)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=4, max_size=4),
    window=st.integers(1, 420),
    cores=st.sampled_from([1, 2, 4, 16]),
    seed=st.integers(0, 2**32),
)
def test_any_lengths_window_and_splits(lengths: list[int], window: int, cores: int, seed: int) -> None:
    case = make_case(variant(BASE, heads=6, window=True), lengths, Options(window), seed=seed)
    found = attend(case, cores=cores, seed=seed)
    assert error(found.out, expected(case)) <= TOLERANCE[case.attention.dtype]
    assert found.loaded == least_bytes(case)


def test_scores_of_any_size() -> None:
    case = make_case(variant(BASE, dtype=mx.float32), [90, 200])
    for factor in (1e-4, 50.0, 1e4):
        scaled = Case(
            case.attention, {**case.inputs, "q": case.inputs["q"] * np.float32(factor)}, case.readable, case.options
        )
        check(scaled, SPLIT)


@pytest.mark.parametrize("kind", [BASE, variant(BASE, heads=32, head_dim=128)], ids=["narrow", "wide"])
def test_the_order_of_threads_changes_nothing(kind: Attention) -> None:
    case = make_case(kind, [200, 31])
    first = attend(case, cores=SPLIT, seed=1).raw
    for seed in range(2, 6):
        assert (attend(case, cores=SPLIT, seed=seed).raw == first).all()


@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_byte_of_k_and_v_is_loaded_once(group: int, window: int, head_dim: int) -> None:
    kind = Attention(mx.bfloat16, 2 * group, 2, head_dim, 16, window=window > 0)
    case = make_case(kind, [1, 37, 0, 523], Options(window))
    loaded = attend(case, cores=SPLIT).loaded
    assert least_bytes(case) <= loaded <= 1.02 * least_bytes(case)
