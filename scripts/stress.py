"""Stress test: many tasks fork, append, generate, truncate, cancel and close sequences in a pool too small for them.

Every answer is checked against a plain list of tokens, and all K and V against what the tokens say. Same seed and
--ops, same schedule of operations. Exit status 1 on any error, which is written to a file with what led to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import mlx.core as mx
from schedule import Load, combined
from stress_driver import Driver, overdue, remains
from stress_faults import delay_steps, hush
from stress_oracle import LoneOracle, MixedOracle, NarrowOracle, ToyOracle
from stress_report import Report, explain, print_crash, resident, write_crash
from stress_view import Camera, NoView, View, best_view, film
from toy_model import ToyModel

from pagefork.runtime import Runtime

Abort = Callable[[str], None]
"""Ends the process, from another thread, with an error that could not be told in any better way."""

TICK = 0.005
PATIENCE = 20.0
"""Seconds that an operation waits for blocks, where the schedule gives it no deadline of its own."""
STUCK = 150.0
"""Seconds after which an operation, which may have to wait for blocks several times, counts as forgotten."""
GRACE = 60.0
"""Seconds that a run with a forgotten operation gets to come down."""


class Ticker:
    """How late a task that wants to run every TICK seconds is: the lag of the event loop."""

    def __init__(self) -> None:
        self._lags: Counter[int] = Counter()

    async def run(self) -> None:
        due = anyio.current_time() + TICK
        while True:
            await anyio.sleep_until(due)
            now = anyio.current_time()
            self._lags[round((now - due) * 1e5)] += 1
            due = max(due + TICK, now)

    def p99(self) -> float:
        """Milliseconds, to a hundredth."""
        left = math.floor(0.01 * self._lags.total())
        for lag, count in sorted(self._lags.items(), reverse=True):
            left -= count
            if left < 0:
                return lag / 100
        return 0.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, number = parser.add_argument, int
    add("--sequences", type=number, help="tasks, each with a few sequences of its own (64; with a real model 12)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=10.0, help="how long (10)")
    length.add_argument("--ops", type=number, help="exactly this many operations instead")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--blocks", type=number, help="size of the pool")
    size.add_argument("--demand", type=float, default=0.6, help="instead: what share of the blocks wanted it has (0.6)")
    add("--block-size", type=number, help="tokens per block (4; on a GPU 8, the least that its kernels take)")
    add("--seed", type=number, default=0)
    add("--backend", choices=("asyncio", "trio"), default="asyncio")
    model = parser.add_mutually_exclusive_group().add_argument
    model("--model", help="a real model instead of the toy: its tokens are compared with what it says alone")
    model(
        "--window",
        choices=("all", "some"),
        nargs="?",
        const="all",
        help="all or some layers have a sliding window: blocks before it are given back",
    )
    add("--prefix", action="store_true", help="prompts share heads, and blocks are kept for those that begin alike")
    add("--priorities", action="store_true", help="sequences of different priority")
    add("--beams", action="store_true", help="beam searches among the operations")
    add("--faults", action="store_true", help="more cancellations, crashing sequences, steps that retire late")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--report", type=Path, help="where an error is written to (stress-SEED-BACKEND.json)")
    options = parser.parse_args(arguments)
    if options.sequences is None:
        options.sequences = 12 if options.model else 64
    if options.block_size is None:
        options.block_size = 8 if mx.default_device().type == mx.DeviceType.gpu else 4
    for name in ("sequences", "blocks", "block_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.demand <= 0:
        parser.error("--demand must be greater than 0")
    return options


def stopper(options: argparse.Namespace, task: int) -> Callable[[int], bool]:
    """When a task ends: after its share of the operations, or at the end of the time."""
    if options.ops is not None:
        share, rest = divmod(options.ops, options.sequences)
        return lambda number: number >= share + (task < rest)
    end = time.monotonic() + options.seconds
    return lambda number: time.monotonic() >= end


def oracle_of(options: argparse.Namespace) -> type[LoneOracle] | type[ToyOracle]:
    toys = {None: ToyOracle, "all": NarrowOracle, "some": MixedOracle}
    return LoneOracle if options.model else toys[options.window]


def pool_size(options: argparse.Namespace) -> int:
    """Blocks, as many for each group of layers; enough for the longest sequence in any case."""
    if options.blocks is not None:
        return int(options.blocks)
    oracle = oracle_of(options)
    wanted = options.demand * oracle.demand * options.sequences
    return max(math.ceil(wanted / options.block_size), -(-2 * oracle.longest // options.block_size))


def open_runtime(options: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[Runtime]:
    oracle = oracle_of(options)
    return Runtime.open(
        (ToyModel(oracle.windows), None) if issubclass(oracle, ToyOracle) else options.model,
        blocks=pool_size(options),
        block_size=options.block_size,
        # Small, so that jobs wait for lanes, prompts go in chunks and leases are renewed.
        max_batch=32,
        prefill_step_size=24,
        lease=6,
        patience=PATIENCE,
        prefix_cache=options.prefix,
    )


async def stress(
    options: argparse.Namespace,
    report: Report | None = None,
    view: View | None = None,
    running: list[str] | None = None,
    abort: Abort = lambda error: None,
) -> dict[str, Any]:
    """One run; the counts that are printed. `running` takes what was going on at its end."""
    report = Report(options.seed) if report is None else report
    ticker, start = Ticker(), time.monotonic()
    drivers: list[Driver] = []
    outcome: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    try:
        async with open_runtime(options) as rt:
            kind = oracle_of(options)
            oracle = kind() if issubclass(kind, ToyOracle) else await kind.listen(rt, options.seed, options.prefix)
            load = Load(options.prefix, options.priorities, options.beams, options.faults)
            start = time.monotonic()
            drivers += [
                Driver(rt, report, oracle, load, task, stopper(options, task)) for task in range(options.sequences)
            ]
            try:
                await drive(rt, drivers, report, ticker, options, view or NoView(), abort)
                outcome |= await settled(rt, report)
            except BaseException:
                outcome |= counts(rt)
                raise
    except Exception as error:
        for line in explain(error):
            report.fail(line)
    if running is not None:
        running += [driver.now for driver in drivers if driver.since is not None]
    return {
        "ok": not report.failures,
        "ops": report.ops,
        "sequences": report.sequences,
        "forks": report.forks,
        "cancels": report.cancels,
        "exhausted": report.exhausted,
        "beams": report.beams,
        "crashes": report.crashes,
        **outcome,
        "kv_rows_checked": report.kv_rows,
        "kv_rows_given_back": report.rows_given_back,
        "content_errors": report.content_errors,
        "p99_loop_lag_ms": ticker.p99(),
        "seconds": round(time.monotonic() - start, 2),
        "seed": options.seed,
        "backend": options.backend,
        "schedule": combined([driver.digest for driver in drivers]),
        "errors": report.failures[:20],
    }


async def drive(
    rt: Runtime,
    drivers: list[Driver],
    report: Report,
    ticker: Ticker,
    options: argparse.Namespace,
    view: View,
    abort: Abort,
) -> None:
    """Run all tasks to their end. TimeoutError when one of them is forgotten."""
    async with anyio.create_task_group() as around:
        around.start_soon(ticker.run)
        around.start_soon(watch, drivers, abort)
        around.start_soon(film, Camera(rt, report), view)
        if options.faults:
            around.start_soon(delay_steps, rt, options.seed)
        async with anyio.create_task_group() as group:
            for driver in drivers:
                group.start_soon(driver.run)
        around.cancel_scope.cancel()


async def watch(drivers: list[Driver], abort: Abort) -> None:
    """Every operation must end: served, refused or timed out. One that does not is an error like others."""
    while True:
        await anyio.sleep(STUCK / 20)
        if forgotten := overdue(drivers, STUCK):
            error = f"not ended after {STUCK:.0f} s: " + "; ".join(forgotten[:8])
            # Whoever forgot one may not answer its cancellation either.
            last = threading.Timer(GRACE, abort, [error])
            last.daemon = True
            last.start()
            raise TimeoutError(error)


COUNTS = {
    "tokens": "tokens",
    "copies": "copies",
    "blocks": "blocks_total",
    "blocks_peak": "blocks_peak",
    "preemptions": "preemptions",
    "prefix_hits": "prefix_hits",
    "evictions": "evictions",
    "waited": "waited",
    "expired": "expired",
    "leaked_blocks": "blocks_referenced",
}
"""What is reported of the runtime's own counts."""


