"""A decode layer of a Llama: its products with their norms, gate and sums as `kernels.linear`, beside MLX's own."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bench_kernels import BLOCK, slope
from bench_peer import SHAPES

from pagefork.kernels import Rope, linear, paged_attention, rope_and_write
from pagefork.kernels.device import device

EPS = 1e-5
COPIES = 6
"""Layers that a chain walks over: their weights are many times any cache."""


@dataclass(frozen=True)
class Shape:
    """Of a layer, and of the context that it attends to."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def shape_of(name: str, length: int) -> Shape:
    """A layer of one of the peer's shapes."""
    sizes = SHAPES[name]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kv_heads = sizes["num_key_value_heads"]
    return Shape(hidden, sizes["intermediate_size"], heads, kv_heads, hidden // heads, length)


class Layer:
    """Random weights of one layer, in the order of their products, and its pools."""

    def __init__(self, shape: Shape, rows: int, dtype: mx.Dtype) -> None:
        sizes = ((shape.hidden, shape.heads * shape.head_dim), (2 * shape.inner, shape.hidden))
        sizes += ((shape.hidden, shape.inner), (shape.qkv, shape.hidden))
        self.output, self.gates, self.down, self.qkv = ((mx.random.normal(s) * 0.02).astype(dtype) for s in sizes)
        self.before_mlp, self.before_qkv = (mx.ones((shape.hidden,), dtype) for _ in range(2))
        pool = (rows * (shape.length // BLOCK), BLOCK, shape.kv_heads, shape.head_dim)
        self.pools = [mx.random.normal(pool).astype(dtype) for _ in range(2)]
        mx.eval(self.output, self.gates, self.down, self.qkv, self.before_mlp, self.before_qkv, self.pools)

    @property
    def nbytes(self) -> int:
        return self.output.nbytes + self.gates.nbytes + self.down.nbytes + self.qkv.nbytes


def fused(layer: Layer, attended: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
    """The products from one attention to the next: the hidden states, and the next layer's QKV."""
    hidden = linear(attended, layer.output, add=hidden)
    gated = linear(hidden, layer.gates, gain=layer.before_mlp, eps=EPS, glu=True)
    hidden = linear(gated, layer.down, add=hidden)
    return hidden, linear(hidden, layer.qkv, gain=layer.before_qkv, eps=EPS)


def plain(layer: Layer, attended: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
    """The same by MLX's own operations, as mlx-lm's models have them."""
    hidden = hidden + attended @ layer.output.T
    gate, up = mx.split(mx.fast.rms_norm(hidden, layer.before_mlp, EPS) @ layer.gates.T, 2, axis=-1)
    hidden = hidden + _swiglu(gate, up) @ layer.down.T
    return hidden, mx.fast.rms_norm(hidden, layer.before_qkv, EPS) @ layer.qkv.T


_swiglu: Any = mx.compile(lambda gate, up: nn.silu(gate) * up, shapeless=True)


def measure(shape: Shape, rows: int, quick: bool) -> dict[str, float]:
    """Microseconds a layer, its attention included, for either kind of products."""
    dtype = mx.float32 if quick else mx.bfloat16
    layers = [Layer(shape, rows, dtype) for _ in range(1 if quick else COPIES)]
    width, ones = shape.length // BLOCK, mx.ones((rows,), mx.int32)
    # One array in the device's memory, as in a step of the runtime; no row is written, so that all stay the same.
    blocks = mx.array(np.random.default_rng(0).permutation(rows * width).astype(np.int32))
    plan = mx.concatenate([blocks, ones * shape.length, ones * (shape.length - 1), -ones])
    tables, rest = plan[: rows * width].reshape(rows, width), plan[rows * width :].reshape(3, rows)
    lengths, positions, slots = rest[0], rest[1], rest[2]
    hidden, qkv = (mx.random.normal((rows, size)).astype(dtype) for size in (shape.hidden, shape.qkv))
    rope = Rope(shape.head_dim, base=500_000.0)
    mx.eval(tables, lengths, positions, slots, hidden, qkv)

    def time(products: Any) -> float:
        def chain(count: int, after: mx.array) -> mx.array:
            state, heads = hidden + after.reshape(-1)[:1].astype(dtype) * 0, qkv
            for i in range(count):
                layer = layers[i % len(layers)]
                *pools, q, order = rope_and_write(*layer.pools, heads, slots, positions, heads=shape.heads, rope=rope)
                options = {"scale": shape.head_dim**-0.5, "max_length": shape.length, "order": order}
                attended = paged_attention(q, *pools, tables, lengths, **options)
                state, heads = products(layer, attended.reshape(rows, -1), state)
            return state + heads.sum() * 0

        return slope(chain, quick, layers[0].nbytes / 4e9) * 1e3

    return {"rows": rows, "linear": time(fused), "mlx": time(plain), "weights_mb": layers[0].nbytes / 1e6}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("products", help=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="repeat for several; 1 and 4 unless given")
    parser.add_argument("--quick", action="store_true", help="a small layer in float32: to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    shape = shape_of("tiny", 64) if arguments.quick else shape_of("llama-8b", 1024)
    rows = [measure(shape, count, arguments.quick) for count in arguments.rows or (1, 4)]
    if arguments.json:
        print(json.dumps({"device": device().name, "us_per_layer": rows}))
        return
    print("rows   linear us   MLX us   ratio")
    for row in rows:
        print(f"{row['rows']:4}{row['linear']:12.1f}{row['mlx']:9.1f}{row['mlx'] / row['linear']:8.2f}")
