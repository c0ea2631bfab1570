"""Random steps that rotate and write, what they must leave, and their run through the Metal text."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork.kernels import metal
from pagefork.kernels.spec import Rotation

from .cases import Floats, Mutation, decode, encode
from .harness import Array, run

BASE = 10000.0


@dataclass(frozen=True)
class Turn:
    """Inputs of one launch, and which values of the pools it may write."""

    rotation: Rotation
    inputs: dict[str, Array]
    owned: npt.NDArray[np.bool_]


def make_turn(
    rotation: Rotation, *, slots: list[int], positions: list[int], scale: float = 1.0, blocks: int = 4
) -> Turn:
    """Pools of NaN: a step reads none of their values, and leaves those of other slots."""
    rng = np.random.default_rng(len(slots))
    rows, block, dtype = len(slots), rotation.block_size, rotation.dtype
    pool = np.full((blocks, block, rotation.kv_heads, rotation.head_dim), np.nan)
    width = (rotation.heads + 2 * rotation.kv_heads) * rotation.head_dim
    owned = np.zeros(pool.shape, bool)
    owned.reshape(-1, *pool.shape[2:])[[slot for slot in slots if slot >= 0]] = True
    inputs = {
        "k_pool": encode(pool, dtype),
        "v_pool": encode(pool, dtype),
        "qkv": encode(rng.standard_normal((rows, width)), dtype),
        "slots": np.array(slots, np.int32),
        "positions": np.array(positions, np.int32),
        "params": np.array([scale, np.log2(BASE), 0, 0], np.float32),
        "order": encode(np.zeros(8), dtype),
    }
    if rotation.freqs:
        inputs["freqs"] = periods(rotation).astype(np.float32)
        inputs["params"][1] = np.nan
    return Turn(rotation, inputs, owned)


def periods(rotation: Rotation) -> Floats:
    """Twice as long as those of the base where they are an input."""
    pairs = rotation.dims // 2
    plain: Floats = BASE ** (np.arange(pairs) / pairs)
    return 2 * plain if rotation.freqs else plain


def expected(turn: Turn) -> tuple[Floats, Floats, Floats]:
    """Rotated queries, and both pools, from the definition of the rotary embedding."""
    kind, inputs = turn.rotation, turn.inputs
    split = decode(inputs["qkv"]).reshape(len(inputs["slots"]), -1, kind.head_dim)
    q, k, v = np.split(split, [kind.heads, kind.heads + kind.kv_heads], axis=1)
    angles = inputs["positions"][:, None] * float(inputs["params"][0]) / periods(kind)
    pools = []
    for name, rows in (("k_pool", rotated(kind, k, angles)), ("v_pool", v)):
        pool = decode(inputs[name])
        for slot, row in zip(inputs["slots"].tolist(), rows, strict=True):
            if slot >= 0:
                pool.reshape(-1, *pool.shape[2:])[slot] = row
        pools.append(pool)
    return rotated(kind, q, angles), pools[0], pools[1]


def rotated(kind: Rotation, rows: Floats, angles: Floats) -> Floats:
    """`rows` `[rows, heads, head_dim]`, whose first dims are complex numbers that turn by `angles`."""
    pairs, out = kind.dims // 2, rows.copy()
    near, far = slice(0, pairs), slice(pairs, kind.dims)
    if kind.traditional:
        near, far = slice(0, kind.dims, 2), slice(1, kind.dims, 2)
    turned = (rows[..., near] + 1j * rows[..., far]) * np.exp(1j * angles)[:, None]
    out[..., near], out[..., far] = turned.real, turned.imag
    return out


def turn_error(turn: Turn, *, seed: int = 0, mutation: Mutation = lambda spec: spec) -> float:
    """The largest difference of the queries and of what is written; infinite where other slots are touched.

    :raises KernelFault: see `harness.run`.
    """
    rows = len(turn.inputs["slots"])
    spec = mutation(metal.rope_and_write_spec(turn.rotation, rows=rows))
    arrays = {name: array.copy() for name, array in turn.inputs.items()}
    nothing = np.zeros(turn.owned.shape, bool)
    made = run(spec, arrays, seed=seed, readable={"k_pool": nothing, "v_pool": nothing}).outputs["q"]
    error = 0.0
    for found, wanted in zip((made, arrays["k_pool"], arrays["v_pool"]), expected(turn), strict=True):
        difference = np.abs(decode(found) - wanted)
        if not np.array_equal(np.isnan(decode(found)), np.isnan(wanted)):
            return float("inf")
        error = max(error, float(np.nanmax(difference, initial=0.0)))
    return error


def tolerance(dtype: mx.Dtype) -> float:
    """Half a step of `dtype` at the largest values, about 4; in float32 that of the angle."""
    return {mx.float32: 5e-4, mx.float16: 2.5e-3, mx.bfloat16: 2e-2}[dtype]
