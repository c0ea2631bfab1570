"""What the harness compiles is what MLX compiles: the text is compared with the one that MLX itself writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from pagefork.kernels import metal
from pagefork.kernels.spec import Attention, KernelSpec, Rotation

from .translate import Parameter, metal_text, translate

NARROW = Attention(mx.bfloat16, 8, 2, 64, 16, sinks=True)
WIDE = Attention(mx.float16, 32, 2, 128, 16, window=True, softcap=True)


def parameters(spec: KernelSpec, rows: int) -> dict[str, Parameter]:
    """Arrays of the shapes that a launch gets; few rows make some of them constants."""
    dtype = dict(spec.template)["T"]
    assert isinstance(dtype, mx.Dtype)
    known = {
        "tables": (mx.int32, (rows, 40)),
        "lengths": (mx.int32, (rows,)),
        "slots": (mx.int32, (rows,)),
        "positions": (mx.int32, (rows,)),
        "freqs": (mx.float32, (8,)),
        "copies": (mx.int32, (rows, 3)),
        "params": (mx.float32, (4,)),
        "partial": (mx.float32, (rows, 8, 5, 68)),
        "sinks": (dtype, (8,)),
    }
    return {name: Parameter(name, *known.get(name, (dtype, (rows, 4, 64)))) for name in spec.inputs}


def specs(rows: int) -> list[KernelSpec]:
    return [
        metal.write_kv_spec(mx.float32, 2, 64, 16, rows=rows, copies=rows),
        metal.rope_and_write_spec(Rotation(mx.float16, 4, 2, 64, 16, 64), rows=rows),
        metal.rope_and_write_spec(Rotation(mx.bfloat16, 4, 2, 64, 16, 16, freqs=True), rows=rows),
        *metal.decode_specs(NARROW, rows=rows, max_blocks=40, max_length=600, cores=8),
        *metal.decode_specs(NARROW, rows=rows, max_blocks=40, max_length=90, cores=8),
        *metal.decode_specs(WIDE, rows=rows, max_blocks=40, max_length=600, cores=8),
    ]


def mlx_text(spec: KernelSpec, inputs: dict[str, Parameter], folder: Path, output: Callable[[], str]) -> str:
    """What MLX writes, on any platform: `verbose` prints it, and a graph for export is traced without a device."""

    def trace(*arrays: mx.array) -> mx.array:
        kernel = mx.fast.metal_kernel(
            name=spec.name,
            input_names=list(spec.inputs),
            output_names=[made.name for made in spec.outputs],
            source=spec.source,
            header=spec.header,
        )
        outputs: list[mx.array] = kernel(
            inputs=list(arrays),
            template=list(spec.template),
            grid=spec.grid,
            threadgroup=spec.threadgroup,
            output_shapes=[made.shape for made in spec.outputs],
            output_dtypes=[made.dtype for made in spec.outputs],
            verbose=True,
        )
        return outputs[0]

    output()
    arrays = [mx.zeros(inputs[name].shape, dtype=inputs[name].dtype) for name in spec.inputs]
    mx.export_function(str(folder / "trace.mlxfn"), trace, *arrays)
    return output().split("```")[1]


def lines(text: str) -> list[str]:
    """Without what differs by intent: our `#line`s, the function's name, MLX's instantiation of the template."""
    text = re.sub(r"^template \[\[host_name.*$|^#line.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[\[kernel\]\] void \w+\(", "[[kernel]] void name(", text)
    return [line.strip() for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("index", range(len(specs(2))))
def test_the_text_is_the_one_that_mlx_writes(
    index: int, rows: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = specs(rows)[index]
    inputs = parameters(spec, rows)
    written = mlx_text(spec, inputs, tmp_path, lambda: capfd.readouterr().out)
    assert "[[kernel]] void custom_kernel_" + spec.name in written
    assert lines(metal_text(spec, inputs)) == lines(written)


def test_the_translation_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="address space"):
        translate("device float x;")
