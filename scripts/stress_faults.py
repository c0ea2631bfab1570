"""What goes wrong on purpose in the stress test: cancellations, sequences that crash, steps that retire late."""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Any

import anyio
import anyio.lowlevel

from pagefork.runtime import Runtime, Sequence

LATE = 0.012
"""Seconds that a delayed step is late at most."""
PAUSE = 0.15
"""Seconds between two delays at most."""

# Where a sequence's actor and its work may crash, and whether also after what is done there. Between the making of
# children and the answer that names them nothing can go wrong, so no crash is put there.
_PLACES = {
    "handle": False,
    "_fork": False,
    "_share": False,
    "_work.held.ask": True,
    "_work._start": True,
    "_work.stop": True,
    "_work.compute": True,
    "_work._extend": True,
}


ON_PURPOSE = "on purpose"


class Crash(Exception):
    """The defect that `fuse` puts into a sequence."""


def hush() -> None:
    """Keep the crashes that are meant out of the log."""
    logging.getLogger("pagefork").addFilter(lambda record: ON_PURPOSE not in record.getMessage())


async def passes(count: int) -> None:
    """Let the event loop go round `count` times."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def cancelled(act: Callable[[], Awaitable[None]], after: int) -> bool:
    """Run `act`, cancelled after some passes of the event loop; whether that came before its end."""

    async def cancel(scope: anyio.CancelScope) -> None:
        await passes(after)
        scope.cancel()

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(cancel, scope)
            await act()
        group.cancel_scope.cancel()
    return scope.cancelled_caught


def fuse(seq: Sequence, length: int) -> None:
    """From now on the sequence's actor crashes when it has come past `length` places where it could."""
    actor: Any = seq._actor

    def burn() -> None:
        nonlocal length
        length -= 1
        if length < 0:
            raise Crash(f"{ON_PURPOSE}, in {seq!r}")

    def put(place: str, after: bool) -> None:
        part, _, name = place.rpartition(".")
        target = attrgetter(part)(actor) if part else actor
        function = getattr(target, name)
        assert inspect.iscoroutinefunction(function)

        async def lit(*arguments: Any, **named: Any) -> Any:
            burn()
            value = await function(*arguments, **named)
            if after:
                burn()
            return value

        setattr(target, name, lit)

    for place, after in _PLACES.items():
        put(place, after)


async def delay_steps(rt: Runtime, seed: int) -> None:
    """Hold the engine up now and then, so that steps retire late and out of phase with what is freed meanwhile."""
    draw = random.Random(f"{seed}/delays")
    engine = rt._house.worker._engine
    while True:
        await anyio.sleep(draw.uniform(0, PAUSE))
        late = draw.uniform(0, LATE)
        engine.call(lambda _, late=late: time.sleep(late), lambda value, error: None)  # type: ignore[misc]
