"""Launches as data: built without a GPU, and never two texts or types under one name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import pytest

from pagefork.kernels import cuda, metal
from pagefork.kernels.spec import Attention, Linear, Rotation

BASE = Attention(mx.bfloat16, heads=16, kv_heads=4, head_dim=128, block_size=16)
OTHERS = (
    replace(BASE, dtype=mx.float16),
    replace(BASE, dtype=mx.float32),
    replace(BASE, heads=32),
    replace(BASE, heads=8, kv_heads=2),
    replace(BASE, head_dim=64),
    replace(BASE, block_size=32),
    replace(BASE, window=True),
    replace(BASE, sinks=True),
    replace(BASE, softcap=True),
)
ROTATION = Rotation(mx.bfloat16, heads=8, kv_heads=2, head_dim=128, block_size=16, dims=128)
ROTATIONS = (
    replace(ROTATION, dtype=mx.float16),
    replace(ROTATION, heads=16),
    replace(ROTATION, heads=10, kv_heads=1),
    replace(ROTATION, head_dim=256),
    replace(ROTATION, dims=64),
    replace(ROTATION, traditional=True),
    replace(ROTATION, freqs=True),
    replace(ROTATION, dims=8, freqs=True),
)
SIZES = {"rows": 9, "max_blocks": 40, "max_length": 640, "cores": 132}


def compiled(spec) -> tuple:
    """All that a compiled kernel depends on but its name."""
    return spec.source, spec.header, spec.inputs, [(o.name, o.dtype) for o in spec.outputs], spec.template


@pytest.mark.parametrize("module", [cuda, metal], ids=["cuda", "metal"])
def test_a_name_stands_for_one_text_and_one_set_of_constants(module) -> None:
    specs = [spec for case in (BASE, *OTHERS) for spec in module.decode_specs(case, **SIZES)]
    for size, dtype, dim in itertools.product((8, 16), (mx.float16, mx.bfloat16), (64, 128)):
        specs.append(module.write_kv_spec(dtype, 4, dim, size, rows=9, copies=3))
    specs += [module.rope_and_write_spec(kind, rows=9) for kind in (ROTATION, *ROTATIONS)]
    for one, other in itertools.combinations(specs, 2):
        if one.name == other.name:
            assert compiled(one) == compiled(other)
        else:
            assert compiled(one) != compiled(other)
    assert len({spec.name for spec in specs}) > len(OTHERS) + 8 + len(ROTATIONS)


@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_each_constant_changes_some_name(variant: Attention) -> None:
    names = [{spec.name for spec in cuda.decode_specs(case, **SIZES)} for case in (BASE, variant)]
    assert names[0] != names[1]


@pytest.mark.parametrize("module", [cuda, metal], ids=["cuda", "metal"])
def test_each_constant_of_a_rotation_changes_its_name(module) -> None:
    names = {module.rope_and_write_spec(kind, rows=9).name for kind in (ROTATION, *ROTATIONS)}
    assert len(names) == 1 + len(ROTATIONS)


def test_the_number_of_rows_compiles_nothing_new() -> None:
    names = {
        tuple(spec.name for spec in cuda.decode_specs(BASE, **(SIZES | {"rows": rows, "max_length": length})))
        for rows in (1, 7, 300)
        for length in (1, 100_000)
    }
    assert len(names) == 1
    assert len({cuda.write_kv_spec(mx.float16, 2, 64, 16, rows=r, copies=c).name for r in (1, 9) for c in (0, 4)}) == 1
    assert len({cuda.rope_and_write_spec(ROTATION, rows=rows).name for rows in (1, 9)}) == 1


def test_a_change_of_the_text_changes_the_name(monkeypatch) -> None:
    before = cuda.decode_specs(BASE, **SIZES)
    text = cuda._text
    monkeypatch.setattr(cuda, "_text", lambda name: text(name) + "\n")
    after = cuda.decode_specs(BASE, **SIZES)
    assert not {spec.name for spec in before} & {spec.name for spec in after}


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_every_shape_fits_the_device(dtype: mx.Dtype, limit: int) -> None:
    for head_dim, block, group in itertools.product((64, 80, 96, 112, 128, 192, 256), (8, 16, 32), (1, 3, 8, 16, 71)):
        case = Attention(dtype, group * 2, 2, head_dim, block)
        attend, merge = cuda.decode_specs(case, **SIZES, shared_memory=limit)
        assert 0 < attend.shared_memory <= limit
        assert merge.outputs[0].shape == (9, group * 2, head_dim)
        values = dict(attend.template)
        assert values["STAGES"] >= 1
        assert values["GROUP"] * values["PARTS"] == group
        assert attend.grid[0] == attend.threadgroup[0] * (attend.grid[0] // attend.threadgroup[0])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_rotation_has_a_thread_for_every_two_vectors(dtype: mx.Dtype) -> None:
    for head_dim, part in itertools.product((64, 80, 96, 128, 256), (1, 2, 4, 8)):
        kind = Rotation(dtype, 8, 2, head_dim, 16, head_dim // part // 2 * 2)
        spec = cuda.rope_and_write_spec(kind, rows=3)
        vector = dict(spec.template)["VECTOR"]
        assert kind.dims // 2 % vector == 0 and vector * dtype.size <= 16
        assert head_dim // (2 * vector) * 12 * 3 <= spec.grid[0] < head_dim // (2 * vector) * 12 * 3 + 3 * 128
        assert spec.grid[0] % (3 * spec.threadgroup[0]) == 0


@pytest.mark.parametrize("dims", [0, 7, 130])
def test_a_rotation_of_what_a_head_has_not_is_refused(dims: int) -> None:
    with pytest.raises(ValueError, match="rotate in pairs"):
        replace(ROTATION, dims=dims)


@pytest.mark.parametrize(
    "wrong", [{"head_dim": 100}, {"head_dim": 272}, {"block_size": 12}, {"dtype": mx.int32}], ids=str
)
def test_what_the_kernels_do_not_take_is_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="the CUDA kernels take"):
        cuda.decode_specs(replace(BASE, **wrong), **SIZES)
    with pytest.raises(ValueError, match="the CUDA kernels take"):
        cuda.rope_and_write_spec(replace(ROTATION, dims=64, **wrong), rows=1)


def test_products_of_any_size_share_a_kernel() -> None:
    sizes = {"cores": 132, "inputs": 4096, "outputs": 6144, "rows": 1}
    kinds = [
        Linear(mx.bfloat16),
        Linear(mx.float16),
        *(Linear(mx.bfloat16, **options) for options in ({"norm": 4096}, {"glu": True}, {"add": True})),
    ]
    assert len({cuda.linear_spec(kind, **sizes).name for kind in kinds}) == len(kinds)
    others = [{"rows": 4}, {"inputs": 14336}, {"outputs": 16}, {"cores": 60}]
    assert len({cuda.linear_spec(kinds[0], **(sizes | other)).name for other in others}) == 1
    wide, few = (cuda.linear_spec(kinds[3], **(sizes | {"outputs": n})) for n in (28672, 512))
    assert wide.outputs[0].shape == (1, 14336) and wide.grid[0] == 132 * 288 and few.grid[0] == 32 * 288


@pytest.mark.parametrize(
    "wrong", [{"rows": 5}, {"rows": 0}, {"inputs": 4092}, {"outputs": 24}, {"inputs": 28672, "rows": 4}], ids=str
)
def test_a_product_that_does_not_suit_is_refused(wrong: dict) -> None:
    sizes = {"cores": 132, "inputs": 4096, "outputs": 6144, "rows": 1}
    with pytest.raises(ValueError, match=r"product takes|do not fit shared memory"):
        cuda.linear_spec(Linear(mx.bfloat16), **(sizes | wrong))
    with pytest.raises(ValueError, match="takes float16 and bfloat16"):
        cuda.linear_spec(Linear(mx.float32), **sizes)
    with pytest.raises(ValueError, match="norms 2048 inputs, not 4096"):
        cuda.linear_spec(Linear(mx.bfloat16, norm=2048), **sizes)
    with pytest.raises(ValueError, match="norms up to 8192 inputs"):
        cuda.linear_spec(Linear(mx.bfloat16, norm=8200), **(sizes | {"inputs": 8200}))
