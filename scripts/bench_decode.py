"""Decoding through the public API, one task a sequence, beside mlx-lm's BatchGenerator and the memory bound."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import bench_kernels
import bench_peer
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from pagefork.runtime import Runtime, SamplingParams, Sequence


async def ours(model: nn.Module, texts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Tokens per second of sequences that all decode, each read by its own task; and how many GB their blocks take."""
    batch, context = len(texts), len(texts[0])
    blocks = batch * (-(-(context + tokens) // 16) + 2)
    times: list[float] = []

    async def read(sequence: Sequence, count: int) -> None:
        async for _ in sequence.generate(SamplingParams(max_tokens=count, ignore_eos=True)):
            times.append(time.perf_counter())

    async with Runtime.open((model, None), blocks=blocks, max_batch=batch, prefill_step_size=bench_peer.CHUNK) as rt:
        sequences = [await rt.sequence(text) for text in texts]
        for count in (1, tokens):
            times.clear()
            async with anyio.create_task_group() as group:
                for sequence in sequences:
                    group.start_soon(read, sequence, count)
        stats = rt.stats()
    return bench_peer.rate(times, batch), stats.blocks_referenced * stats.block_bytes / 1e9


def bound(model: nn.Module, batch: int, context: int, bandwidth: float) -> float:
    """Tokens per second if a step only read weights, K and V, once, at `bandwidth` bytes per second."""
    weights = sum(array.nbytes for name, array in tree_flatten(model.parameters()) if "embed_tokens" not in name)
    args = model.args
    head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
    kinds = args.layer_types or ["full_attention"] * args.num_hidden_layers
    seen = sum(min(context, args.sliding_window) if kind == "sliding_attention" else context for kind in kinds)
    per_token = 2 * args.num_key_value_heads * head_dim * mx.bfloat16.size
    return batch * bandwidth / (weights + batch * seen * per_token)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("decode", help=__doc__)
    parser.add_argument("--shape", choices=bench_peer.SHAPES, default="llama-8b")
    parser.add_argument("--random", action="store_true", help="random weights; the only kind there is for a shape")
    parser.add_argument("--case", action="append", metavar="BATCH,CONTEXT", help="repeat for several")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--peer",
        choices=("yes", "no"),
        default="yes",
        help="also time mlx-lm's BatchGenerator, as it comes and with pagefork's MLX settings",
    )
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: Any) -> None:
    cases = arguments.case or ["1,1024", "32,1024", "32,8192", "128,1024"]
    untouched = _peer_alone(arguments, cases) if arguments.peer == "yes" else {}
    model = bench_peer.random_model(arguments.shape, bench_peer.dtype())
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    bandwidth = bench_kernels.mlx_copy(1 << (30 if on_gpu else 19)) * 1e12
    mx.clear_cache()
    rows = []
    for case in cases:
        batch, context = map(int, case.split(","))
        texts = bench_peer.prompts(batch, context, bench_peer.SHAPES[arguments.shape]["vocab_size"])
        row = {"batch": batch, "context": context, "bound": bound(model, batch, context, bandwidth)}
        rate, held = anyio.run(ours, model, texts, arguments.tokens, backend=arguments.backend)
        row["tokens_per_s"], row["kv_gb"] = rate, held
        row["step_ms"] = batch / row["tokens_per_s"] * 1e3
        gc.collect()
        mx.clear_cache()
        if arguments.peer == "yes":
            row["mlx_lm_tokens_per_s"] = untouched[case]
            row["ratio"] = row["tokens_per_s"] / untouched[case]
            if (tuned := _peer_beside(model, texts, arguments.tokens)) is not None:
                row["mlx_lm_tuned_tokens_per_s"] = tuned
                row["ratio_to_tuned"] = row["tokens_per_s"] / tuned
        rows.append({name: round(value, 2) for name, value in row.items()})
        if not arguments.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.json:
        print(json.dumps({"shape": arguments.shape, "copy_tb_per_s": round(bandwidth / 1e12, 3), "rows": rows}))


def _peer_beside(model: nn.Module, texts: list[list[int]], tokens: int) -> float | None:
    """The peer's rate in this process; None where it fails, for want of memory with these settings."""
    try:
        return bench_peer.theirs(model, texts, tokens)
    except RuntimeError as error:
        print(f"the peer in this process: {error}", file=sys.stderr)
        return None


_OURS = ("MLX_MAX_MB_PER_BUFFER", "MLX_MAX_OPS_PER_BUFFER")


def _peer_alone(arguments: Any, cases: list[str]) -> dict[str, float]:
    """The peer's rates in a process of its own, with MLX set up as it comes."""
    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    command = [sys.executable, str(Path(__file__).with_name("bench_peer.py")), "--shape", arguments.shape]
    command += ["--tokens", str(arguments.tokens), *(part for case in cases for part in ("--case", case))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates
