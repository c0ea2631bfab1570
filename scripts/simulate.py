"""Drives block pool, ledger, prefix index and arbiter through a service's day, without a model or an event loop.

Poisson arrivals, heavy-tailed lengths, shared system prompts, several turns, parallel samples, beam groups, priorities
and early closes, at more than the pool can hold. Prints waste, sharing, hits, preemptions, waiting times, and the cost
per operation as everything grows tenfold twice. Exit status 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from simulation import Report, Simulation, Trace

WASTE_LIMIT = 0.04
GROWTH_LIMIT = 1.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="size of the largest pool (1000000)")
    parser.add_argument("--sequences", type=int, default=100_000, help="arrivals at the largest pool (100000)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block (16)")
    parser.add_argument("--load", type=float, default=1.5, help="demand without sharing, in pools (1.5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the size")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    if options.quick:
        options.blocks, options.sequences = max(1, options.blocks // 100), max(1, options.sequences // 100)
    for name in ("blocks", "sequences", "block_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.load <= 0:
        parser.error("--load must be above 0")
    return options


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def simulate(options: argparse.Namespace, shrunk: int) -> dict[str, Any]:
    """One run at a size divided by `shrunk`."""
    blocks, sequences = max(1, options.blocks // shrunk), max(1, options.sequences // shrunk)
    start = time.perf_counter()
    simulation = Simulation(blocks, sequences, options.block_size, options.seed, options.load, Trace())
    report: Report = simulation.run()
    ledger, arbiter = simulation.ledger, simulation.arbiter
    return {
        "blocks": blocks,
        "sequences": sequences,
        "waste": round(mean(report.waste), 5),
        "saved_by_sharing": round(mean(report.saved), 4),
        "occupancy": round(mean(report.used), 4),
        "hits": ledger.hits,
        "hit_tokens": ledger.hit_tokens,
        "prefilled_tokens": report.counts["prefilled"],
        "evictions": ledger.evictions,
        "copies": ledger.copies,
        "forks": report.counts["forks"],
        "preemptions": arbiter.preempted,
        "expired": report.counts["expired"],
        "refused": report.counts["refused"],
        "closed_early": report.counts["closed early"],
        "waited": round(mean([float(wait > 0) for wait in report.waits]), 4),
        "wait_p50_s": round(quantile(report.waits, 0.5), 4),
        "wait_p99_s": round(quantile(report.waits, 0.99), 4),
        "wait_max_s": round(max(report.waits, default=0.0), 4),
        "operations": report.operations,
        "us_per_operation": round(report.cpu_seconds / max(1, report.operations) * 1e6, 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    runs = [simulate(options, shrunk) for shrunk in (100, 10, 1)]
    growth = runs[-1]["us_per_operation"] / max(runs[0]["us_per_operation"], 1e-9)
    missed = []
    if runs[-1]["waste"] >= WASTE_LIMIT:
        missed.append(f"waste of {runs[-1]['waste']:.1%} is not below {WASTE_LIMIT:.0%}")
    if growth >= GROWTH_LIMIT and not options.quick:
        missed.append(f"an operation costs {growth:.2f} times as much at the largest size as at the smallest")
    if options.json:
        print(json.dumps({"ok": not missed, "missed": missed, "growth": round(growth, 3), "runs": runs}))
    else:
        for name in runs[0]:
            print(f"{name:<20}" + "".join(f"{run[name]:>14,}" for run in runs))
        print(f"{'cost grows':<20}{growth:>14.2f} times over a hundredfold size")
        for line in missed:
            print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
