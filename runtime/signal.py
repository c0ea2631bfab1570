"""An event for one waiter that can be set again and again, at the price of the event loop's own wake-up."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio.lowlevel


class Signal:
    """`set` wakes the one task in `wait`, or lets the next `wait` pass. Both in the event loop's thread.

    Made for the path of every token: it parks on an asyncio future or a trio task directly, where an `anyio.Event`
    would be made and looked up for each wait.
    """

    __slots__ = ("_loop", "_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: Any = None
        self._loop: Any = None

    def set(self) -> None:
        """Never blocks."""
        self._set = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if isinstance(waiter, asyncio.Future):
                if not waiter.done():
                    waiter.set_result(None)
            else:
                _reschedule(waiter)

    async def wait(self) -> None:
        """Wait until set since the last wait. Cancellation leaves it as it is."""
        if not self._set:
            if self._loop is None:
                self._loop = anyio.lowlevel.current_token().native_token
            if isinstance(self._loop, asyncio.AbstractEventLoop):
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            else:
                await self._wait_in_trio()
        self._set = False

    async def _wait_in_trio(self) -> None:
        import trio

        def abort(_: Any) -> Any:
            self._waiter = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._waiter = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)


def _reschedule(task: Any) -> None:
    import trio

    trio.lowlevel.reschedule(task)
