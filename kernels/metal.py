"""Metal launches of the paged-attention kernels, built as data from shapes and dtypes, without a GPU.

Inputs are found by name, as `kernels/cuda.py` lists them. How the kernels work: docs/metal.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from pagefork.kernels.spec import Attention, KernelSpec, Output, Rotation

SIMD_LANES = 32
MAX_SPLITS = 128

# MLX passes an input of fewer elements in the constant address space: another kernel text, so another name.
CONSTANT_BELOW = 8

# Floats of the queries that a lane may hold, and as many of the output. An Apple GPU has 128 registers a thread,
# and the keys in flight, the scores and the addresses need the other half.
QUERY_REGISTERS = 32
KEY_REGISTERS = 16

# A split shorter than this costs more in the merge than it gains; one longer leaves a lone long row unbalanced.
LEAST_KEYS = 128
MOST_KEYS = 2048

# Threadgroups that a core holds at once (their registers and threadgroup memory), times two waves.
GROUPS_PER_CORE = 6

# 12 SIMD groups are 384 threads, what a core holds at 128 registers a thread.
WIDE_SIMDGROUPS = 12
STAGE_BYTES = 16 * 1024

# By class of chip: phone, base and Pro, Max, Ultra.
_CORES = {"p": 6, "g": 14, "s": 36, "d": 72}
_DTYPES = {mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32"}


@dataclass(frozen=True)
class Tiling:
    """How a decode kernel spreads a KV head's query heads and keys over lanes and SIMD groups.

    A SIMD group serves `tile` query heads; `lanes` of its lanes take a key together, `keys` keys at a time each.
    With `wide`, the SIMD groups of a threadgroup serve different heads, `pieces` threadgroups the heads of one KV
    head, and `stage` keys at a time pass through threadgroup memory; without, all serve all heads.
    """

    lanes: int
    tile: int
    keys: int
    simdgroups: int
    wide: bool = False
    pieces: int = 1
    stage: int = 0

    @property
    def padded(self) -> int:
        """`tile`, rounded up to a power of two."""
        return 1 << (self.tile - 1).bit_length()


def tiling(case: Attention) -> Tiling:
    """The tiling of `case`: the fewest lanes per key (so the fewest shuffles) whose registers suffice."""
    group = case.heads // case.kv_heads
    for lanes in (8, 16, 32):
        if group * _lane_floats(case, lanes) <= QUERY_REGISTERS:
            return Tiling(lanes, group, _keys_at_once(case, lanes), simdgroups=4)
    lanes = 16 if case.head_dim <= 64 else 32
    tiles = -(-group * _lane_floats(case, lanes) // QUERY_REGISTERS)
    pieces = -(-tiles // WIDE_SIMDGROUPS)
    tile = -(-group // (pieces * max(-(-tiles // pieces), 4)))
    simdgroups = -(-group // (pieces * tile))
    most = STAGE_BYTES // (2 * case.head_dim * case.dtype.size)
    stage = min(case.block_size, 1 << (most.bit_length() - 1))
    return Tiling(lanes, tile, _keys_at_once(case, lanes), simdgroups, True, pieces, stage)


def splits(case: Attention, *, rows: int, max_length: int, cores: int) -> int:
    """Into how many splits a launch cuts each row, so that all cores have work; a row takes fewer if it is short."""
    wanted = -(-cores * GROUPS_PER_CORE // (rows * case.kv_heads * tiling(case).pieces))
    wanted = min(wanted, max_length // LEAST_KEYS)
    return max(1, min(max(wanted, -(-max_length // MOST_KEYS)), MAX_SPLITS))


def estimate_cores(architecture: str) -> int:
    """GPU cores of an architecture such as `applegpu_g15s`: its last letter tells the class of the chip."""
    return _CORES.get(architecture[-1:], 14)


def write_kv_spec(
    dtype: mx.Dtype, kv_heads: int, head_dim: int, block_size: int, *, rows: int, copies: int = 0
) -> KernelSpec:
    """One launch that writes `rows` rows of K and V and performs `copies` block copies in place.

    Inputs `k_pool, v_pool, k, v, slots, copies, order`; output `written` `[8]` of `dtype`, zeros: the next `order`.

    :raises ValueError: where there is nothing to do.
    """
    if rows + copies < 1:
        raise ValueError("a write needs at least one row or one block copy")
    threads = min(256, -(-kv_heads * head_dim // 4 // SIMD_LANES) * SIMD_LANES)
    template = (("T", dtype), ("KV_HEADS", kv_heads), ("DIM", head_dim), ("BLOCK", block_size), ("THREADS", threads))
    inputs = ("k_pool", "v_pool", "k", "v", "slots", "copies", "order")
    small = {"slots": rows, "copies": 3 * max(copies, 1)}
    return KernelSpec(
        name=_name("write_kv", template, inputs, small),
        source=_text("write_kv"),
        header="",
        inputs=inputs,
        outputs=(Output("written", (8,), dtype),),
        template=template,
        grid=(threads, rows + copies * block_size, 2),
        threadgroup=(threads, 1, 1),
    )


def rope_and_write_spec(rotation: Rotation, *, rows: int) -> KernelSpec:
    """One launch that rotates the queries and keys of `rows` rows and writes their keys and values in place.

    Inputs `k_pool, v_pool, qkv, slots, positions, params, order`, and `freqs` where `rotation.freqs`; output `q`
    `[rows, heads, head_dim]`, also the next `order`.

    :raises ValueError: where a head or its rotated part is no multiple of 8 values.
    """
    if rotation.head_dim % 8 or rotation.dims % 8:
        raise ValueError("the Metal kernel rotates multiples of 8 values in heads of a multiple of 8")
    units = (rotation.heads + 2 * rotation.kv_heads) * rotation.head_dim // 8
    threads = min(128, -(-units // SIMD_LANES) * SIMD_LANES)
    template = (
        ("T", rotation.dtype),
        ("HEADS", rotation.heads),
        ("KV_HEADS", rotation.kv_heads),
        ("DIM", rotation.head_dim),
        ("DIMS", rotation.dims),
        ("TRADITIONAL", rotation.traditional),
        ("THREADS", threads),
    )
    freqs = ("freqs",) if rotation.freqs else ()
    inputs = ("k_pool", "v_pool", "qkv", "slots", "positions", "params", *freqs, "order")
    small = {"slots": rows, "positions": rows, "freqs": rotation.dims // 2}
    frequency = "1.0f / freqs[i]" if freqs else "precise::exp2(-(float(i) / float(PAIRS)) * params[1])"
    return KernelSpec(
        name=_name("rope_and_write", template, inputs, small),
        source=_text("rope_and_write"),
        header=f"#define FREQUENCY_OF(i) ({frequency})\n",
        inputs=inputs,
        outputs=(Output("q", (rows, rotation.heads, rotation.head_dim), rotation.dtype),),
        template=template,
        grid=(threads, -(-units // threads), rows),
        threadgroup=(threads, 1, 1),
    )


def decode_specs(case: Attention, *, rows: int, max_blocks: int, max_length: int, cores: int) -> tuple[KernelSpec, ...]:
    """The launches of one decode attention, in order; the last one puts out `out` `[rows, heads, head_dim]`.

    `max_blocks`: the tables' width. `max_length`: an upper bound of the lengths. `cores`: of the device, see
    `estimate_cores`. `sinks` is an input where `case.sinks`; `order` is an input of the first launch.
    """
    count = splits(case, rows=rows, max_length=max_length, cores=cores)
    whole = Output("out", (rows, case.heads, case.head_dim), case.dtype)
    if count == 1:
        return (_decode(case, rows, max_blocks, 1, whole),)
    # A split's unnormalised values, then its highest score and its sum of weights, padded to a vector of four.
    partial = Output("partial", (rows, case.heads, count, case.head_dim + 4), mx.float32)
    return (_decode(case, rows, max_blocks, count, partial), _merge(case, rows, whole))


def _decode(case: Attention, rows: int, max_blocks: int, count: int, output: Output) -> KernelSpec:
    tiles = tiling(case)
    split = count > 1
    template = (
        ("T", case.dtype),
        ("HEADS", case.heads),
        ("KV_HEADS", case.kv_heads),
        ("DIM", case.head_dim),
        ("BLOCK", case.block_size),
        ("LANES", tiles.lanes),
        ("TILE", tiles.tile),
        ("PADDED", tiles.padded),
        ("KEYS", tiles.keys),
        ("SIMDGROUPS", tiles.simdgroups),
        *((("PIECES", tiles.pieces), ("STAGE", tiles.stage)) if tiles.wide else ()),
        ("LEAST", _least_blocks(case)),
        ("WINDOW", case.window),
        ("SOFTCAP", case.softcap),
        ("SPLIT", split),
    )
    sinks = case.sinks and not split
    inputs = ("q", "k_pool", "v_pool", "tables", "lengths", "params", *(("sinks",) if sinks else ()), "order")
    small = {"tables": rows * max_blocks, "lengths": rows, "sinks": case.heads}
    threads = SIMD_LANES * tiles.simdgroups
    return KernelSpec(
        name=_name("decode_wide" if tiles.wide else "decode", template, inputs, small),
        source=_text("decode_wide" if tiles.wide else "decode"),
        header=_header(sinks, output),
        inputs=inputs,
        outputs=(output,),
        template=template,
        grid=(threads * rows, case.kv_heads * tiles.pieces, count),
        threadgroup=(threads, 1, 1),
    )


def _merge(case: Attention, rows: int, output: Output) -> KernelSpec:
    template = (
        ("T", case.dtype),
        ("HEADS", case.heads),
        ("DIM", case.head_dim),
        ("BLOCK", case.block_size),
        ("LEAST", _least_blocks(case)),
        ("WINDOW", case.window),
    )
    inputs = ("partial", "lengths", "params", *(("sinks",) if case.sinks else ()))
    return KernelSpec(
        name=_name("merge", template, inputs, {"lengths": rows, "sinks": case.heads}),
        source=_text("merge"),
        header=_header(case.sinks, output),
        inputs=inputs,
        outputs=(output,),
        template=template,
        grid=(SIMD_LANES, case.heads, rows),
        threadgroup=(SIMD_LANES, min(case.heads, 8), 1),
    )


def _lane_floats(case: Attention, lanes: int) -> int:
    return 4 * -(-case.head_dim // 4 // lanes)


def _keys_at_once(case: Attention, lanes: int) -> int:
    """Keys that each team of `lanes` loads before it computes: enough loads in flight, within one 8-key block."""
    keys = max(1, KEY_REGISTERS // _lane_floats(case, lanes))
    return min(1 << (keys.bit_length() - 1), 8 * lanes // SIMD_LANES)


def _least_blocks(case: Attention) -> int:
    return LEAST_KEYS // case.block_size


def _name(
    kind: str,
    template: tuple[tuple[str, mx.Dtype | int | bool], ...],
    inputs: tuple[str, ...],
    small: dict[str, int],
) -> str:
    values = [
        f"{key.lower()}{_DTYPES[value] if isinstance(value, mx.Dtype) else int(value)}" for key, value in template
    ]
    constants = [name for name in inputs if name in small and small[name] < CONSTANT_BELOW]
    optional = [name for name in ("sinks", "freqs") if name in inputs]
    return "_".join(["pagefork", kind, *values, *optional, *(f"c{name}" for name in constants)])


def _header(sinks: bool, output: Output) -> str:
    sink = "float(sinks[head]) * LOG2E" if sinks else "LOWEST"
    return f"#define OUTPUT {output.name}\n#define SINK_OF(head) ({sink})\n" + _text("attention")


@cache
def _text(kind: str) -> str:
    return (Path(__file__).parent / "metal" / f"{kind}.metal").read_text(encoding="utf-8")
