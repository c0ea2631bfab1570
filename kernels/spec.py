"""A kernel launch as data: built without a GPU, run by `dispatch`, executed on a CPU by tests/msl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True, eq=False)
class Rope:
    """A rotary embedding, as `mx.fast.rope` takes it: the first `dims` values of each head are rotated.

    `freqs`: float32 `[dims / 2]`, the *periods* of the pairs over 2 pi, in place of `base`.

    :raises ValueError: if not exactly one of `base` and `freqs` is given, or `freqs` is of another shape.
    """

    dims: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: mx.array | None = None

    def __post_init__(self) -> None:
        if (self.base is None) == (self.freqs is None):
            raise ValueError("a rotary embedding takes either `base` or `freqs`")
        if self.freqs is not None and self.freqs.shape != (self.dims // 2,):
            raise ValueError(f"{self.dims} dims rotate by {self.dims // 2} periods, not by {self.freqs.shape}")


@dataclass(frozen=True)
class Rotation:
    """What is compiled into a kernel that rotates and writes; `freqs` says whether periods are an input.

    :raises ValueError: if `dims` is odd, or more than a head has.
    """

    dtype: mx.Dtype
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dims: int
    traditional: bool = False
    freqs: bool = False

    def __post_init__(self) -> None:
        if self.dims % 2 or not 2 <= self.dims <= self.head_dim:
            raise ValueError(f"a head of {self.head_dim} values has no {self.dims} that rotate in pairs")


@dataclass(frozen=True)
class Pools:
    """What is compiled into a writing kernel."""

    dtype: mx.Dtype
    kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class Linear:
    """What is compiled into a product of few rows: what is done before and after it, see `linear`.

    `norm`: how many inputs it has where they are normed, else 0; a thread holds the vectors of so many.
    """

    dtype: mx.Dtype
    norm: int = 0
    bias: bool = False
    glu: bool = False
    add: bool = False


Case: TypeAlias = Attention | Rotation | Linear
"""What a model asks of the kernels; the writes follow from it."""

Variant: TypeAlias = Case | Pools


def pools_of(cases: Iterable[Case]) -> list[Pools]:
    """The pools that cases read or write, each once."""
    using = (case for case in cases if not isinstance(case, Linear))
    return list(dict.fromkeys(Pools(case.dtype, case.kv_heads, case.head_dim, case.block_size) for case in using))


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
