"""What many sequences do to each other: a long prompt among decodes, and how late the event loop runs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import bench_control

from pagefork.runtime import Runtime, SamplingParams, Sequence
from pagefork.runtime.api import opened

TICK = 0.005


async def ttft(model: str, readers: int, length: int, chunk: int) -> dict[str, float]:
    """`readers` decode without end while a prompt of `length` tokens arrives; milliseconds."""
    blocks = readers * 256 + length // 16 + 64
    async with Runtime.open(model, blocks=blocks, prefill_step_size=chunk) as rt:
        gaps: list[tuple[float, float]] = []
        done, warm = anyio.Event(), anyio.Event()

        async def decode(sequence: Sequence) -> None:
            last = time.perf_counter()
            async for _ in sequence.generate(SamplingParams(max_tokens=4000, ignore_eos=True)):
                now = time.perf_counter()
                gaps.append((now, now - last))
                last = now
                if len(gaps) >= readers * 8:
                    warm.set()
                if done.is_set():
                    break

        async with anyio.create_task_group() as group:
            for index in range(readers):
                group.start_soon(decode, await rt.sequence([index + 3] * 8))
            await warm.wait()
            quiet = sorted(gap for _, gap in gaps[readers * 4 :])
            prompt = await rt.sequence([5 + index % 1000 for index in range(length)])
            begin, before = time.perf_counter(), rt.stats().steps
            async for _ in prompt.generate(SamplingParams(max_tokens=1, ignore_eos=True)):
                first = time.perf_counter()
            steps = rt.stats().steps - before
            done.set()
        busy = [gap for at, gap in gaps if begin < at <= first]
        return {
            "ttft_ms": (first - begin) * 1e3,
            "steps": steps,
            "mean_step_with_chunk_ms": (first - begin) / steps * 1e3,
            "quiet_gap_p50_ms": quiet[len(quiet) // 2] * 1e3,
            "worst_gap_ms": max(busy) * 1e3,
        }


@asynccontextmanager
async def ticker() -> AsyncIterator[list[float]]:
    """How many milliseconds late a 5 ms ticker of this event loop woke, each time."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK
            await anyio.sleep(TICK)
            late.append((time.perf_counter() - due) * 1e3)

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        try:
            yield late
        finally:
            group.cancel_scope.cancel()


async def lag(model: str, readers: int, tokens: int) -> dict[str, float]:
    """Lateness while `readers` sequences decode; "null" is the model that costs nothing."""
    runtime = opened(bench_control.options(1)) if model == "null" else Runtime.open(model, blocks=readers * 64)
    async with runtime as rt:

        async def decode(sequence: Sequence) -> None:
            async for _ in sequence.generate(SamplingParams(max_tokens=tokens, ignore_eos=True)):
                pass

        live = [await rt.sequence([index % 50 + 3] * 8) for index in range(readers)]
        async with ticker() as late, anyio.create_task_group() as group:
            for sequence in live:
                group.start_soon(decode, sequence)
    late.sort()
    return {
        "ticks": len(late),
        "p50_ms": late[len(late) // 2],
        "p99_ms": late[len(late) * 99 // 100],
        "max_ms": late[-1],
    }


async def prefix(model: str, length: int, shared: int) -> dict[str, float]:
    """Time to the first token of a prompt of `length` tokens, cold and after one that begins with the same `shared`."""
    head = [index % 1000 + 5 for index in range(shared)]
    figures: dict[str, float] = {}
    async with Runtime.open(model, blocks=length // 4) as rt:
        for name, last in (("cold", 7), ("warm", 9)):
            before, begin = rt.stats().prompt_tokens, time.perf_counter()
            sequence = await rt.sequence([*head, *[last] * (length - shared)])
            async for _ in sequence.generate(SamplingParams(max_tokens=1, ignore_eos=True)):
                figures[f"{name}_ms"] = (time.perf_counter() - begin) * 1e3
            figures[f"{name}_tokens_computed"] = rt.stats().prompt_tokens - before
    figures["ratio"] = figures["cold_ms"] / figures["warm_ms"]
    return figures


def add_command(commands: Any) -> None:
    parser = commands.add_parser("ttft", help="time to first token of a long prompt while others decode")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--length", type=int, default=6000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.set_defaults(run=lambda a: run(a, ttft, a.model, a.readers, a.length, a.chunk))
    _common(parser)
    parser = commands.add_parser("lag", help="lateness of the event loop while sequences decode")
    parser.add_argument("--model", default="smollm2-135m", help='a model, or "null"')
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.set_defaults(run=lambda a: run(a, lag, a.model, a.readers, a.tokens))
    _common(parser)
    parser = commands.add_parser("prefix", help="time to first token of a prompt whose head was computed before")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=1050)
    parser.add_argument("--shared", type=int, default=1000)
    parser.set_defaults(run=lambda a: run(a, prefix, a.model, a.length, a.shared))
    _common(parser)


def _common(parser: Any) -> None:
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--json", action="store_true")


def run(arguments: Any, function: Any, *parameters: Any) -> None:
    figures = {
        name: round(value, 2) for name, value in anyio.run(function, *parameters, backend=arguments.backend).items()
    }
    print(json.dumps(figures) if arguments.json else "  ".join(f"{name} {value}" for name, value in figures.items()))
