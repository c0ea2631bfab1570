"""Give MLX's CPU build a fast BLAS: import this before `mlx.core`.

The Linux CPU wheels link a reference BLAS whose float32 matmul is about 20 times slower than OpenBLAS's.
A library that is already loaded with global symbols wins when `libmlx` is bound, which happens once, at the
first import of `mlx.core`; loading it later changes nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

from pagefork.runtime.log import log

_NAMES = ("libopenblas.so.0", "libopenblas.so")


def preload() -> str | None:
    """Load OpenBLAS where MLX's CPU build would gain from it; returns the library's name, or None.

    Does nothing outside Linux, beside a CUDA build of MLX, when `mlx.core` was imported first, or when
    `PAGEFORK_BLAS=0`. The log says which.
    """
    if sys.platform != "linux" or os.environ.get("PAGEFORK_BLAS") == "0" or not _is_cpu_build():
        return None
    if "mlx.core" in sys.modules:
        log.debug("blas", library=None, reason="mlx.core was imported before pagefork")
        return None
    for name in _NAMES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        log.debug("blas", library=name)
        return name
    log.info("blas", library=None, reason="OpenBLAS not found; MLX's CPU matmul is much faster with libopenblas0")
    return None


def _is_cpu_build() -> bool:
    """Whether the installed MLX brings no GPU back end, judged without importing it."""
    from importlib.metadata import PackageNotFoundError, distribution

    if importlib.util.find_spec("mlx") is None:
        return False
    try:
        distribution("mlx-cpu")
    except PackageNotFoundError:
        return False
    return True


LIBRARY = preload()
