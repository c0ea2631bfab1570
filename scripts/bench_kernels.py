"""Decode attention: this library's kernel beside what else could be called, on the device at hand."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial

import mlx.core as mx
import numpy as np

from pagefork.kernels import paged_attention
from pagefork.kernels.device import device

HEAD_DIM, BLOCK = 128, 16
SCALE = HEAD_DIM**-0.5
CACHE_BYTES = 300_000_000
"""Chains walk over copies of the pools that are larger than any last-level cache, as layers of a model do."""


@dataclass(frozen=True)
class Shape:
    """One decode step: `rows` sequences of `length` positions each."""

    rows: int
    length: int
    heads: int
    kv_heads: int

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.length * self.kv_heads * HEAD_DIM * 2 * 2


FULL = (
    Shape(32, 8192, 32, 8),
    Shape(1, 8192, 32, 8),
    Shape(1, 32768, 32, 8),
    Shape(128, 1024, 32, 8),
    Shape(8, 4096, 32, 32),
)
QUICK = (Shape(4, 64, 8, 2), Shape(1, 128, 8, 2))


@dataclass
class Row:
    """Milliseconds a launch on the device; None where it was not run. `kv_tbps`: bytes of K and V over `pagefork`."""

    shape: Shape
    pagefork: float
    kv_tbps: float
    gather_sdpa: float
    contiguous_sdpa: float
    flashinfer: float | None = None
    flashinfer_modes: dict[str, float] = field(default_factory=dict)


Chain = Callable[[int, mx.array], mx.array]
"""Queues so many launches, the first after the given array, each after the one before; returns the last."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kernels", help="time decode attention against its peers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--no-peers", action="store_true", help="only this library's kernel and the copy")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    mx.random.seed(0)
    quick = arguments.quick
    copy = {"mlx": mlx_copy(1 << (16 if quick else 30))}
    if not quick:
        copy |= torch_copy()
        free_torch_memory()
    rows = [measure(shape, quick, peers=not arguments.no_peers) for shape in (QUICK if quick else FULL)]
    report = {"device": device().name, "mlx": mx.__version__, "copy_tbps": copy, "rows": [asdict(row) for row in rows]}
    print(json.dumps(report) if arguments.json else table(copy, rows))


def measure(shape: Shape, quick: bool, peers: bool) -> Row:
    blocks = shape.rows * shape.length // BLOCK
    dtype = mx.float32 if quick else mx.bfloat16
    copies = 1 if quick else 1 + CACHE_BYTES // shape.kv_bytes
    pools = [
        tuple(mx.random.normal((blocks, BLOCK, shape.kv_heads, HEAD_DIM)).astype(dtype) for _ in range(2))
        for _ in range(min(copies, 12))
    ]
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    # As in a step of the runtime: tables and lengths are parts of one array in the device's memory. MLX would keep one
    # or two lengths by themselves where the host can write them, and every block of a launch would wait for those.
    plan = mx.concatenate([mx.array(order), mx.full((shape.rows,), shape.length, dtype=mx.int32)])
    tables, lengths = plan[:blocks].reshape(shape.rows, -1), plan[blocks:]
    q = mx.random.normal((shape.rows, shape.heads, HEAD_DIM)).astype(dtype)
    mx.eval(pools, tables, lengths, q)

    def paged(launches: int, after: mx.array) -> mx.array:
        for i in range(launches):
            k, v = pools[i % len(pools)]
            after = paged_attention(q, k, v, tables, lengths, scale=SCALE, max_length=shape.length, order=after)
        return after

    def contiguous(launches: int, after: mx.array, gather: bool = False) -> mx.array:
        after = after.reshape(-1)[:1].astype(q.dtype)
        for i in range(launches):
            # A product with zero ties each launch to the one before.
            query = (q + after.reshape(-1)[:1] * 0)[:, :, None]
            k, v = (side(pool, gather) for pool in pools[i % len(pools)])
            after = mx.fast.scaled_dot_product_attention(query, k, v, scale=SCALE)
        return after

    def side(pool: mx.array, gather: bool) -> mx.array:
        if not gather:  # the same bytes, taken as they would lie in a cache that is not paged
            return pool.reshape(shape.rows, shape.kv_heads, shape.length, HEAD_DIM)
        return pool[tables].reshape(shape.rows, shape.length, shape.kv_heads, HEAD_DIM).swapaxes(1, 2)

    fast = slope(paged, quick, shape.kv_bytes / 4e9)
    row = Row(shape, fast, shape.kv_bytes / fast / 1e9, 0.0, 0.0)
    if peers:
        row.gather_sdpa = slope(lambda n, after: contiguous(n, after, gather=True), quick, shape.kv_bytes / 1.4e8)
        row.contiguous_sdpa = slope(contiguous, quick, shape.kv_bytes / 1.4e9)
        if not quick:
            row.flashinfer_modes = flashinfer(shape, order)
            free_torch_memory()
            row.flashinfer = min(row.flashinfer_modes.values(), default=None)
    return row


