"""A kernel launch as data: built without a GPU, run by `dispatch`, executed on a CPU by tests/msl."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Attention:
    """What is compiled into an attention kernel, and so into its name; the rest are arguments of a launch.

    `window`, `sinks` and `softcap` say which features are compiled in, not their values.
    """

    dtype: mx.Dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: bool = False
    sinks: bool = False
    softcap: bool = False


@dataclass(frozen=True)
class Pools:
    """What is compiled into a writing kernel."""

    dtype: mx.Dtype
    kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class Output:
    """One output array of a launch."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype


@dataclass(frozen=True)
class KernelSpec:
    """One launch of `mx.fast.metal_kernel` or `mx.fast.cuda_kernel`.

    `name` carries every template value and dtype, since MLX may cache compiled kernels by name alone.
    `grid` counts threads, as on Metal; `threadgroup` threads of one group. `inputs` names the arguments in order.
    """

    name: str
    source: str
    header: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    template: tuple[tuple[str, mx.Dtype | int | bool], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shared_memory: int = 0
    """Bytes of dynamic shared memory: CUDA alone."""
