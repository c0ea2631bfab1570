"""Host cost per delivered token: a null model, each sequence read by its own task, beside mlx-lm's BatchGenerator."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import anyio
import mlx.core as mx
import mlx.nn as nn

from pagefork.runtime import SamplingParams
from pagefork.runtime.api import opened
from pagefork.runtime.forward import Engine
from pagefork.runtime.groups import Groups
from pagefork.runtime.supervisor import Options

VOCAB = 64


class NullModel:
    """Costs nothing: logits that do not depend on the tokens. What `Engine` needs of a model, and no layers."""

    name = "null"
    vocab_size = VOCAB
    layers: tuple[Any, ...] = ()
    groups = Groups()
    eos_ids: frozenset[int] = frozenset()
    max_context = None
    tokenizer = None

    def __init__(self) -> None:
        self._logits = mx.arange(VOCAB).astype(mx.float32)[None]

    def __call__(
        self, tokens: mx.array, positions: mx.array, attend: Any, rows: Any = None, whole: Any = None
    ) -> mx.array:
        count = tokens.shape[0] if rows is None else rows.shape[0]
        return mx.broadcast_to(self._logits, (count, VOCAB))

    def restore(self) -> None:
        pass


class NullKV:
    """No pools, since no layer writes."""

    nbytes = 0
    num_blocks = 1 << 16

    def pending(self) -> list[mx.array]:
        return []


def options(depth: int) -> Options:
    return Options(
        build=lambda: Engine(NullModel(), NullKV(), depth=depth),  # type: ignore[arg-type]
        blocks=1 << 16,
        block_size=16,
        max_batch=256,
        prefill_step_size=512,
        lease=64,
        shutdown_timeout=10.0,
    )


async def ours(sequences: int, tokens: int, depth: int) -> tuple[float, float]:
    """Microseconds per token, of the wall's clock and of all CPUs: engine, actors and readers together."""
    async with opened(options(depth)) as rt:
        live = [await rt.sequence([1, 2, 3, 4]) for _ in range(sequences)]
        started = anyio.Event()
        left = sequences

        async def read(index: int) -> None:
            nonlocal left
            await started.wait()
            async for _ in live[index].generate(SamplingParams(max_tokens=tokens)):
                pass
            left -= 1

        async with anyio.create_task_group() as group:
            for index in range(sequences):
                group.start_soon(read, index)
            await anyio.wait_all_tasks_blocked()
            gc.collect()
            begin, used = time.perf_counter(), time.process_time()
            started.set()
        wall, cpu = time.perf_counter() - begin, time.process_time() - used
        return wall / (sequences * tokens) * 1e6, cpu / (sequences * tokens) * 1e6


class NullModule(nn.Module):
    """The same null model as mlx-lm sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._logits = mx.arange(VOCAB).astype(mx.float32)[None, None]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return mx.broadcast_to(self._logits, (*inputs.shape, VOCAB))


def theirs(sequences: int, tokens: int) -> float:
    """Microseconds per token of mlx-lm's BatchGenerator: one caller, no event loop."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(
        NullModule(), max_tokens=tokens, completion_batch_size=sequences, prefill_batch_size=sequences
    )
    generator.insert([[1, 2, 3, 4]] * sequences)
    delivered = 0
    while not delivered:
        delivered += len(generator.next()[1])
    gc.collect()
    begin, first = time.perf_counter(), delivered
    while delivered < sequences * tokens:
        delivered += len(generator.next()[1])
    took = time.perf_counter() - begin
    generator.close()
    return took / (delivered - first) * 1e6


def add_command(commands: Any) -> None:
    parser = commands.add_parser("control", help=__doc__)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--quick", action="store_true", help="few tokens: to see that it runs")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: Any) -> None:
    scale = 10 if arguments.quick else 1
    rows = []
    for sequences, tokens in ((1, 3000), (32, 600), (256, 200)):
        count = tokens // scale
        runs = [anyio.run(ours, sequences, count, 1, backend=arguments.backend) for _ in range(3)]
        wall, cpu = (min(figures) for figures in zip(*runs, strict=True))
        row = {"us_per_token": wall, "cpu_us_per_token": cpu}
        row["mlx_lm_us_per_token"] = min(theirs(sequences, count) for _ in range(3))
        rows.append({"sequences": sequences} | {name: round(value, 2) for name, value in row.items()})
    if arguments.json:
        print(json.dumps({"backend": arguments.backend, "rows": rows}))
        return
    print("sequences   us/token   of CPUs   mlx-lm BatchGenerator (no async)")
    for row in rows:
        ours_wall, ours_cpu, peer = row["us_per_token"], row["cpu_us_per_token"], row["mlx_lm_us_per_token"]
        print(f"{row['sequences']:9}   {ours_wall:8.1f}   {ours_cpu:7.1f}   {peer:8.1f}")
