"""What the launches need to know of the device they run on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from pagefork.kernels import metal

_MULTIPROCESSORS = 16  # CUdevice_attribute values
_SHARED_MEMORY_OPT_IN = 97


@dataclass(frozen=True)
class Device:
    """`backend`: "metal", "cuda" or "reference". `cores`: multiprocessors, or GPU cores on Metal.

    `shared_memory`: bytes of shared memory that one block may take; CUDA alone.
    """

    backend: str
    name: str
    cores: int
    shared_memory: int = 0

    def without_kernels(self) -> Device:
        return replace(self, backend="reference")

    @property
    def on_gpu(self) -> bool:
        return self.name != "CPU"


def device() -> Device:
    """The device that MLX computes on by default."""
    return _gpu() if mx.default_device().type == mx.gpu else Device("reference", "CPU", 1)


@cache
def _gpu() -> Device:
    info = mx.device_info(mx.gpu)
    name = str(info.get("device_name", "GPU"))
    if mx.metal.is_available():
        return Device("metal", name, metal.estimate_cores(str(info.get("architecture", ""))))
    if mx.cuda.is_available():
        return Device("cuda", name, *_cuda_limits())
    return Device("reference", name, 1)


def _cuda_limits() -> tuple[int, int]:
    """Multiprocessors and shared memory by the driver's own library: MLX does not tell them."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, cores, shared = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), 0)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(cores), _MULTIPROCESSORS, handle)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(shared), _SHARED_MEMORY_OPT_IN, handle)
    if failed:
        raise RuntimeError(f"the CUDA driver does not describe device 0 (error {failed})")
    return cores.value, shared.value
