"""Give MLX's CPU build a fast BLAS: import this before `mlx.core`.

The Linux CPU wheels link a reference BLAS whose float32 matmul is about 20 times slower than OpenBLAS's. BLIS is faster
still for the few rows of a decode step, since it does not copy a matrix before it multiplies it.
A library that is already loaded with global symbols wins when `libmlx` is bound, which happens once, at the
first import of `mlx.core`; loading it later changes nothing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

from pagefork.runtime.log import log

_NAMES = ("libblis.so.4", "libopenblas.so.0", "libopenblas.so")


def preload() -> str | None:
    """Load BLIS or OpenBLAS where MLX's CPU build would gain from it; returns the library's name, or None.

    `PAGEFORK_BLAS` names another library, or is 0 for none. Does nothing outside Linux, beside a CUDA build of MLX, or
    when `mlx.core` was imported first. The log says which.
    """
    wanted = os.environ.get("PAGEFORK_BLAS")
    if sys.platform != "linux" or wanted == "0" or not _is_cpu_build():
        return None
    if "mlx.core" in sys.modules:
        log.debug("blas", library=None, reason="mlx.core was imported before pagefork")
        return None
    for name in (wanted,) if wanted else _NAMES:
        if "blis" in name and "OMP_NUM_THREADS" not in os.environ:  # it would take one thread; OpenBLAS takes all
            os.environ.setdefault("BLIS_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        log.debug("blas", library=name)
        return name
    log.info("blas", library=None, reason="neither BLIS nor OpenBLAS was found: MLX's CPU matmul is 20 times slower")
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
