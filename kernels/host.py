"""Arrays that a CUDA device and the host both reach."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from pagefork.kernels import cuda
from pagefork.kernels.device import device
from pagefork.kernels.launch import Launch

_PREFER, _PREFER_NO_MORE, _MAP, _MAP_NO_MORE = 3, 4, 5, 6  # CUmem_advise values
_HOST, _DEVICE = -1, 0


def land(target: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    """Copy arrays of 4-byte values, of any shapes, one behind the other into `target` int32 `[n]`, in place; on CUDA.

    For what the host reads while later steps are under way. Returns an array that is there once the copies are; until
    then `target` must neither be read nor used again.

    :raises ValueError: where there are no CUDA kernels, if `target` is too small, or for values of other sizes.
    """
    flat = [array.reshape(-1) for array in arrays]
    count = sum(array.size for array in flat)
    if device().backend != "cuda" or any(array.itemsize != 4 for array in flat):
        raise ValueError("values of 4 bytes land, on CUDA alone")
    if target.dtype != mx.int32 or target.ndim != 1 or target.size < count:
        raise ValueError(f"{count} values cannot land in {target.dtype} {target.shape}")
    launch = _land_launch(tuple(array.dtype for array in flat), count)
    return launch({"target": target, **{f"array{i}": array for i, array in enumerate(flat)}})["landed"]


def keep_in_host(pointer: int, nbytes: int, keep: bool = True) -> None:
    """Keep pages of managed memory in the host, where the CUDA device reaches them too; or no more.

    Else they move to whoever touches them, which he waits for. Where the driver refuses, they do as before.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    advice = ((_PREFER, _HOST), (_MAP, _DEVICE)) if keep else ((_PREFER_NO_MORE, _HOST), (_MAP_NO_MORE, _DEVICE))
    for what, where in advice:
        driver.cuMemAdvise(ctypes.c_uint64(pointer), ctypes.c_size_t(nbytes), what, where)


@lru_cache(maxsize=4096)
def _land_launch(dtypes: tuple[mx.Dtype, ...], count: int) -> Launch:
    return Launch("cuda", cuda.land_spec(dtypes, count=count))
