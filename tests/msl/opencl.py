"""The Metal text as OpenCL C++, whose compiler checks what Metal's does and plain C++ does not know: address spaces.

Both languages are Clang's; a pointer belongs to one of the same four address spaces. What differs is spelled by macros
and declarations, and constructors of vectors become calls.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import mlx.core as mx

from pagefork.kernels.spec import KernelSpec

from .translate import TYPES, Parameter, metal_text, strip_comments

NAMES = ("clang", *(f"clang-{version}" for version in range(22, 13, -1)))

PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned short ushort;
typedef int int32_t;
typedef long int64_t;
typedef half float16_t;
typedef half bfloat16_t;
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
template <typename T>
struct Vector {
  static vec<T, 4> of(T all) { return (vec<T, 4>)(all); }
  static vec<T, 4> of(T x, T y, T z, T w) { return (vec<T, 4>)(x, y, z, w); }
  template <typename U>
  static vec<T, 4> of(vec<U, 4> from) { return __builtin_convertvector(from, vec<T, 4>); }
};
int min(int, int);
int max(int, int);
float max(float, float);
int clamp(int, int, int);
float dot(float4, float4);
float4 fma(float4, float4, float4);
namespace fast { float exp2(float); }
namespace precise { float tanh(float); float exp2(float); float cos(float); float sin(float); }
template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_shuffle_xor(T, ushort);
float simd_max(float);
float simd_sum(float);
enum class mem_flags { mem_threadgroup };
void threadgroup_barrier(mem_flags);
"""


def opencl_text(spec: KernelSpec, inputs: Mapping[str, Parameter]) -> str:
    """The kernel with its template values as constants, since OpenCL knows no kernel templates."""
    text = strip_comments(metal_text(spec, inputs))
    start = text.index("template <", text.index('#line 1 "signature"'))
    header, kernel = text[:start], text[start:].split("\n", 1)[1]
    values = "".join(
        f"typedef {TYPES[value]} {name};\n" if isinstance(value, mx.Dtype) else f"enum {{ {name} = {int(value)} }};\n"
        for name, value in spec.template
    )
    kernel = re.sub(r"\[\[.*?\]\]", "", kernel.replace("[[kernel]] void", "__kernel void"))
    code = re.sub(r"\bfloat4\(", "Vector<float>::of(", header + values + kernel)
    return PRELUDE + re.sub(r"(?<!\()\bvec<(\w), 4>\(", r"Vector<\1>::of(", code)


@cache
def compiler() -> str | None:
    """A clang that knows OpenCL C++, if there is one."""
    for name in NAMES:
        if shutil.which(name) and _run(name, "", "-fsyntax-only").returncode == 0:
            return name
    return None


def complaints(text: str) -> str:
    """The compiler's errors."""
    return _run(compiler() or "", text, "-fsyntax-only").stderr


def intermediate_code(text: str) -> str:
    """LLVM's code, optimised, every function inlined as on a GPU."""
    return _run(compiler() or "", text, "-O2", "-mllvm", "-inline-threshold=1000000", "-S", "-emit-llvm").stdout


def _run(name: str, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [name, "-x", "cl", "-cl-std=clc++2021", "-target", "spir64", "-w", *flags, "-o", "-", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
