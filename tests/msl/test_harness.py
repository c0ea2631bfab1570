"""The harness reports what it promises to report: small kernels, each wrong in one way."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pagefork.kernels.spec import KernelSpec, Output

from . import harness
from .cases import decode, encode
from .harness import Array, CompilerMissing, KernelFault, run


def kernel(source: str, threads: int = 64, header: str = "") -> KernelSpec:
    """Input `x` `[64]`, output `y` `[64]`, one threadgroup."""
    source = source.replace("TID", "thread_index_in_threadgroup").replace("LANE", "thread_index_in_simdgroup")
    output = Output("y", (64,), mx.float32)
    return KernelSpec("test", source, header, ("x",), (output,), (), (threads, 1, 1), (threads, 1, 1))


def outcome(source: str, seed: int = 0, **options: object) -> Array:
    x = np.arange(64, dtype=np.float32)
    return run(kernel(source), {"x": x}, seed=seed, **options).outputs["y"]  # type: ignore[arg-type]


WRONG = {
    "a read past the end": ("y[TID] = x[TID + 1];", "reads 4 bytes at 256 of x.*out of bounds"),
    "a read before the start": ("y[TID] = x[int(TID) - 1];", "reads 4 bytes at -4 of x.*out of bounds"),
    "a write past the end": ("y[2 * TID] = 1.0f;", "writes 4 bytes.*of y.*out of bounds"),
    "an unaligned vector": (
        "y[TID] = 0.0f; const device vec<float, 4>* p = (const device vec<float, 4>*)(x + 1); y[TID] = p[0].x;",
        "misaligned",
    ),
    "an output left unwritten": ("if (TID != 7) { y[TID] = x[TID]; }", "4 of 256 bytes of output y are not written"),
    "a read of an output before its write": ("y[TID] = y[TID] + 1.0f;", "reads byte .* of y, which is not set"),
    "two threads that write one place": ("y[TID / 2] = x[TID];", "writes byte .* of y, which another thread wrote"),
    "a read of what another thread wrote": (
        "y[TID] = x[TID]; threadgroup_barrier(mem_flags::mem_none); y[TID] = y[63 - TID];",
        "of y, which another thread wrote",
    ),
    "a SIMD sum that half of the lanes skip": (
        "float s = 0.0f; if (LANE < 16) { s = simd_sum(x[TID]); } y[TID] = s;",
        "divergence.*a SIMD reduction.*has ended",
    ),
    "lanes that meet at different shuffles": (
        "float s;\nif (LANE < 16) {\ns = simd_shuffle_xor(x[TID], 1);\n} else {\n"
        "s = simd_shuffle_xor(x[TID], 1);\n}\ny[TID] = s;",
        "divergence.*waits elsewhere",
    ),
    "a shuffle before and a shuffle after a thread's end": (
        "y[TID] = 0.0f; if (LANE == 3) { return; } y[TID] = simd_shuffle_down(x[TID], 1);",
        "divergence.*has ended",
    ),
    "a barrier that one SIMD group skips": (
        "y[TID] = 0.0f; if (TID < 32) { threadgroup_barrier(mem_flags::mem_threadgroup); }",
        "divergence.*threadgroup_barrier.*has ended",
    ),
    "a shuffle from a lane that is none": ("y[TID] = simd_shuffle(x[TID], LANE + 1);", "lane 32, which does not exist"),
    "threadgroup memory read before it is set": (
        "threadgroup float s[64]; if (TID > 0) { s[TID] = 1.0f; }\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup); y[TID] = s[TID];",
        "threadgroup memory s, which is not set",
    ),
    "threadgroup memory shared without a barrier": (
        "threadgroup float s[64]; s[TID] = x[TID]; y[TID] = s[63 - TID];",
        "threadgroup memory s",
    ),
    "a barrier that does not order threadgroup memory": (
        "threadgroup float s[64]; s[TID] = x[TID]; threadgroup_barrier(mem_flags::mem_device); y[TID] = s[63 - TID];",
        "race",
    ),
    "threadgroup memory written again without a barrier": (
        "threadgroup float s[64]; s[TID] = x[TID]; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[TID] = s[63 - TID]; s[TID] = 0.0f;",
        "race",
    ),
    "a read past threadgroup memory": (
        "threadgroup float s[64]; s[TID] = x[TID]; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[TID] = s[TID + 1];",
        "of s, which has 256: out of bounds",
    ),
    "too much threadgroup memory": ("threadgroup float s[8193]; s[TID] = 0.0f; y[TID] = 0.0f;", "32772 bytes"),
    "an index past a thread's own array": (
        "float a[4]; for (int i = 0; i < 4; ++i) { a[i] = 1.0f; } y[TID] = a[TID % 8];",
        "its own array out of bounds",
    ),
    "a loop without an end": ("y[TID] = 0.0f; while (x[0] == 0.0f) {}", "does not end"),
}


@pytest.mark.parametrize(("source", "message"), WRONG.values(), ids=WRONG)
def test_reports(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "BUDGET", 1_000_000)
    for seed in range(3):
        with pytest.raises(KernelFault, match=message):
            outcome(source, seed)


def test_reports_a_thread_s_own_variable_that_is_not_set() -> None:
    found = outcome("float s; if (TID > 0) { s = x[TID]; } y[TID] = s;")
    assert found[0] != 0  # a pattern that is no sensible value, rather than the zero that happens to lie there


def test_reports_a_read_of_what_is_not_the_kernel_s() -> None:
    mask = np.ones(64, bool)
    mask[9] = False
    with pytest.raises(KernelFault, match="reads byte 36 of x"):
        outcome("y[TID] = x[TID];", readable={"x": mask})


def test_simd_functions_are_those_of_metal() -> None:
    x = np.arange(64, dtype=np.float32)
    groups = x.reshape(2, 32)
    cases = {
        "simd_sum(x[TID])": np.repeat(groups.sum(1), 32),
        "simd_max(x[TID])": np.repeat(groups.max(1), 32),
        "simd_min(x[TID])": np.repeat(groups.min(1), 32),
        "simd_shuffle_xor(x[TID], 5)": groups[:, np.arange(32) ^ 5].ravel(),
        "simd_shuffle(x[TID], 31 - LANE)": groups[:, ::-1].ravel(),
        "simd_broadcast(x[TID], 4)": np.repeat(groups[:, 4], 32),
    }
    down = np.where(np.arange(32) + 3 < 32, np.arange(32) + 3, np.arange(32))
    up = np.where(np.arange(32) >= 3, np.arange(32) - 3, np.arange(32))
    cases["simd_shuffle_down(x[TID], 3)"] = groups[:, down].ravel()
    cases["simd_shuffle_up(x[TID], 3)"] = groups[:, up].ravel()
    cases["(simd_all(x[TID] < 32.0f) ? 1.0f : 0.0f)"] = np.repeat([1.0, 0.0], 32)
    cases["(simd_any(x[TID] == 40.0f) ? 1.0f : 0.0f)"] = np.repeat([0.0, 1.0], 32)
    for call, wanted in cases.items():
        assert (outcome(f"y[TID] = {call};") == wanted).all(), call


def test_threads_run_in_another_order_with_another_seed() -> None:
    # Shuffles in a loop: whichever lane comes last differs, the values do not.
    source = "float s = x[TID]; for (int i = 0; i < 9; ++i) { s += simd_shuffle_xor(s, 1 << i % 5); } y[TID] = s;"
    assert all((outcome(source, seed) == outcome(source)).all() for seed in range(5))


def test_bytes_loaded_are_counted() -> None:
    result = run(kernel("y[TID] = x[TID] + x[0];"), {"x": np.zeros(64, np.float32)})
    assert result.loaded["x"] == 2 * 64 * 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["half", "bfloat"])
def test_small_floats_round_as_hardware_does(dtype: mx.Dtype) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    raw = bits if dtype == mx.bfloat16 else bits.view(np.float16)
    with np.errstate(invalid="ignore"):
        values = decode(raw).astype(np.float32)
    nudged = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), values * np.float32(1.0007)])
    nudged = nudged[np.isfinite(nudged)]
    count = len(nudged)
    source = "const uint i = thread_position_in_grid.x; y[i] = T(x[i]); z[i] = float(T(x[i]));"
    spec = KernelSpec(
        "round",
        source,
        "",
        ("x",),
        (Output("y", (count,), dtype), Output("z", (count,), mx.float32)),
        (("T", dtype),),
        (count, 1, 1),
        (256, 1, 1),
    )
    outputs = run(spec, {"x": nudged}).outputs
    with np.errstate(over="ignore"):
        wanted = encode(nudged, dtype)
    assert (outputs["y"].view(np.uint16) == wanted.view(np.uint16)).all()
    assert (outputs["z"] == decode(wanted)).all()


def test_a_missing_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.shutil, "which", lambda name: None)
    with pytest.raises(CompilerMissing, match="install g"):
        harness._compiler.__wrapped__()
