"""The pool while it is under stress: a live picture in a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Protocol, TextIO

import anyio
import numpy as np
from msgspec import Struct
from stress_report import Report

from pagefork.runtime import Runtime

WIDTH = 60


class Picture(Struct, frozen=True):
    """Blocks by what they are now; shared ones have several owners. speed: tokens/s since the picture before."""

    total: int
    own: int
    shared: int
    cached: int
    free: int
    sequences: int
    waiting: int
    waited: int
    preemptions: int
    prefix_hits: int
    evictions: int
    ops: int
    exhausted: int
    failures: int
    seconds: float
    speed: float


class Camera:
    def __init__(self, rt: Runtime, report: Report) -> None:
        self._rt = rt
        self._report = report
        self._start = self._before = time.monotonic()
        self._tokens = 0

    def take(self) -> Picture:
        stats, report, now = self._rt.stats(), self._report, time.monotonic()
        ledger = self._rt._house.allocator.ledger
        # The prefix index holds a reference of its own to what it keeps.
        shared = int((ledger.pool.refcounts - np.asarray(ledger.index.published, dtype=np.int32) > 1).sum())
        speed = (stats.tokens - self._tokens) / max(now - self._before, 1e-9)
        self._before, self._tokens = now, stats.tokens
        return Picture(
            total=stats.blocks_total,
            own=max(stats.blocks_referenced - shared, 0),
            shared=shared,
            cached=stats.blocks_cached,
            free=stats.blocks_free,
            sequences=stats.sequences,
            waiting=stats.waiting,
            waited=stats.waited,
            preemptions=stats.preemptions,
            prefix_hits=stats.prefix_hits,
            evictions=stats.evictions,
            ops=report.ops,
            exhausted=report.exhausted,
            failures=len(report.failures),
            seconds=now - self._start,
            speed=speed,
        )


class View(AbstractContextManager[None], Protocol):
    every: float

    def show(self, picture: Picture) -> None: ...


class NoView(View):
    every = 60.0

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, picture: Picture) -> None:
        pass


class PlainView(View):
    every = 5.0

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __exit__(self, *_: object) -> None:
        self._out.flush()

    def show(self, picture: Picture) -> None:
        used = picture.own + picture.shared
        print(
            f"{picture.seconds:6.0f} s  {picture.ops:>8,} ops  used {used}/{picture.total} ({picture.shared} shared, "
            f"{picture.cached} cached)  waiting {picture.waiting}  preempted {picture.preemptions:,}  "
            f"{picture.speed:,.0f} tokens/s",
            file=self._out,
            flush=True,
        )


class LiveView(View):
    """The pool as one bar, and what goes on in it below; needs rich."""

    every = 0.25

    def __init__(self, console: Any = None) -> None:
        from rich.live import Live

        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, picture: Picture) -> None:
        from rich.console import Group
        from rich.text import Text

        bar = Text("  ")
        legend = Text("  ")
        for name, count, glyph, style in (
            ("own", picture.own, "█", "green"),
            ("shared", picture.shared, "█", "magenta"),
            ("cached", picture.cached, "▓", "blue"),
            ("free", picture.free, "░", "dim"),
        ):
            bar.append(glyph * round(WIDTH * count / picture.total), style=style)
            legend.append(f"{glyph} {name} {count}  ", style=style)
        red = "bold red" if picture.failures else "dim"
        lines = [
            Text.assemble(
                ("  pagefork stress", "bold magenta"),
                f"  {picture.seconds:.0f} s, {picture.ops:,} operations, {picture.speed:,.0f} tokens/s  ",
                (f"{picture.failures} failures", red),
            ),
            bar,
            legend,
            Text(
                f"  {picture.sequences} sequences, {picture.waiting} waiting ({picture.waited:,} so far), "
                f"{picture.preemptions:,} preempted, {picture.exhausted:,} refused"
            ),
            Text(f"  {picture.prefix_hits:,} prefix hits, {picture.evictions:,} evictions", style="dim"),
        ]
        self._live.update(Group(*lines), refresh=True)


def best_view(out: TextIO) -> View:
    """The live one in a terminal that has rich."""
    if out.isatty():
        try:
            return LiveView()
        except ImportError:
            pass
    return PlainView(out)


async def film(camera: Camera, view: View) -> None:
    """Show the pool for ever."""
    while True:
        await anyio.sleep(view.every)
        view.show(camera.take())
