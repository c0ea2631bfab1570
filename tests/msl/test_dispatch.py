"""The library's own path to Metal: dispatch, specs and kernels together, with the harness in place of MLX's compiler.

What is left out is MLX's scheduling: each launch runs when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest

from pagefork.kernels import dispatch, verify
from pagefork.kernels.device import Device
from pagefork.kernels.spec import KernelSpec, Output, Rope, Rotation

from .harness import Array, run

DEVICE = Device("metal", "a CPU that reads Metal", 4)


def shared(array: mx.array) -> Array:
    """A numpy view of the array's own memory, so that writes in place show; bfloat16 as its bits."""
    mx.eval(array)
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(bits)
    return np.array(bits, copy=False)


def metal_kernel(
    name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
) -> Callable[..., list[mx.array]]:
    def call(
        *,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, mx.Dtype | int | bool]],
        stream: object,
    ) -> list[mx.array]:
        outputs = tuple(map(Output, output_names, output_shapes, output_dtypes))
        spec = KernelSpec(name, source, header, tuple(input_names), outputs, tuple(template), grid, threadgroup)
        # As MLX does, what is not contiguous is copied first.
        arrays = {key: np.ascontiguousarray(shared(array)) for key, array in zip(input_names, inputs, strict=True)}
        made = run(spec, arrays, partly_written=("partial",)).outputs
        return [
            mx.array(made[o.name]).view(o.dtype) if o.dtype == mx.bfloat16 else mx.array(made[o.name]) for o in outputs
        ]

    return call


@pytest.fixture(autouse=True)
def metal_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    monkeypatch.setattr(dispatch, "device", lambda: DEVICE)
    monkeypatch.setattr(verify, "device", lambda: DEVICE)
    caches = [value for value in vars(dispatch).values() if hasattr(value, "cache_clear")]
    caches.append(dispatch.Launch.__init__.__globals__["_kernel"])
    for cache in caches:
        cache.cache_clear()
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    dispatch._fallbacks.clear()
    mx.set_default_device(before)
    for cache in caches:
        cache.cache_clear()


@pytest.mark.slow
def test_the_self_test_at_load_passes() -> None:
    results = verify.selftest(verify.default_cases()[::2])
    assert {result.backend for result in results} == {"metal"}
    assert [verify.describe(r.variant) + f": {r.error} {r.failure}" for r in results if not r.passed] == []


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_a_sequence_decodes_step_by_step(dtype: mx.Dtype) -> None:
    """Write a token, attend, write the next: the pools change in place and every step sees all of them."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    pools = random(5, 8, 2, 64), random(5, 8, 2, 64)
    mx.eval(*pools)
    addresses = [shared(pool).ctypes.data for pool in pools]
    table, keys, values, order = np.array([[3, 0, 4]], np.int32), [], [], None
    for position in range(20):
        k, v, q = random(1, 2, 64), random(1, 2, 64), random(1, 6, 64)
        keys.append(k)
        values.append(v)
        slot = mx.array([int(table[0, position // 8]) * 8 + position % 8])
        *written, order = dispatch.write_kv(*pools, k, v, slot, order=order)
        assert [shared(pool).ctypes.data for pool in written] == addresses
        out = order = dispatch.paged_attention(
            q, *pools, mx.array(table), mx.array([position + 1]), scale=0.125, max_length=position + 1, order=order
        )
        stacked = (mx.concatenate(rows).transpose(1, 0, 2)[None].astype(mx.float32) for rows in (keys, values))
        wanted = mx.fast.scaled_dot_product_attention(q[:, :, None].astype(mx.float32), *stacked, scale=0.125)
        assert mx.abs(out.astype(mx.float32) - wanted[:, :, 0]).max().item() <= (1e-2 if dtype == mx.bfloat16 else 2e-3)


@pytest.mark.parametrize("sound", [True, False], ids=["fused", "fallen back"])
def test_a_rotated_step_is_written_in_place(sound: bool) -> None:
    """Also where the rotation is MLX's own, after a self-test that failed."""
    rotation = Rotation(mx.float32, heads=6, kv_heads=2, head_dim=64, block_size=8, dims=32)
    if not sound:
        dispatch.fall_back(rotation)
    assert dispatch.in_place([rotation])
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(shape).astype(np.float32) for shape in [(3, 8, 2, 64)] * 2 + [(2, 10 * 64)]]
    options = {"heads": 6, "rope": Rope(32, base=10000.0, scale=0.5)}
    slots, positions = mx.array([17, -1]), mx.array([500, 3])
    expected = dispatch.rope_and_write(*map(mx.array, before), slots, positions, **options, backend="reference")
    k_pool, v_pool, qkv = map(mx.array, before)
    addresses = [shared(pool).ctypes.data for pool in (k_pool, v_pool)]
    *pools, q, order = dispatch.rope_and_write(k_pool, v_pool, qkv, slots, positions, **options)
    assert [shared(pool).ctypes.data for pool in pools] == addresses
    assert order.size >= 8
    for found, wanted in zip((*pools, q), expected, strict=False):
        np.testing.assert_allclose(shared(found), shared(wanted), atol=2e-4)
