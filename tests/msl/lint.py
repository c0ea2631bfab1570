"""What a C++ compiler accepts and Metal, or an Apple GPU, does not; and what must not be assumed in silence.

`lint(spec)` returns complaints about one launch: its text, and the sizes that its template values lead to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import mlx.core as mx

from pagefork.kernels.spec import KernelSpec

from .translate import strip_comments

THREADGROUP_BYTES = 32 * 1024
MAX_THREADS = 1024
SIMD_WIDTH = 32
REASON_WITHIN = 12  # lines above

FORBIDDEN = {
    r"\bdouble\b": "Metal has no double",
    r"\blong\s+long\b": "Metal has no long long",
    r"\bstd::": "Metal has no std",
    r"(?<![\w.])\d+\.\d*(?:e[+-]?\d+)?(?![\w.])": "a floating literal without f is a double",
    r"\bgoto\b": "no goto",
    r"\b(?:try|throw|catch|new|delete|virtual|dynamic_cast|typeid|asm|printf|thread_local)\b": "not in Metal",
    r"\bif\s+constexpr\b": "older Metal compilers warn of C++17",
    r"\bauto\s*\[": "no structured bindings",
    r"\[[&=]?\]\s*\(": "no lambdas",
    r"\(\s*\*\s*\w+\s*\)\s*\(": "no function pointers",
    r"^\s*#\s*include": "no headers beside MLX's",
    r"\batomic_": "no atomics: nothing here may depend on the order of threadgroups",
    r"\b(?:reinterpret|static|const)_cast\b": "casts are written (T)x, which the harness can translate",
}

SPACE = r"(?:device|constant|thread|threadgroup)"
TYPE = r"[A-Za-z_]\w*(?:<[^<>;]*>)?"
VECTOR_CAST = r"\((?:const\s+)?(?:device|threadgroup)\s+(?:vec<[^<>]*>|\w+[234])\s*\*\)"


def lint(spec: KernelSpec) -> list[str]:
    """Complaints, empty for a good launch."""
    complaints = [*_sizes(spec)]
    for part, text in (("header", spec.header), ("source", spec.source)):
        complaints += [f"{part}: {complaint}" for complaint in lint_text(text)]
    if re.search(rf"\bthreadgroup\s+{TYPE}\s+\w+\s*\[", strip_comments(spec.header)):
        complaints.append("header: threadgroup memory belongs in the kernel's own body")
    return complaints


def lint_text(text: str) -> list[str]:
    """Complaints about Metal text alone."""
    code = strip_comments(text)
    complaints = [
        f"line {_line(code, match.start())}: {reason}: {match[0].strip()}"
        for pattern, reason in FORBIDDEN.items()
        for match in re.finditer(pattern, code, re.MULTILINE)
    ]
    return [*complaints, *_pointers(code), *_recursion(code), *_reasons(text, code)]


def threadgroup_bytes(spec: KernelSpec) -> int:
    """Threadgroup memory of a launch, from the declarations in its body and its template values."""
    values = {name: value for name, value in spec.template if not isinstance(value, mx.Dtype)}
    kinds = {name: value.size for name, value in spec.template if isinstance(value, mx.Dtype)}
    kinds["float"] = 4
    code = strip_comments(spec.source)
    for name, expression in re.findall(r"^constexpr int (\w+) = ([^;]+);", code, re.MULTILINE):
        values[name] = _evaluate(expression, values)
    total = 0
    for kind, expression in re.findall(rf"\bthreadgroup\s+({TYPE})\s+\w+\[([^\]]+)\];", code):
        vector = re.fullmatch(r"vec<(\w+), 4>", kind)
        size = 4 * kinds[vector[1]] if vector else 16 if kind == "float4" else kinds[kind]
        total += -(-size * _evaluate(expression, values) // 16) * 16
    return total


def _sizes(spec: KernelSpec) -> Iterator[str]:
    x, y, z = spec.threadgroup
    if x * y * z > MAX_THREADS:
        yield f"{x * y * z} threads in a threadgroup"
    if x % SIMD_WIDTH or spec.grid[0] % x:
        yield "a threadgroup's rows are not whole SIMD groups"
    if threadgroup_bytes(spec) > THREADGROUP_BYTES:
        yield f"{threadgroup_bytes(spec)} bytes of threadgroup memory"


def _evaluate(expression: str, values: dict[str, int]) -> int:
    if not re.fullmatch(r"[\w\s+*/()-]+", expression):
        raise ValueError(f"not a plain size: {expression}")
    return int(eval(expression.replace("/", "//"), {"__builtins__": {}}, dict(values)))


def _pointers(code: str) -> Iterator[str]:
    """Pointers are written `T* name`, products `a * b`: what looks like a pointer must name its address space."""
    known = rf"(?:\b{SPACE}\s+(?:const\s+)?{TYPE}|\b{SPACE}\s+const\s+{TYPE})"
    for match in re.finditer(r"[\w>]\s?[*&](?=[\s),\w])", code):
        if re.match(r"[\w>] [*&]\s", code[match.start() : match.end() + 1]):
            continue  # a product or a bitwise and, with its blanks
        before = code[: match.start() + 1]
        if not re.search(rf"{known}$", before):
            yield f"line {_line(code, match.start())}: a pointer or reference without an address space"


def _recursion(code: str) -> Iterator[str]:
    """Calls of a function by itself; `Fold<...>::run` calls another type's function of the same name."""
    for match in re.finditer(r"\b(\w+)\([^;{}]*\)\s*(?:const\s*)?\{", code):
        if match[1] in ("if", "for", "while", "switch"):
            continue
        body = _braces(code, match.end() - 1)
        if re.search(rf"(?<!::)\b{match[1]}\(", body):
            yield f"line {_line(code, match.start())}: {match[1]} calls itself"


def _reasons(text: str, code: str) -> Iterator[str]:
    """A vector access assumes alignment, a padded array assumes banks: a comment above must say why that may be."""
    lines = text.split("\n")
    for pattern, word in ((VECTOR_CAST, "alignment"), (rf"\bthreadgroup\s+{TYPE}\s+\w+\[[^\]]*\+\s*\d", "banks")):
        for match in re.finditer(pattern, code):
            line = _line(code, match.start())
            above = "\n".join(lines[max(0, line - 1 - REASON_WITHIN) : line])
            comments = " ".join(re.findall(r"//(.*)", above))
            if word[:4] not in comments:
                yield f"line {line}: no comment above says what {match[0]} assumes of {word}, and why"


def _braces(code: str, start: int) -> str:
    depth = 0
    for end in range(start, len(code)):
        depth += {"{": 1, "}": -1}.get(code[end], 0)
        if depth == 0:
            return code[start:end]
    return code[start:]


def _line(code: str, at: int) -> int:
    return code.count("\n", 0, at) + 1
