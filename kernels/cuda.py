"""CUDA launches, built as data from shapes and dtypes, without a GPU.

`kernels/metal.py` has the same functions, but for `linear_spec` and `land_spec`. Inputs are found by name;
`dispatch` supplies

- `k_pool`, `v_pool`, `k`, `v`, `slots`, `qkv`, `positions`, `q`, `tables`, `lengths`, `sinks`: as in `reference`
- `copies`: int32 `[n, 3]`; `[1, 3]` of zeros where a step copies nothing (then `copies=0` below)
- `params`: float32 `[4]`: scale, softcap (0 without), window (0 without), 0; for a rotation scale, log2 of base, 0, 0
- `freqs`: of a `Rope`
- `x`, `weights`, `gain`, `bias`, `add`: as in `reference.linear`; then `params[0]` is its `eps`
- `target`, `array0`, `array1`, ...: of `land`
- `order`: any array of the pools' dtype with at least 8 elements; only its place in the graph counts
- what an earlier spec of the same tuple put out
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path

import mlx.core as mx

from pagefork.kernels.spec import Attention, KernelSpec, Linear, Output, Rotation

SHARED_MEMORY = 227 * 1024
"""What one block may take of a multiprocessor of compute capability 9.0."""

Template = tuple[tuple[str, mx.Dtype | int | bool], ...]

_RESERVED = 1024  # shared memory that the system keeps for each block
_IN_FLIGHT = 144 * 1024  # bytes a multiprocessor asks for ahead: more gains nothing
_MERGE_THREADS = 128
_WRITE_THREADS = 128
_ROTATE_THREADS = 128
_LINEAR_ROWS = 4
_LINEAR_WARPS = 8
_LINEAR_STAGES = 3
_LINEAR_HELD = 4  # vectors of 8 inputs of each row that a thread has registers for
_LINEAR_STAGE_BYTES = 16 * 128 * 2  # a chunk of a tile, as linear.cu has them


def write_kv_spec(
    dtype: mx.Dtype, kv_heads: int, head_dim: int, block_size: int, *, rows: int, copies: int = 0
) -> KernelSpec:
    """One launch that writes `rows` rows of K and V and performs `copies` block copies in place.

    Inputs `k_pool, v_pool, k, v, slots, copies, order`; output `written` `[8]` of `dtype`, zeros: the next `order`.
    """
    _check(dtype, head_dim, block_size)
    return _spec(
        "write_kv",
        ("schedule", "write_kv"),
        "pagefork::write_kv<T, ROW, BLOCK>(k_pool, v_pool, k, v, slots, copies, slots_shape[0], written);",
        ("k_pool", "v_pool", "k", "v", "slots", "copies", "order"),
        (Output("written", (8,), dtype),),
        (("T", dtype), ("ROW", kv_heads * head_dim), ("BLOCK", block_size)),
        blocks=rows + copies * block_size,
        threads=_WRITE_THREADS,
    )


def rope_and_write_spec(rotation: Rotation, *, rows: int) -> KernelSpec:
    """One launch that rotates the queries and keys of `rows` rows and writes their keys and values in place.

    Inputs `k_pool, v_pool, qkv, slots, positions, params, order`, and `freqs` where `rotation.freqs`; output `q`
    `[rows, heads, head_dim]`, also the next `order`.
    """
    _check(rotation.dtype, rotation.head_dim, rotation.block_size)
    vector = math.gcd(rotation.dims // 2, 16 // rotation.dtype.size)  # values that a thread loads at once
    units = (rotation.heads + 2 * rotation.kv_heads) * rotation.head_dim // (2 * vector)
    return _spec(
        "rope_and_write",
        ("rope_and_write",),
        "using Step = pagefork::Rotation<T, HEADS, KV_HEADS, D, DIMS, VECTOR, TRADITIONAL>;\n"
        "Step step{k_pool, v_pool, qkv, slots, positions};\n"
        f"step.run(params, {'freqs' if rotation.freqs else 'nullptr'}, q);",
        ("k_pool", "v_pool", "qkv", "slots", "positions", "params", *(("freqs",) if rotation.freqs else ()), "order"),
        (Output("q", (rows, rotation.heads, rotation.head_dim), rotation.dtype),),
        (
            ("T", rotation.dtype),
            ("HEADS", rotation.heads),
            ("KV_HEADS", rotation.kv_heads),
            ("D", rotation.head_dim),
            ("DIMS", rotation.dims),
            ("VECTOR", vector),
            ("TRADITIONAL", rotation.traditional),
        ),
        blocks=rows * -(-units // _ROTATE_THREADS),
        threads=_ROTATE_THREADS,
    )


def decode_specs(
    case: Attention,
    *,
    rows: int,
    max_blocks: int,
    max_length: int,
    cores: int,
    shared_memory: int = SHARED_MEMORY,
) -> tuple[KernelSpec, ...]:
    """The launches of one decode attention, in order; the last one puts out `out` `[rows, heads, head_dim]`.

    `max_blocks`: the tables' width. `max_length`: an upper bound of the lengths. `cores`: multiprocessors of the
    device. `shared_memory`: bytes that a block may take. `sinks` is an input where `case.sinks`; `order` is an input
    of the first launch. The work is dealt out on the device by the lengths themselves, so `max_blocks` and
    `max_length` change nothing here.
    """
    _check(case.dtype, case.head_dim, case.block_size)
    parts = _parts(case)
    segments, group = case.kv_heads * parts, case.heads // case.kv_heads // parts
    per_core, warps, stages, shared = _shape(case, group, shared_memory)
    together = _together(segments, cores * per_core)
    teams = cores * per_core // together
    partials = ((rows * segments // together + teams) * together, group)
    warp = "FmaWarp" if case.dtype == mx.float32 else "MmaWarp"
    attend = _spec(
        "decode",
        ("schedule", "tile", *(("fma",) if case.dtype == mx.float32 else ("pair", "mma")), "decode"),
        f"using Warp = pagefork::{warp}<T, D, GROUP, SOFTCAP>;\n"
        "pagefork::Decode<Warp, T, D, BLOCK, KV_HEADS, GROUP, PARTS, TOGETHER, WARPS, STAGES, SOFTCAP> step"
        "{k_pool, v_pool, tables, tables_shape[1]};\n"
        "step.run(q, lengths, params, q_shape[0], partial, partial_sums, WINDOW);",
        ("q", "k_pool", "v_pool", "tables", "lengths", "params", "order"),
        (
            Output("partial", (*partials, case.head_dim), mx.float32),
            Output("partial_sums", (*partials, 2), mx.float32),
        ),
        (
            ("T", case.dtype),
            ("D", case.head_dim),
            ("BLOCK", case.block_size),
            ("KV_HEADS", case.kv_heads),
            ("GROUP", group),
            ("PARTS", parts),
            ("TOGETHER", together),
            ("WARPS", warps),
            ("STAGES", stages),
            ("WINDOW", case.window),
            ("SOFTCAP", case.softcap),
        ),
        blocks=teams * together,
        threads=warps * 32,
        shared_memory=shared,
    )
    merge = _spec(
        "merge",
        ("schedule", "tile", "merge"),
        "pagefork::Merge<T, D, SEGMENTS, GROUP, TOGETHER, LEAST, SINKS> step{partial, partial_sums};\n"
        f"step.run(lengths, params, {'sinks' if case.sinks else 'nullptr'}, lengths_shape[0], TEAMS, WINDOW, out);",
        ("partial", "partial_sums", "lengths", "params", *(("sinks",) if case.sinks else ())),
        (Output("out", (rows, case.heads, case.head_dim), case.dtype),),
        (
            ("T", case.dtype),
            ("D", case.head_dim),
            ("SEGMENTS", segments),
            ("GROUP", group),
            ("TOGETHER", together),
            ("LEAST", warps),
            ("TEAMS", teams),
            ("WINDOW", case.window),
            ("SINKS", case.sinks),
        ),
        blocks=_merge_blocks(rows * case.heads, cores),
        threads=_MERGE_THREADS,
    )
    return attend, merge


def linear_spec(
    case: Linear, *, rows: int, inputs: int, outputs: int, cores: int, shared_memory: int = SHARED_MEMORY
) -> KernelSpec:
    """One launch that multiplies `rows` rows of `inputs` values by weights `[outputs, inputs]`, see `linear`.

    Inputs `x, weights, params`, and `gain`, `bias`, `add` where the case has them; output `y`.

    :raises ValueError: for more rows than it is worth, and for sizes that do not fit tiles or shared memory.
    """
    if case.dtype not in (mx.float16, mx.bfloat16):
        raise ValueError(f"this product takes float16 and bfloat16, not {case.dtype}")
    if inputs % 8 or outputs % 16 or not 1 <= rows <= _LINEAR_ROWS:
        raise ValueError(f"this product takes up to {_LINEAR_ROWS} rows, inputs by 8 and outputs by 16")
    if case.norm not in (0, inputs):
        raise ValueError(f"this product norms {case.norm} inputs, not {inputs}")
    held = -(-case.norm // (_LINEAR_WARPS * 32 * 8))
    if held > _LINEAR_HELD:
        raise ValueError(f"this product norms up to {_LINEAR_HELD * _LINEAR_WARPS * 32 * 8} inputs, not {inputs}")
    static = _LINEAR_WARPS * _LINEAR_ROWS * (2 * 17 + 1) * 4
    dynamic = shared_memory - static
    if _LINEAR_WARPS * _LINEAR_STAGES * _LINEAR_STAGE_BYTES + rows * (inputs + 32) * 2 > dynamic:
        raise ValueError(f"{rows} rows of {inputs} values do not fit shared memory")
    optional = tuple(name for name, on in (("gain", case.norm), ("bias", case.bias), ("add", case.add)) if on)
    gain, bias, add = (name if name in optional else "nullptr" for name in ("gain", "bias", "add"))
    return _spec(
        "linear",
        ("schedule", "tile", "pair", "linear"),
        "using Step = pagefork::Linear<T, ROWS, WARPS, STAGES, GLU, HELD>;\n"
        "__shared__ Step::Shared shared;\n"
        "extern __shared__ __align__(128) unsigned char stages[];\n"
        "int warp = threadIdx.x / 32, lane = threadIdx.x % 32;\n"
        f"Step step{{x, weights, {gain}, {bias}, {add}, y, x_shape[0], x_shape[1], weights_shape[0], shared, stages, "
        "warp, lane};\n"
        "step.run(params[0]);",
        ("x", "weights", "params", *optional),
        (Output("y", (rows, outputs // 2 if case.glu else outputs), case.dtype),),
        (
            ("T", case.dtype),
            ("ROWS", _LINEAR_ROWS),
            ("WARPS", _LINEAR_WARPS),
            ("STAGES", _LINEAR_STAGES),
            ("GLU", case.glu),
            ("HELD", held),
        ),
        blocks=min(cores, outputs // 16),
        threads=(_LINEAR_WARPS + 1) * 32,
        shared_memory=dynamic,
    )


def land_spec(dtypes: tuple[mx.Dtype, ...], *, count: int) -> KernelSpec:
    """One launch that copies arrays of 4-byte values, `count` in all, one behind the other into `target`, in place.

    Inputs `target` int32, and `array0`, `array1`, ..., each of one axis; output `landed` `[8]`, which is not written.
    """
    names = tuple(f"array{i}" for i in range(len(dtypes)))
    return _spec(
        "land",
        ("land",),
        "int* to = const_cast<int*>(target);\n"
        + "\n".join(f"to = pagefork::land({name}, {name}_shape[0], to);" for name in names),
        ("target", *names),
        (Output("landed", (8,), mx.int32),),
        tuple((f"T{i}", dtype) for i, dtype in enumerate(dtypes)),
        blocks=min(-(-count // _WRITE_THREADS), 64),
        threads=_WRITE_THREADS,
    )


def _check(dtype: mx.Dtype, head_dim: int, block_size: int) -> None:
    if dtype not in (mx.float16, mx.bfloat16, mx.float32):
        raise ValueError(f"the CUDA kernels take float16, bfloat16 and float32, not {dtype}")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"the CUDA kernels take head dims that are multiples of 16 up to 256, not {head_dim}")
    if block_size != 8 and (block_size % 16 or block_size < 1):
        raise ValueError(f"the CUDA kernels take blocks of 8 or of a multiple of 16 positions, not {block_size}")


def _parts(case: Attention) -> int:
    """Into how many parts a group of query heads must be cut so that a warp's state fits its registers."""
    group = case.heads // case.kv_heads
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and _values(case, group // parts) <= 128)


def _values(case: Attention, group: int) -> int:
    """Float32 sums that a lane holds."""
    if case.dtype == mx.float32:
        return group * -(-case.head_dim // 32)
    return -(-group // 8) * case.head_dim // 4


def _merge_blocks(heads: int, cores: int) -> int:
    """A block a head while that fills no more than half of the device, else a warp a head: the kernel tells by this."""
    return heads if heads <= 4 * cores else -(-heads // 4)


def _together(segments: int, blocks: int) -> int:
    """How many segments are read side by side: at most 8, and so many that nearly all blocks find a team."""
    fitting = (n for n in range(8, 1, -1) if segments % n == 0 and blocks % n <= blocks // 32)
    return next(fitting, 1)


def _shape(case: Attention, group: int, shared_memory: int) -> tuple[int, int, int, int]:
    """(blocks a multiprocessor, warps a block, stages a warp, bytes a block): the most that shared memory can feed."""
    row = case.head_dim * case.dtype.size
    tile = 16 * (row if row % 128 == 0 else row + 16)
    heads = group if case.dtype == mx.float32 else -(-group // 8) * 8
    for per_core, warps in ((2, 4), (1, 4), (1, 2), (1, 1)):
        limit = (shared_memory + _RESERVED) // per_core - _RESERVED
        fixed = warps * (_values(case, group) * 32 + heads * 2) * 4
        enough = max(2, _IN_FLIGHT // (per_core * warps * 2 * tile))
        stages = min(enough, (limit - fixed) // (warps * 2 * tile))
        if stages >= 2 or (warps == 1 and stages == 1):
            return per_core, warps, stages, fixed + warps * stages * 2 * tile
    raise ValueError(f"{shared_memory} bytes of shared memory are too few for {case}")


def _spec(
    kind: str,
    headers: tuple[str, ...],
    source: str,
    inputs: tuple[str, ...],
    outputs: tuple[Output, ...],
    template: Template,
    *,
    blocks: int,
    threads: int,
    shared_memory: int = 0,
) -> KernelSpec:
    header = "".join(_text(name) for name in headers)
    return KernelSpec(
        name=_name(kind, template, _digest(header, source)),
        source=source,
        header=header,
        inputs=inputs,
        outputs=outputs,
        template=template,
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        shared_memory=shared_memory,
    )


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / "cuda" / f"{name}.cu").read_text(encoding="utf-8")


@cache
def _digest(header: str, source: str) -> str:
    """MLX keeps compiled kernels on disk by name, so a name must change with the text too."""
    return hashlib.sha256((header + source).encode()).hexdigest()[:8]


def _name(kind: str, template: Template, digest: str) -> str:
    values = (f"{key.lower()}{_label(value)}" for key, value in template)
    return f"pagefork_{kind}_{'_'.join(values)}_{digest}"


def _label(value: mx.Dtype | int | bool) -> str:
    return str(value).rpartition(".")[2] if isinstance(value, mx.Dtype) else str(int(value))