def slope(chain: Chain, quick: bool, expected: float, repeats: int = 7) -> float:
    """Milliseconds a launch: the difference of a long chain and a short one, over the launches between.

    A chain is queued behind work that keeps the device busy meanwhile, so that the time to queue it is hidden too.
    `expected`: a guess of the result.
    """
    short, long = (1, 21) if quick else (8, 8 + min(100, max(8, int(40 / expected))))
    seconds = {short: [], long: []}
    for repeat in range(repeats + 1):
        for launches in (short, long):
            begin = time.perf_counter()
            after = busy(quick)
            mx.async_eval(after)
            mx.eval(chain(launches, after))
            mx.synchronize()
            if repeat:
                seconds[launches].append(time.perf_counter() - begin)
    return (statistics.median(seconds[long]) - statistics.median(seconds[short])) / (long - short) * 1e3


def busy(quick: bool) -> mx.array:
    """Some 40 ms of work on a large GPU; depends on nothing.

    On CUDA one thread waits by the clock: should matrix products of that length vary by a millisecond, a hundredth of
    that would be as much as a short launch.
    """
    if device().backend == "cuda":
        (out,) = waiting()(
            inputs=[mx.array([40_000_000])],
            output_shapes=[(8,)],
            output_dtypes=[mx.bfloat16],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return out
    size = 16 if quick else 8192
    square = mx.full((size, size), 1e-4, dtype=mx.float32 if quick else mx.bfloat16)
    for _ in range(1 if quick else 20):
        square = square @ square
    return square.reshape(-1)[:8]


@cache
def waiting() -> Callable[..., list[mx.array]]:
    source = """
        unsigned long long begin, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        do {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (now - begin < (unsigned long long)nanoseconds[0]);
        for (int i = 0; i < 8; ++i) out[i] = __float2bfloat16(0.0f);
    """
    return mx.fast.cuda_kernel("pagefork_bench_waiting_2", ["nanoseconds"], ["out"], source)


def mlx_copy(elements: int) -> float:
    """TB/s, read and written, of MLX's plainest copying kernel."""
    source = mx.zeros((elements,), dtype=mx.bfloat16)
    mx.eval(source)

    def chain(launches: int, after: mx.array) -> mx.array:
        out = source + after[0].astype(mx.bfloat16)
        for _ in range(launches - 1):
            out = out + 1
        return out

    return 2 * source.nbytes / slope(chain, elements < 1 << 20, 1.0) / 1e9


def torch_copy() -> dict[str, float]:
    """TB/s of PyTorch's copy, the highest that is known of; empty without PyTorch."""
    try:
        import torch
        from triton.testing import do_bench
    except ImportError:
        return {}
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return {"torch": 2 * source.nbytes / milliseconds / 1e9}


def flashinfer(shape: Shape, order: np.ndarray) -> dict[str, float]:
    """Milliseconds by mode, on the same block order; empty where FlashInfer or PyTorch is missing."""
    try:
        import flashinfer as peer
        import torch
        from triton.testing import do_bench
    except ImportError:
        return {}
    mx.clear_cache()
    bf16, ints = torch.bfloat16, {"device": "cuda", "dtype": torch.int32}
    blocks, width = len(order), shape.length // BLOCK
    kv = torch.randn(blocks, 2, BLOCK, shape.kv_heads, HEAD_DIM, device="cuda", dtype=bf16)
    q = torch.randn(shape.rows, shape.heads, HEAD_DIM, device="cuda", dtype=bf16)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    milliseconds = {}
    for mode, tensor_cores in (("cuda_cores", False), ("tensor_cores", True)):
        wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(
            torch.arange(0, blocks + 1, width, **ints),
            torch.tensor(order, **ints),
            torch.full((shape.rows,), BLOCK, **ints),
            shape.heads,
            shape.kv_heads,
            HEAD_DIM,
            BLOCK,
            q_data_type=bf16,
            kv_data_type=bf16,
        )
        milliseconds[mode] = do_bench(partial(wrapper.run, q, kv), return_mode="median")
    return milliseconds


def free_torch_memory() -> None:
    try:
        import torch
    except ImportError:
        return
    torch.cuda.empty_cache()


def table(copy: dict[str, float], rows: list[Row]) -> str:
    best = max(copy.values())
    lines = [
        f"{device().name}, mlx {mx.__version__}; copy TB/s: " + ", ".join(f"{k} {v:.2f}" for k, v in copy.items()),
        f"{'rows':>5}{'length':>8}{'heads':>8}{'pagefork':>11}{'TB/s':>7}{'of copy':>9}{'FlashInfer':>12}{'ratio':>7}"
        f"{'SDPA':>9}{'gather+SDPA':>13}{'ratio':>7}",
    ]
    for row in rows:
        peer = f"{row.flashinfer:12.4f}{row.pagefork / row.flashinfer:7.2f}" if row.flashinfer else f"{'-':>12}{'-':>7}"
        shape = row.shape
        lines.append(
            f"{shape.rows:5}{shape.length:8}{f'{shape.heads}/{shape.kv_heads}':>8}{row.pagefork:11.4f}{row.kv_tbps:7.2f}"
            f"{row.kv_tbps / best:9.0%}{peer}{row.contiguous_sdpa:9.3f}{row.gather_sdpa:13.3f}"
            f"{row.gather_sdpa / row.pagefork:7.1f}"
        )
    return "\n".join(lines)
