"""The wake-up of one waiting task, at the price of the event loop's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

import anyio.lowlevel


class Signal:
    """`set` wakes the one task in `wait`; both in the event loop's thread.

    Nothing is kept: who waits looks for what it waits for before each `wait`, in a loop. Made for the path of every
    token: it parks on an asyncio future or a trio task directly, where an `anyio.Event` would be made and looked up
    for each wait.
    """

    __slots__ = ("_park", "_waiter")

    def __init__(self, like: Signal | None = None) -> None:
        """`like`: one of the same event loop, which need not be looked up again then."""
        self._waiter: Any = None
        self._park: Callable[[], Any] | None = None if like is None else like._park

    def set(self) -> None:
        """Never blocks."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def wait(self) -> Awaitable[None]:
        """What ends with the next `set`; to be awaited at once. Cancellation leaves the signal as it is."""
        park = self._park
        if park is None:
            loop: Any = anyio.lowlevel.current_token().native_token
            asynchronous = isinstance(loop, asyncio.AbstractEventLoop)
            self._park = park = partial(asyncio.Future, loop=loop) if asynchronous else _Parked
        waiter: Awaitable[None] = park()
        self._waiter = waiter
        return waiter


class _Parked:
    """A task of trio that waits, with as much of a future's face as a Signal needs."""

    __slots__ = ("_done", "_task")

    def __init__(self) -> None:
        import trio

        self._task = trio.lowlevel.current_task()
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, _: None) -> None:
        import trio

        self._done = True
        trio.lowlevel.reschedule(self._task)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._parked().__await__()

    async def _parked(self) -> None:
        import trio

        def abort(_: Any) -> Any:
            self._done = True
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