def counts(rt: Runtime) -> dict[str, int]:
    stats = rt.stats()
    return {name: getattr(stats, field) for name, field in COUNTS.items()}


async def settled(rt: Runtime, report: Report) -> dict[str, int]:
    """With every sequence closed nothing may be left; releases that are on their way get time to arrive."""
    for _ in range(1000):
        if remains(rt) is None:
            break
        await anyio.lowlevel.checkpoint()
    if (left := remains(rt)) is not None:
        report.fail(left)
    return counts(rt)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if not options.model:
        # The toy's sums are exact in float32, and MLX's own products on a GPU are not unless told so.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    report, running = Report(options.seed), []
    path = options.report or Path(f"stress-{options.seed}-{options.backend}.json")

    def failed(result: dict[str, Any]) -> None:
        write_crash(path, arguments, result, report, running)
        print_crash(path, arguments, result, report)

    def abort(error: str) -> None:
        failed({"ok": False, "ops": report.ops, "seed": options.seed, "errors": [*report.failures[:20], error]})
        sys.stderr.flush()
        os._exit(1)

    before = resident()
    hush()
    view = NoView() if options.json else best_view(sys.stdout)
    try:
        with view:
            result = anyio.run(partial(stress, options, report, view, running, abort), backend=options.backend)
    except KeyboardInterrupt:
        return 130
    if before is not None:
        result["grown_mb"] = round((resident() or before) - before, 1)
    if not result["ok"]:
        failed(result)
    print(json.dumps(result) if options.json else summary(result))
    return 0 if result["ok"] else 1


def summary(result: dict[str, Any]) -> str:
    lines = [
        f"{'ok' if result['ok'] else 'FAILED'}: {result['ops']} operations in {result['seconds']} s on "
        f"{result['backend']}, seed {result['seed']}, schedule {result['schedule']}"
    ]
    told = {"ok", "ops", "seconds", "backend", "seed", "schedule", "errors"}
    lines += [f"  {name:<16}{value:>10,}" for name, value in result.items() if name not in told]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
