"""Stress test: many tasks fork, append, generate, truncate, cancel and close sequences in a pool too small for them.

Every answer is checked against a plain list of tokens, and all K and V against what the tokens say. Same seed and
--ops, same schedule of operations. Exit status 1 on any error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from schedule import combined
from stress_driver import Driver, Report
from toy_model import ToyModel

from pagefork.runtime import Runtime

TICK = 0.005
PATIENCE = 60.0
"""Seconds without a finished operation after which the run counts as stuck."""


class Ticker:
    """How late a task that wants to run every TICK seconds is: the lag of the event loop."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        due = anyio.current_time() + TICK
        while True:
            await anyio.sleep_until(due)
            now = anyio.current_time()
            self._lags.append(now - due)
            due = max(due + TICK, now)

    def p99(self) -> float:
        """Milliseconds."""
        lags = sorted(self._lags) or [0.0]
        return 1e3 * lags[math.ceil(0.99 * len(lags)) - 1]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="tasks, each with a few sequences of its own (64)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=10.0, help="how long (10)")
    length.add_argument("--ops", type=int, help="exactly this many operations instead")
    parser.add_argument("--blocks", type=int, default=256, help="size of the pool (256)")
    parser.add_argument("--block-size", type=int, default=4, help="tokens per block (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    for name in ("sequences", "blocks", "block_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def stopper(options: argparse.Namespace, task: int) -> Callable[[int], bool]:
    """When a task ends: after its share of the operations, or at the end of the time."""
    if options.ops is not None:
        share, rest = divmod(options.ops, options.sequences)
        return lambda number: number >= share + (task < rest)
    end = time.monotonic() + options.seconds
    return lambda number: time.monotonic() >= end


async def stress(options: argparse.Namespace) -> dict[str, Any]:
    """One run; the counts that are printed."""
    report, ticker = Report(options.seed), Ticker()
    start = time.monotonic()
    drivers: list[Driver] = []
    outcome: dict[str, Any] = {"tokens": 0, "copies": 0, "leaked_blocks": 0}
    try:
        async with Runtime.open(
            (ToyModel(), None),
            blocks=options.blocks,
            block_size=options.block_size,
            # Small, so that jobs wait for lanes, prompts go in chunks and leases are renewed.
            max_batch=32,
            prefill_step_size=24,
            lease=6,
        ) as rt:
            start = time.monotonic()
            drivers += [Driver(rt, report, task, stopper(options, task)) for task in range(options.sequences)]
            await drive(drivers, report, ticker)
            outcome |= await remains(rt, report)
    except Exception as error:
        report.failures += [f"seed {options.seed}: {line}" for line in explain(error)]
    return {
        "ok": not report.failures,
        "ops": report.ops,
        "sequences": report.sequences,
        "forks": report.forks,
        "cancels": report.cancels,
        "exhausted": report.exhausted,
        **outcome,
        "kv_rows_checked": report.kv_rows,
        "content_errors": report.content_errors,
        "p99_loop_lag_ms": round(ticker.p99(), 2),
        "seconds": round(time.monotonic() - start, 2),
        "seed": options.seed,
        "backend": options.backend,
        "schedule": combined([driver.digest for driver in drivers]),
        "errors": report.failures[:20],
    }


async def drive(drivers: list[Driver], report: Report, ticker: Ticker) -> None:
    """Run all tasks to their end. TimeoutError when nothing moves any more."""
    async with anyio.create_task_group() as around:
        around.start_soon(ticker.run)
        around.start_soon(watch, drivers, report)
        async with anyio.create_task_group() as group:
            for driver in drivers:
                group.start_soon(driver.run)
        around.cancel_scope.cancel()


async def watch(drivers: list[Driver], report: Report) -> None:
    """A hang is an error like others, and says where."""
    while True:
        before = report.ops
        await anyio.sleep(PATIENCE)
        if report.ops == before:
            raise TimeoutError(f"no operation ended for {PATIENCE:.0f} s: " + "; ".join(d.now for d in drivers[:8]))


async def remains(rt: Runtime, report: Report) -> dict[str, Any]:
    """With every sequence closed nothing may be left; releases that are on their way get time to arrive."""
    for _ in range(1000):
        stats = rt.stats()
        leaked = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        if not leaked and not stats.sequences:
            break
        await anyio.lowlevel.checkpoint()
    if leaked or stats.sequences or stats.jobs:
        report.failures.append(
            f"seed {report.seed}: {leaked} blocks, {stats.sequences} sequences and {stats.jobs} jobs left at the end"
        )
    return {"tokens": stats.tokens, "copies": stats.copies, "leaked_blocks": leaked}


def explain(error: BaseException) -> list[str]:
    """The errors in a group, each with the place where it was raised."""
    if isinstance(error, BaseExceptionGroup):
        return [line for part in error.exceptions for line in explain(part)]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return [f"{type(error).__name__}: {error}{place}"]


def main() -> int:
    options = parse()
    result = anyio.run(partial(stress, options), backend=options.backend)
    for failure in result["errors"]:
        print(failure, file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"{'ok' if result['ok'] else 'FAILED'}: {result['ops']} operations in {result['seconds']} s on "
            f"{result['backend']}, seed {result['seed']}, schedule {result['schedule']}"
        )
        for name in ("sequences", "forks", "cancels", "exhausted", "tokens", "copies", "kv_rows_checked"):
            print(f"  {name:<16}{result[name]:>10,}")
        for name in ("content_errors", "leaked_blocks", "p99_loop_lag_ms"):
            print(f"  {name:<16}{result[name]:>10,}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
