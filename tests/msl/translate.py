"""From a `KernelSpec` to the Metal text that MLX would compile, and from there to C++ for `metal_shim.h`.

The signature follows MLX's rules for `mx.fast.metal_kernel`: an input of fewer than 8 elements lives in the constant
address space, one without dimensions is a reference; `<input>_shape`, `_strides` and `_ndim` and the thread attributes
become parameters where the body names them; the template parameters are those of a template around the kernel.

The C++ differs from the Metal text by what these substitutions do, and by nothing else:

- attributes `[[...]]` go
- `const device T*` becomes `msl::Ptr<const T, msl::Device>`, likewise for the other address spaces
- `const constant T&` becomes `const T&`
- `threadgroup T name[N];` becomes `msl::Shared<T, ID> name("name", N);`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from pagefork.kernels.spec import KernelSpec

CONSTANT_BELOW = 8

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}

ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": ("uint", "at.simd"),
    "simdgroups_per_threadgroup": ("uint", "at.simds"),
    "thread_index_in_simdgroup": ("uint", "at.lane"),
    "thread_index_in_threadgroup": ("uint", "at.index"),
    "thread_position_in_grid": ("uint3", "triple(at.in_grid)"),
    "thread_position_in_threadgroup": ("uint3", "triple(at.in_group)"),
    "threadgroup_position_in_grid": ("uint3", "triple(at.group)"),
    "threadgroups_per_grid": ("uint3", "triple(at.groups)"),
    "threads_per_grid": ("uint3", "triple(at.grid_size)"),
    "threads_per_threadgroup": ("uint3", "triple(at.group_size)"),
}

SPACES = {"device": "Device", "constant": "Constant", "threadgroup": "Threadgroup"}


@dataclass(frozen=True)
class Parameter:
    """One array as the signature sees it."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        product = 1
        for extent in self.shape:
            product *= extent
        return product


def metal_text(spec: KernelSpec, inputs: Mapping[str, Parameter]) -> str:
    """The header and the kernel function as Metal; `#line` tells where a line comes from."""
    template = ", ".join(f"{_template_type(value)} {name}" for name, value in spec.template)
    parameters = [declaration for declaration, _ in _parameters(spec, inputs)]
    return (
        f'#line 1 "header"\n{spec.header}\n#line 1 "signature"\n'
        + (f"template <{template}>\n" if template else "")
        + f"[[kernel]] void pagefork_kernel(\n  {(', ' + chr(10) + '  ').join(parameters)}) {{\n"
        + f'#line 1 "body"\n{spec.source}\n}}\n'
    )


def cpp_text(spec: KernelSpec, inputs: Mapping[str, Parameter]) -> str:
    """A translation unit whose `msl_run(Launch*)` runs the kernel; its buffers are in the order of the signature."""
    values = ", ".join(_template_value(value) for _, value in spec.template)
    arguments = ",\n    ".join(argument for _, argument in _parameters(spec, inputs))
    return f"""#include "metal_shim.h"
namespace text {{
using namespace metal;
{translate(metal_text(spec, inputs))}
#line 1 "launch"
static void enter(msl::Launch* launch) {{
  const msl::Thread& at = msl::self();
  (void)at;
  pagefork_kernel{f"<{values}>" if values else ""}(
    {arguments});
}}
}}  // namespace text
extern "C" int msl_run(msl::Launch* launch) {{ return msl::run(launch, text::enter); }}
"""


def shape_names(spec: KernelSpec, name: str) -> list[str]:
    """The extra arrays that MLX passes after the input `name`, since the body names them."""
    return [f"{name}_{what}" for what in ("shape", "strides", "ndim") if f"{name}_{what}" in spec.source]


def translate(text: str) -> str:
    """The substitutions above.

    :raises ValueError: if an address space is left over, so written in a way that they do not know.
    """
    kind = r"([A-Za-z_]\w*(?:<[^<>;]*>)?)"
    text = strip_comments(text)
    text = re.sub(r"\[\[.*?\]\]", "", text)
    text = re.sub(
        rf"(const\s+)?\b(device|constant|threadgroup)\s+{kind}\s*\*",
        lambda m: f"msl::Ptr<{m[1] or ''}{m[3]}, msl::{SPACES[m[2]]}>",
        text,
    )
    text = re.sub(rf"\bconst\s+constant\s+{kind}\s*&", r"const \1&", text)
    ids = iter(range(64))
    text = re.sub(
        rf"\bthreadgroup\s+{kind}\s+(\w+)\[([^\]]+)\];",
        lambda m: f'msl::Shared<{m[1]}, {next(ids)}> {m[2]}("{m[2]}", {m[3]});',
        text,
    )
    left = re.search(r"^.*\b(device|threadgroup)\b.*$", text, re.MULTILINE)
    if left:
        raise ValueError(f"an address space that the translation does not know: {left[0].strip()}")
    return text


def strip_comments(text: str) -> str:
    """`text` without comments, its line numbers kept."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def _parameters(spec: KernelSpec, inputs: Mapping[str, Parameter]) -> list[tuple[str, str]]:
    """Declaration in Metal and argument in C++ of each parameter."""
    found: list[tuple[str, str]] = []

    def add(declaration: str, argument: str) -> None:
        found.append((f"{declaration} [[buffer({len(found)})]]", argument.replace("BUFFER", str(len(found)))))

    for name in spec.inputs:
        array = inputs[name]
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        kind = TYPES[array.dtype]
        pointer = f"msl::Ptr<const metal::{kind}, msl::{SPACES[space]}>(&launch->buffers[BUFFER])"
        pointer = pointer.replace("metal::float,", "float,").replace("metal::int", "int").replace("metal::uint", "uint")
        if array.shape:
            add(f"const {space} {kind}* {name}", pointer)
        else:
            add(f"const {space} {kind}& {name}", f"{pointer}[0]")
        for extra in shape_names(spec, name):
            base = "int64_t" if extra.endswith("strides") else "int"
            add(f"const constant {base}* {extra}", f"msl::Ptr<const {base}, msl::Constant>(&launch->buffers[BUFFER])")
    for output in spec.outputs:
        kind = TYPES[output.dtype]
        cpp = kind if kind == "float" else f"metal::{kind}"
        add(f"device {kind}* {output.name}", f"msl::Ptr<{cpp}, msl::Device>(&launch->buffers[BUFFER])")
    for attribute, (kind, value) in ATTRIBUTES.items():
        if attribute in spec.source:
            found.append((f"{kind} {attribute} [[{attribute}]]", value))
    return found


def _template_type(value: mx.Dtype | int | bool) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _template_value(value: mx.Dtype | int | bool) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))
