"""Running a `KernelSpec` through MLX."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx

from pagefork.kernels.spec import KernelSpec


class Launch:
    """A spec made ready once, to be run many times: what a step costs is little more than MLX's own call."""

    def __init__(self, backend: str, spec: KernelSpec) -> None:
        self.spec = spec
        self._names = [output.name for output in spec.outputs]
        self._kernel = _kernel(
            backend, spec.name, spec.inputs, tuple(self._names), spec.source, spec.header, spec.shared_memory
        )
        self._fixed: dict[str, Any] = {
            "output_shapes": [output.shape for output in spec.outputs],
            "output_dtypes": [output.dtype for output in spec.outputs],
            "grid": spec.grid,
            "threadgroup": spec.threadgroup,
            "template": list(spec.template),
            "stream": mx.gpu,
        }

    def __call__(self, inputs: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The outputs by name; `inputs` may hold more than the spec takes."""
        outputs = self._kernel(inputs=[inputs[name] for name in self.spec.inputs], **self._fixed)
        return dict(zip(self._names, outputs, strict=True))


@cache
def _kernel(
    backend: str,
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    header: str,
    shared_memory: int,
) -> Any:
    if backend == "metal":
        return mx.fast.metal_kernel(name, inputs, outputs, source, header)
    return mx.fast.cuda_kernel(name, inputs, outputs, source, header, shared_memory=shared_memory)
