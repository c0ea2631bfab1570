"""How the host spreads Metal launches over heads, lanes and splits."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention

from .test_decode import DTYPES, HEAD_DIMS

LLAMA = Attention(mx.bfloat16, 32, 8, 128, 16)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 48, 71, 128])
def test_every_tiling_fits(group: int) -> None:
    for dtype, dim, block in itertools.product(DTYPES, HEAD_DIMS, (8, 16, 32)):
        tiles = metal.tiling(Attention(dtype, group * 2, 2, dim, block))
        step = 32 // tiles.lanes * tiles.keys
        floats = 4 * -(-dim // 4 // tiles.lanes)
        assert 8 % step == 0, "a step must lie in one block"
        assert tiles.tile * floats <= metal.QUERY_REGISTERS
        heads = tiles.tile * (tiles.simdgroups * tiles.pieces if tiles.wide else 1)
        assert heads >= group, "every head needs a place"
        assert not tiles.wide or heads - group < tiles.tile * tiles.pieces, "no SIMD group may be idle"
        assert not tiles.wide or (block % tiles.stage == 0 and tiles.stage % step == 0)


def test_usual_models_load_every_byte_once() -> None:
    for group, dim in ((1, 128), (4, 128), (7, 128), (8, 128), (16, 128), (32, 128), (64, 128), (8, 256), (71, 64)):
        kind = Attention(mx.bfloat16, group, 1, dim, 16)
        assert metal.tiling(kind).pieces == 1, (group, dim)


def test_a_lone_long_row_fills_the_cores() -> None:
    count = metal.splits(LLAMA, rows=1, max_length=32_768, cores=40)
    assert count * LLAMA.kv_heads >= 40 * metal.GROUPS_PER_CORE


def test_many_short_rows_are_not_split() -> None:
    assert metal.splits(LLAMA, rows=128, max_length=1024, cores=40) == 1
    assert len(metal.decode_specs(LLAMA, rows=128, max_blocks=64, max_length=1024, cores=40)) == 1


def test_long_rows_are_split_even_among_many() -> None:
    count = metal.splits(LLAMA, rows=32, max_length=32_768, cores=40)
    assert 32_768 / count <= metal.MOST_KEYS


def test_no_split_is_tiny_and_none_without_end() -> None:
    for rows, length, cores in itertools.product((1, 3, 32), (0, 1, 127, 128, 5000, 10**6), (1, 10, 80)):
        count = metal.splits(LLAMA, rows=rows, max_length=length, cores=cores)
        assert 1 <= count <= metal.MAX_SPLITS
        assert count == 1 or length / count >= metal.LEAST_KEYS


def test_the_number_of_splits_is_no_variant() -> None:
    few = metal.decode_specs(LLAMA, rows=1, max_blocks=99, max_length=600, cores=8)
    many = metal.decode_specs(LLAMA, rows=1, max_blocks=99, max_length=60_000, cores=8)
    assert [spec.name for spec in few] == [spec.name for spec in many]


@pytest.mark.parametrize(
    ("architecture", "cores"), [("applegpu_g13g", 14), ("applegpu_g15s", 36), ("applegpu_g14d", 72), ("", 14)]
)
def test_cores_by_architecture(architecture: str, cores: int) -> None:
    assert metal.estimate_cores(architecture) == cores
