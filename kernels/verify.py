"""The self-test at load: every variant against the reference path on the device that it will run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import structlog

from pagefork.kernels import dispatch, reference
from pagefork.kernels.device import device
from pagefork.kernels.spec import Attention, Case, Linear, Pools, Rope, Rotation, Variant, pools_of

_WINDOW, _SOFTCAP = 100, 15.0
_ROW_COUNTS = (1, 9)  # Metal compiles inputs of fewer than 8 elements otherwise
_SHORT, _LONG = 70, 1500  # one split, several splits

log = structlog.get_logger(__name__)


class KernelMismatch(RuntimeError):
    """A fused kernel does not compute what the reference path computes on this device."""


@dataclass(frozen=True)
class Result:
    """One variant's self-test. `error` is relative to the largest value; infinite where something is not finite."""

    variant: Variant
    backend: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.tolerance


def prepare(
    cases: Sequence[Case],
    *,
    strict: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[str]:
    """Compile and self-test everything that these cases need; returns each case's back end.

    `progress(done, total, label)` is called before each variant and once at the end. A variant that fails takes the
    reference path from now on, with a warning.

    :raises KernelMismatch: with `strict`, where a variant fails.
    """
    chosen = []
    for result in _check(cases, progress):
        if not result.passed:
            _refuse(result, strict)
        if not isinstance(result.variant, Pools):
            chosen.append(result.backend if result.passed else "reference")
    return chosen


def selftest(cases: Sequence[Case] | None = None) -> list[Result]:
    """Test these cases, by default one or more of every feature, dtype and head dim; nothing is switched off by it."""
    return list(_check(default_cases() if cases is None else cases, None))


def default_cases() -> list[Case]:
    """Few enough to compile in a minute or two, yet every feature, dtype, head dim and block size occurs."""
    return [
        Attention(mx.bfloat16, 32, 8, 128, 16),
        Attention(mx.float16, 32, 8, 128, 16),
        Attention(mx.float32, 9, 3, 64, 16),
        Attention(mx.bfloat16, 16, 16, 64, 8, window=True),
        Attention(mx.float16, 16, 2, 80, 32, softcap=True),
        Attention(mx.bfloat16, 14, 2, 96, 16, sinks=True),
        Attention(mx.float16, 10, 2, 112, 8, window=True, sinks=True),
        Attention(mx.bfloat16, 24, 8, 192, 16),
        Attention(mx.bfloat16, 16, 1, 256, 32, window=True, softcap=True),
        Attention(mx.float32, 8, 1, 128, 8, window=True, sinks=True, softcap=True),
        Rotation(mx.bfloat16, 32, 8, 128, 16, dims=128),
        Rotation(mx.float32, 9, 3, 64, 16, dims=64, traditional=True),
        Rotation(mx.float16, 16, 2, 80, 32, dims=32, freqs=True),
        Rotation(mx.bfloat16, 14, 2, 96, 16, dims=24, traditional=True),
        Linear(mx.bfloat16, norm=4096, glu=True),
        Linear(mx.bfloat16, norm=8192, bias=True),
        Linear(mx.float16, norm=1096),
        Linear(mx.float16, add=True),
    ]


def _check(cases: Sequence[Case], progress: Callable[[int, int, str], None] | None) -> Iterator[Result]:
    variants: list[Variant] = [*pools_of(cases), *cases]
    found = device()
    for done, variant in enumerate(variants):
        if progress is not None:
            progress(done, len(variants), describe(variant))
        tolerance = 1e-2 if variant.dtype == mx.bfloat16 else 2e-3
        error, failure = math.inf, ""
        try:
            error = _error(variant)
        except Exception as problem:  # a kernel that does not compile is a variant that does not work
            failure = f"{type(problem).__name__}: {problem}"
        yield Result(variant, found.backend, error, tolerance, failure)
    if progress is not None:
        progress(len(variants), len(variants), "")


def _refuse(result: Result, strict: bool) -> None:
    name, text = device().name, result.failure or f"relative error {result.error:.2e}"
    if strict:
        raise KernelMismatch(
            f"{describe(result.variant)} fails its self-test on {name} ({text}); "
            "open without strict=True to use the reference path, and please report this"
        )
    dispatch.fall_back(result.variant)
    log.warning(
        "a kernel fails its self-test: taking the slow reference path for it",
        variant=describe(result.variant),
        device=name,
        backend=result.backend,
        problem=text,
    )


def describe(variant: Variant) -> str:
    """A variant in words, for logs and tables."""
    dtype = str(variant.dtype).rpartition(".")[2]
    if isinstance(variant, Linear):
        norm = [f"norm={variant.norm}"] if variant.norm else []
        return " ".join(["product", dtype, *norm, *(name for name in ("bias", "glu", "add") if getattr(variant, name))])
    size = f"head_dim={variant.head_dim} block={variant.block_size}"
    if isinstance(variant, Pools):
        return f"write {dtype} kv_heads={variant.kv_heads} {size}"
    kind = f"rotate {variant.dims} and write" if isinstance(variant, Rotation) else "decode"
    optional = ("window", "sinks", "softcap", "traditional", "freqs")
    features = "".join(f" {name}" for name in optional if getattr(variant, name, False))
    return f"{kind} {dtype} heads={variant.heads}/{variant.kv_heads} {size}{features}"


def _error(variant: Variant) -> float:
    if isinstance(variant, Attention):
        return _attention_error(variant)
    if isinstance(variant, Rotation):
        return max(_one_rotation_error(variant, rows) for rows in _ROW_COUNTS)
    if isinstance(variant, Linear):
        return max(_one_product_error(variant, rows) for rows in (1, 4))
    return max(_one_write_error(variant, rows, copies) for rows in _ROW_COUNTS for copies in (0, 1, 3))


def _attention_error(case: Attention) -> float:
    rng = np.random.default_rng(0)
    return max(_one_attention_error(case, rng, rows, longest) for rows in _ROW_COUNTS for longest in (_SHORT, _LONG))


def _one_attention_error(case: Attention, rng: np.random.Generator, rows: int, longest: int) -> float:
    """Ragged rows over shuffled blocks: what no row sees is NaN, table entries past a length are out of range."""
    lengths = rng.integers(0, longest + 1, rows)
    lengths[-1] = longest
    needed = -(-lengths // case.block_size)
    tables = np.full((rows, needed.max()), 2**30, np.int32)
    blocks = rng.permutation(needed.sum() + 1)
    seen = np.zeros((len(blocks), case.block_size, 1, 1), bool)
    for row, count in enumerate(needed):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
        positions = np.arange(max(0, lengths[row] - _WINDOW) if case.window else 0, lengths[row])
        seen[tables[row, positions // case.block_size], positions % case.block_size] = True
    shape = (len(seen), case.block_size, case.kv_heads, case.head_dim)
    k, v = (
        mx.array(np.where(seen, rng.standard_normal(shape), np.nan).astype(np.float32)).astype(case.dtype)
        for _ in range(2)
    )
    q = mx.array(rng.standard_normal((rows, case.heads, case.head_dim)).astype(np.float32) * 2).astype(case.dtype)
    sinks = mx.array(rng.standard_normal(case.heads).astype(np.float32)).astype(case.dtype)
    scale, window = case.head_dim**-0.5, _WINDOW if case.window else None
    softcap, sink = _SOFTCAP if case.softcap else None, sinks if case.sinks else None
    table, length = mx.array(tables), mx.array(lengths.astype(np.int32))
    found = dispatch.paged_attention(
        q, k, v, table, length, scale=scale, window=window, sinks=sink, softcap=softcap, max_length=longest
    )
    wide_q, wide_k, wide_v = (array.astype(mx.float32) for array in (q, k, v))
    wide_sink = None if sink is None else sink.astype(mx.float32)
    expected = reference.paged_attention(
        wide_q, wide_k, wide_v, table, length, scale=scale, window=window, sinks=wide_sink, softcap=softcap
    )
    return _difference(found, expected)


def _difference(found: mx.array, expected: mx.array) -> float:
    if not bool(mx.isfinite(found).all().item()):
        return math.inf
    difference = mx.abs(found.astype(mx.float32) - expected).max() / mx.abs(expected).max()
    return float(np.array(difference))


def _one_write_error(pools: Pools, rows: int, copies: int) -> float:
    """Blocks 0-2 are copied to 3-5, whose rest is written, with rows elsewhere; then the pools are read back."""
    rng = np.random.default_rng(rows + copies)
    size, filled = pools.block_size, pools.block_size // 2
    shape = (10 + rows, size, pools.kv_heads, pools.head_dim)
    before = [rng.integers(-8, 8, shape).astype(np.float32) for _ in range(2)]
    new = [rng.integers(-8, 8, (rows, *shape[2:])).astype(np.float32) for _ in range(2)]
    slots = np.array([3 * size + filled, -1, *((10 + row) * size + row % size for row in range(rows))][:rows])
    copy = np.array([(i, 3 + i, filled) for i in range(copies)], np.int32).reshape(-1, 3)
    k_pool, v_pool, k, v = (mx.array(array).astype(pools.dtype) for array in (*before, *new))
    mx.eval(k_pool, v_pool)
    k_pool, v_pool, order = dispatch.write_kv(
        k_pool, v_pool, k, v, mx.array(slots.astype(np.int32)), mx.array(copy) if copies else None
    )
    mx.eval(k_pool, v_pool, order)
    mx.synchronize()
    error = 0.0
    for pool, expected, written in zip((k_pool, v_pool), before, new, strict=True):
        for source, destination, count in copy:
            expected[destination, :count] = expected[source, :count]
        flat = expected.reshape(-1, *shape[2:])
        for row, slot in enumerate(slots):
            if slot >= 0:
                flat[slot] = written[row]
        error = max(error, float(np.abs(np.array(pool.astype(mx.float32)) - expected).max()))
    return error


def _one_rotation_error(rotation: Rotation, rows: int) -> float:
    """Rows go to a block each, one of them nowhere; the queries and both pools are compared."""
    rng = np.random.default_rng(rows)
    size, pairs, base = rotation.block_size, rotation.dims // 2, 10000.0
    pool = (1 + rows, size, rotation.kv_heads, rotation.head_dim)
    shapes = (pool, pool, (rows, (rotation.heads + 2 * rotation.kv_heads) * rotation.head_dim))
    before = [rng.integers(-8, 8, shape).astype(np.float32) for shape in shapes]
    slots = mx.array([-1 if row == 1 else (1 + row) * size + row % size for row in range(rows)])
    positions = mx.array(rng.integers(0, 1000, rows).astype(np.int32))
    periods = mx.array((base ** (np.arange(pairs) / pairs)).astype(np.float32)) if rotation.freqs else None
    rope = Rope(rotation.dims, rotation.traditional, None if rotation.freqs else base, 0.5, periods)

    def turn(function: Callable[..., tuple[mx.array, ...]], dtype: mx.Dtype) -> tuple[mx.array, ...]:
        arrays = [mx.array(array).astype(dtype) for array in before]
        mx.eval(arrays)
        made = function(*arrays, slots, positions, heads=rotation.heads, rope=rope)
        mx.eval(made)
        mx.synchronize()
        return made[:3]

    found, expected = turn(dispatch.rope_and_write, rotation.dtype), turn(reference.rope_and_write, mx.float32)
    return max(map(_difference, found, expected))


def _one_product_error(case: Linear, rows: int) -> float:
    """Each block has two tiles, or three; unless the case says how many inputs there are, the last chunk of them is not
    whole."""
    inputs, outputs = case.norm or 1096, 16 * (2 * device().cores + 1)
    out = outputs // 2 if case.glu else outputs
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, inputs), "weights": (outputs, inputs)}
    shapes |= {"gain": (inputs,)} if case.norm else {}
    shapes |= {"bias": (outputs,)} if case.bias else {}
    shapes |= {"add": (rows, out)} if case.add else {}
    keys = mx.random.split(mx.random.key(rows), len(shapes))
    arrays = {name: mx.random.normal(shape, key=key) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    arrays["weights"] = arrays["weights"] * inputs**-0.5

    def multiply(function: Callable[..., mx.array], dtype: mx.Dtype) -> mx.array:
        given = {name: array.astype(case.dtype).astype(dtype) for name, array in arrays.items()}
        return function(**given, eps=1e-5, glu=case.glu)

    return _difference(multiply(dispatch.linear, case.dtype), multiply(reference.linear, mx.float32))
