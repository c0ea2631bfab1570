"""The Metal text keeps to Metal, in every variant; and the lint sees what it should."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention, KernelSpec, Rotation

from .lint import lint, lint_text, threadgroup_bytes
from .test_decode import DTYPES, HEAD_DIMS


def launches() -> Iterator[KernelSpec]:
    """Every dtype, head dim and block size with GQA ratios from 1 to 128, with and without splits."""
    for dtype, dim, block in itertools.product(DTYPES, HEAD_DIMS, (8, 16, 32)):
        yield metal.write_kv_spec(dtype, 8, dim, block, rows=5, copies=2)
        for traditional, freqs in itertools.product((False, True), repeat=2):
            rotation = Rotation(dtype, 16, 8, dim, block, dim // 16 * 8, traditional, freqs)
            yield metal.rope_and_write_spec(rotation, rows=9)
        for group in (1, 2, 3, 4, 5, 7, 8, 12, 16, 24, 48, 71, 128):
            case = Attention(dtype, 2 * group, 2, dim, block, sinks=group % 2 == 0)
            for length in (100, 100_000):
                yield from metal.decode_specs(case, rows=3, max_blocks=9, max_length=length, cores=16)


def test_sizes_of_every_variant() -> None:
    seen = {}
    for spec in launches():
        key = (spec.source, spec.template, spec.threadgroup)
        if key not in seen:
            seen[key] = threadgroup_bytes(spec)
            assert seen[key] <= 32 * 1024, spec.name
            x, y, z = spec.threadgroup
            assert x * y * z <= 1024 and x % 32 == 0 and spec.grid[0] % x == 0, spec.name
    assert max(seen.values()) > 16 * 1024  # the figures are real: some variants do take much


def test_the_text_of_every_kernel() -> None:
    texts = {(spec.header, spec.source): spec for spec in launches()}
    assert len(texts) >= 10
    for spec in texts.values():
        assert lint(spec) == [], spec.name


def test_a_name_stands_for_one_text_and_one_template() -> None:
    seen: dict[str, tuple[object, ...]] = {}
    for spec in launches():
        content = (spec.source, spec.header, spec.inputs, spec.template, tuple((o.name, o.dtype) for o in spec.outputs))
        assert seen.setdefault(spec.name, content) == content


def test_a_name_tells_which_inputs_are_constants() -> None:
    case = Attention(mx.float16, 8, 2, 64, 16, sinks=True)
    few = metal.decode_specs(case, rows=7, max_blocks=1, max_length=16, cores=1)[0]
    many = metal.decode_specs(case, rows=8, max_blocks=1, max_length=16, cores=1)[0]
    assert few.name != many.name
    assert few.template == many.template


WRONG = {
    "float x = double(1);": "double",
    "float x = 1.0 * y;": "without f",
    "float x = 1e3f + 2.;": "without f",
    "int n = std::max(a, b);": "std",
    "goto end;": "goto",
    "float* p = x;": "address space",
    "inline int f(const float* p) { return 0; }": "address space",
    "inline int f(float& p) { return 0; }": "address space",
    "inline int f(int n) { return n ? f(n - 1) : 0; }": "calls itself",
    "int (*f)(int);": "function pointers",
    "auto f = [&](int n) { return n; };": "lambdas",
    "if constexpr (WIDE) {}": "C++17",
    "const auto p = (const device float4*)x;": "align",
    "const auto p = (const device vec<T, 4>*)x;": "align",
    "threadgroup float s[N * (D + 1)];": "bank",
    "atomic_fetch_add_explicit(p, 1, m);": "atomics",
    "#include <metal_math>": "headers",
    "auto y = reinterpret_cast<uint>(x);": "casts",
}


@pytest.mark.parametrize(("text", "word"), WRONG.items())
def test_complains_about(text: str, word: str) -> None:
    assert any(word in complaint for complaint in lint_text(text))


def test_does_not_complain_about_good_text() -> None:
    good = """
    // Vectors of four: aligned, since rows have a multiple of 8 elements.
    const device float4* p = (const device float4*)x;
    // One float more a row, so that a column's elements lie in different banks.
    threadgroup float s[N * (D + 1)];
    const bool b = i < 3 && (flags & 4) != 0;
    float y = a * 1.0f + c * 2e-3f;
    """
    assert lint_text(good) == []


def test_complains_about_sizes() -> None:
    spec = next(
        iter(metal.decode_specs(Attention(mx.float32, 8, 2, 128, 16), rows=1, max_blocks=9, max_length=9, cores=1))
    )
    assert lint(replace(spec, threadgroup=(2048, 1, 1)))
    assert lint(replace(spec, threadgroup=(48, 1, 1)))
    assert lint(replace(spec, source=spec.source + "\nthreadgroup float more[9000];"))
    assert lint(replace(spec, header=spec.header + "\nthreadgroup float more[1];"))
