"""What must be set before MLX starts; `pagefork.runtime` imports it first."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution

from pagefork.runtime import blas as blas


def _has_cuda() -> bool:
    for name in ("mlx-cuda-13", "mlx-cuda-12"):
        try:
            distribution(name)
        except PackageNotFoundError:
            continue
        return True
    return False


# MLX ends a command buffer or CUDA graph once its kernels name so many megabytes of arrays. A pool alone is larger, so
# every kernel that names one would be launched by itself, which costs more than the kernel.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "10000000")

# And once it has so many kernels. One CUDA graph for a whole step costs the host less than dozens of graphs: 9.7 ms
# instead of 13.1 for a step of 32 rows of an 8B model on an NVIDIA H200. Metal keeps its own limit, since a command
# buffer starts to run when it ends.
if _has_cuda():
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", "2000")
