"""What a compiler with Metal's address spaces says of the Metal text, where one is installed (any clang from 14 on)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mlx.core as mx
import pytest

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention, KernelSpec, Rotation

from .opencl import compiler, complaints, intermediate_code, opencl_text
from .translate import Parameter

pytestmark = pytest.mark.skipif(compiler() is None, reason="no clang with OpenCL C++: this check is an extra one")


def specs() -> Iterator[KernelSpec]:
    """Every text, narrow and wide, with and without splits, features and idle lanes."""
    shapes = [(mx.float16, 4, 128), (mx.float32, 8, 80), (mx.float16, 16, 128), (mx.bfloat16, 1, 64)]
    for (dtype, group, dim), length in itertools.product(shapes, (100, 3000)):
        case = Attention(dtype, 2 * group, 2, dim, 16, window=True, sinks=True, softcap=True)
        yield from metal.decode_specs(case, rows=3, max_blocks=20, max_length=length, cores=10)
    yield metal.write_kv_spec(mx.float16, 2, 64, 16, rows=3, copies=1)
    for dtype, traditional, freqs in ((mx.float16, False, False), (mx.float32, True, True)):
        yield metal.rope_and_write_spec(Rotation(dtype, 4, 2, 64, 16, 32, traditional, freqs), rows=3)


def text_of(spec: KernelSpec) -> str:
    dtype = dict(spec.template)["T"]
    assert isinstance(dtype, mx.Dtype)
    small = {"tables": (3, 20), "lengths": (3,), "slots": (3,), "positions": (3,), "copies": (1, 3)}
    inputs = {name: Parameter(name, dtype, (9, 16, 2, 64)) for name in spec.inputs}
    inputs |= {name: Parameter(name, mx.int32, shape) for name, shape in small.items()}
    floats = {"params": (4,), "freqs": (16,), "partial": (3, 8, 2, 68)}
    inputs |= {name: Parameter(name, mx.float32, shape) for name, shape in floats.items()}
    return opencl_text(spec, inputs)


@pytest.mark.parametrize("spec", list(specs()), ids=lambda spec: spec.name[9:60])
def test_address_spaces_are_right(spec: KernelSpec) -> None:
    assert complaints(text_of(spec)) == ""


@pytest.mark.parametrize("spec", list(specs()), ids=lambda spec: spec.name[9:60])
def test_a_thread_s_arrays_live_in_registers(spec: KernelSpec) -> None:
    code = intermediate_code(text_of(spec))
    assert "define" in code
    assert "alloca [" not in code


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("of_head(thread const float* held", "of_head(device const float* held"),
        ("const auto keys = (const device vec<T, 4>*)k_pool", "const threadgroup vec<T, 4>* keys = k_pool"),
        ("threadgroup float4 values_of", "constant float4 values_of"),
    ],
)
def test_a_wrong_address_space_is_seen(old: str, new: str) -> None:
    text = text_of(next(specs()))
    for word in ("device", "thread", "threadgroup", "constant"):
        assert f"#define {word} " in text
    assert text.count(old) == 1
    assert "error" in complaints(text.replace(old, new))


def test_an_array_out_of_registers_is_seen() -> None:
    text = text_of(next(specs()))
    old = "(upper ? far : near) + simd_shuffle_xor(upper ? near : far, DISTANCE)"
    assert text.count(old) == 1
    rolled = text.replace(old, "values[(lane + i) % N] + simd_shuffle_xor(near, DISTANCE)")
    assert "alloca [" in intermediate_code(rolled)
