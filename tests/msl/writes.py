"""Random K/V writes and block copies, what they must leave in the pools, and their run through the Metal text."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pagefork.kernels import metal

from .cases import Mutation, encode
from .harness import Array, run


@dataclass(frozen=True)
class Step:
    """Inputs of one write, and the options of its launch."""

    dtype: mx.Dtype
    inputs: dict[str, Array]
    copies: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Block size, KV heads, head dim."""
        return self.inputs["k_pool"].shape[1:]


def make_step(
    dtype: mx.Dtype,
    *,
    slots: list[int],
    copies: list[tuple[int, int, int]],
    blocks: int = 8,
    block: int = 16,
    kv_heads: int = 2,
    dim: int = 64,
) -> Step:
    """Pools of random values; `copies` as (source, destination, filled rows)."""
    rng = np.random.default_rng(len(slots) + 7 * len(copies))
    pool, rows = (blocks, block, kv_heads, dim), (len(slots), kv_heads, dim)
    shapes = {"k_pool": pool, "v_pool": pool, "k": rows, "v": rows}
    inputs = {name: encode(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    inputs["slots"] = np.array(slots, np.int32)
    inputs["copies"] = np.array(copies or [(0, 0, 0)], np.int32)
    inputs["order"] = encode(np.zeros(8), dtype)
    return Step(dtype, inputs, len(copies))


def expected(step: Step) -> tuple[Array, Array]:
    """The two pools afterwards."""
    pools = []
    for name in ("k", "v"):
        before = step.inputs[f"{name}_pool"]
        after = before.copy()
        for source, target, filled in step.inputs["copies"][: step.copies].tolist():
            after[target, :filled] = before[source, :filled]
        flat = after.reshape(-1, *after.shape[2:])
        for row, slot in enumerate(step.inputs["slots"].tolist()):
            if slot >= 0:
                flat[slot] = step.inputs[name][row]
        pools.append(after)
    return pools[0], pools[1]


def write(step: Step, *, seed: int = 0, mutation: Mutation = lambda spec: spec) -> tuple[Array, Array, Array]:
    """Both pools after the step, and its `written`.

    :raises KernelFault: see `harness.run`.
    """
    block, kv_heads, dim = step.shape
    rows = len(step.inputs["slots"])
    spec = mutation(metal.write_kv_spec(step.dtype, kv_heads, dim, block, rows=rows, copies=step.copies))
    arrays = {name: array.copy() for name, array in step.inputs.items()}
    result = run(spec, arrays, seed=seed)
    return arrays["k_pool"], arrays["v_pool"], result.outputs["written"]


def right(step: Step, **options: object) -> bool:
    """Whether the step leaves what it must, bit for bit."""
    keys, values, order = write(step, **options)  # type: ignore[arg-type]
    wanted = expected(step)
    return bool((keys == wanted[0]).all() and (values == wanted[1]).all() and not order.any())
