"""Compiles the Metal text of a `KernelSpec` as C++ and runs it on the CPU, watching every access.

`run` raises `KernelFault` for what a GPU would do silently: an access out of bounds or misaligned, a read of what is
not set (or of what the caller declares not the kernel's to read), a collective or barrier that not all come to, a
data race, an output left unwritten. docs/metal.md says what it cannot show.

bfloat16 arrays are uint16 arrays of its bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork.kernels.spec import KernelSpec

from .translate import Parameter, cpp_text, shape_names

Array = npt.NDArray[np.generic]

HERE = Path(__file__).parent
FLAGS = [
    "-std=c++20",
    "-O1",
    "-shared",
    "-fPIC",
    "-w",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=bounds",
    "-fno-sanitize-recover=bounds",
    # Names of the runtime are found when the library is loaded, its handler of bad indices among them.
    *(["-undefined", "dynamic_lookup", "-fno-sanitize-link-runtime"] if sys.platform == "darwin" else []),
]
BUDGET = 200_000_000

NUMPY = {
    mx.float32: np.dtype(np.float32),
    mx.float16: np.dtype(np.float16),
    mx.bfloat16: np.dtype(np.uint16),
    mx.int32: np.dtype(np.int32),
    mx.uint32: np.dtype(np.uint32),
}
MLX = {kind: dtype for dtype, kind in NUMPY.items()}


class KernelFault(Exception):
    """What a kernel did wrong."""


class CompilerMissing(Exception):
    """No C++ compiler: the tests of the Metal kernels need one."""


@dataclass(frozen=True)
class Result:
    """What a launch left: its outputs, which bytes of them it wrote, and the bytes loaded from each array."""

    outputs: dict[str, Array]
    written: dict[str, npt.NDArray[np.bool_]]
    loaded: dict[str, int]


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("valid", ctypes.c_void_p),
        ("loaded", ctypes.c_uint64),
        ("writers", ctypes.c_void_p),
        ("readers", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.POINTER(_Buffer)),
        ("count", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("seed", ctypes.c_uint64),
        ("budget", ctypes.c_uint64),
        ("report", ctypes.c_char_p),
        ("report_size", ctypes.c_uint64),
    )


def run(
    spec: KernelSpec,
    inputs: Mapping[str, Array],
    *,
    seed: int = 0,
    readable: Mapping[str, npt.NDArray[np.bool_]] | None = None,
    partly_written: Collection[str] = (),
) -> Result:
    """Run `spec` on `inputs`; a kernel that casts const away writes into the arrays themselves.

    `readable`: masks of the shape of an input, of what the kernel may read of it (all, where there is none).
    `partly_written`: outputs of which a part may stay unwritten.

    :raises KernelFault: for anything that the kernel does wrong.
    """
    readable = readable or {}
    parameters = {name: Parameter(name, MLX[inputs[name].dtype], inputs[name].shape) for name in spec.inputs}
    library = _library(cpp_text(spec, parameters))
    arrays: list[tuple[str, Array, Array]] = []
    for name in spec.inputs:
        array = inputs[name]
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous")
        arrays.append((name, array, _bytes(readable.get(name, np.True_), array)))
        for extra in shape_names(spec, name):
            arrays.append((extra, *_always_readable(_extra(extra, array))))
    outputs = {o.name: np.full(o.shape, 0x5A, NUMPY[o.dtype]) for o in spec.outputs}
    valid = {name: np.zeros(array.nbytes, np.uint8) for name, array in outputs.items()}
    arrays.extend((name, array, valid[name]) for name, array in outputs.items())
    loaded = _launch(library, spec, arrays, seed)
    for name, mask in valid.items():
        missing = int((mask == 0).sum())
        if missing and name not in partly_written:
            raise KernelFault(f"{missing} of {mask.size} bytes of output {name} are not written")
    written = {name: valid[name].reshape(*array.shape, array.itemsize).all(axis=-1) for name, array in outputs.items()}
    return Result(outputs, written, loaded)


def _launch(
    library: ctypes.CDLL, spec: KernelSpec, arrays: list[tuple[str, Array, Array]], seed: int
) -> dict[str, int]:
    cells = [np.zeros((2, (array.nbytes + 1) // 2), np.uint32) for _, array, _ in arrays]
    buffers = (_Buffer * len(arrays))(
        *(
            _Buffer(
                name.encode(),
                array.ctypes.data,
                array.nbytes,
                valid.ctypes.data,
                0,
                cell[0].ctypes.data,
                cell[1].ctypes.data,
            )
            for (name, array, valid), cell in zip(arrays, cells, strict=True)
        )
    )
    report = ctypes.create_string_buffer(512)
    launch = _Launch(
        buffers,
        len(arrays),
        (ctypes.c_uint32 * 3)(*spec.grid),
        (ctypes.c_uint32 * 3)(*spec.threadgroup),
        seed,
        BUDGET,
        ctypes.cast(report, ctypes.c_char_p),
        len(report),
    )
    if library.msl_run(ctypes.byref(launch)):
        raise KernelFault(f"{spec.name}: {report.value.decode()}")
    return {name: int(buffers[i].loaded) for i, (name, _, _) in enumerate(arrays)}


def _bytes(mask: npt.NDArray[np.bool_] | np.bool_, array: Array) -> Array:
    whole = np.broadcast_to(mask, array.shape)
    return np.repeat(whole.reshape(-1).astype(np.uint8), array.itemsize)


def _always_readable(array: Array) -> tuple[Array, Array]:
    return array, _bytes(np.True_, array)


def _extra(name: str, array: Array) -> Array:
    if name.endswith("_shape"):
        return np.array(array.shape, np.int32)
    if name.endswith("_strides"):
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    return np.array([array.ndim], np.int32)


@cache
def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise CompilerMissing("the tests of the Metal kernels need a C++20 compiler: install g++ (or set CXX)")


@cache
def _build_folder() -> Path:
    """A folder that outlives the process, so that a second run compiles only what has changed."""
    folder = Path(tempfile.gettempdir()) / f"pagefork-msl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _compile(source: Path, target: Path, *flags: str) -> None:
    """Compile beside `target` and move the result there, so that concurrent runs never see half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [_compiler(), *FLAGS, f"-I{HERE}", *flags, str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelFault(f"does not compile:\n{done.stderr[:4000]}")
        made.replace(target)


@cache
def _stamp() -> str:
    """What every object depends on beside its own text."""
    files = b"".join((HERE / name).read_bytes() for name in ("runtime.h", "runtime.cpp", "metal_shim.h"))
    return hashlib.sha256(files + repr((_compiler(), FLAGS)).encode()).hexdigest()[:24]


@cache
def _runtime() -> ctypes.CDLL:
    """The scheduler, whose names the kernels' libraries find when they are loaded."""
    target = _build_folder() / f"runtime-{_stamp()}.so"
    if not target.exists():
        _compile(HERE / "runtime.cpp", target, "-O2", "-fno-sanitize=bounds")
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


@cache
def _library(text: str) -> ctypes.CDLL:
    _runtime()
    digest = hashlib.sha256((_stamp() + text).encode()).hexdigest()[:24]
    target = _build_folder() / f"{digest}.so"
    if not target.exists():
        source = target.with_suffix(".cpp")
        source.write_text(text, encoding="utf-8")
        _compile(source, target)
    return ctypes.CDLL(str(target))
