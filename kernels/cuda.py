"""CUDA launches of the paged-attention kernels, built as data from shapes and dtypes, without a GPU.

`kernels/metal.py` has the same two functions. Inputs are found by name; `dispatch` supplies

- `k_pool`, `v_pool`, `k`, `v`, `slots`, `q`, `tables`, `lengths`, `sinks`: as in `reference`
- `copies`: int32 `[n, 3]`; `[1, 3]` of zeros where a step copies nothing (then `copies=0` below)
- `params`: float32 `[4]`: scale, softcap (0 without), window (0 without), 0
- `order`: any array of the pools' dtype with at least 8 elements; only its place in the graph counts
- what an earlier spec of the same tuple put out
"""

from __future__ import annotations

import mlx.core as mx

from pagefork.kernels.spec import Attention, KernelSpec


def write_kv_spec(
    dtype: mx.Dtype, kv_heads: int, head_dim: int, block_size: int, *, rows: int, copies: int = 0
) -> KernelSpec:
    """One launch that writes `rows` rows of K and V and performs `copies` block copies in place.

    Inputs `k_pool, v_pool, k, v, slots, copies, order`; output `order` `[8]` of `dtype`, zeros.
    """
    raise NotImplementedError


def decode_specs(case: Attention, *, rows: int, max_blocks: int, max_length: int, cores: int) -> tuple[KernelSpec, ...]:
    """The launches of one decode attention, in order; the last one puts out `out` `[rows, heads, head_dim]`.

    `max_blocks`: the tables' width. `max_length`: an upper bound of the lengths. `cores`: multiprocessors of the device.
    `sinks` is an input where `case.sinks`; `order` is an input of the first launch.
    """
    raise NotImplementedError
