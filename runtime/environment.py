"""What must be set before MLX starts; `pagefork.runtime` imports it first."""

from __future__ import annotations

import os

from pagefork.runtime import blas as blas

# MLX ends a command buffer or CUDA graph once its kernels name so many megabytes of arrays. A pool alone is larger, so
# every kernel that names one would be launched by itself, which costs more than the kernel.
os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "10000000")
