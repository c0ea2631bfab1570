"""Actor: one task, one bounded mailbox, private state.

Two lanes: `tell` and `ask` wait while the mailbox is full; `post` never waits and is served first, so that a
full mailbox cannot block a release or a cancel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from pagefork.runtime.errors import DeadlineExceeded, PageforkError, WorkerDied, own
from pagefork.runtime.messages import Message
from pagefork.runtime.signal import Signal

IN_A_ROW = 8
"""Messages that an actor serves before the tasks beside it have their turn."""


class Reply:
    """The answer to one `ask`: a value, an error, or withdrawn."""

    __slots__ = ("_late", "_signal", "done", "error", "value", "withdrawn")

    def __init__(self, like: Signal | None = None) -> None:
        self._signal = Signal(like)
        self.done = False
        self.withdrawn = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._late: Callable[[Any], None] | None = None

    def set(self, value: Any) -> None:
        if not self.done:
            self.value, self.done = value, True
            self._signal.set()
            if self._late is not None:
                self._late(value)

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.error, self.done = error, True
            self._signal.set()

    def withdraw(self) -> None:
        if not self.done:
            self.withdrawn = self.done = True
            self._signal.set()

    def abandon(self, late: Callable[[Any], None]) -> None:
        """Nobody waits any more: `late` takes the value, be it here already or yet to come."""
        if not self.done:
            self._late = late
        elif self.error is None and not self.withdrawn:
            late(self.value)

    async def settled(self) -> None:
        while not self.done:
            await self._signal.wait()

    def result(self) -> Any:
        if self.error is not None:
            raise own(self.error)
        return self.value


class Envelope:
    """A message on its way, with the place for its answer: a Reply for one, a Stream for many, or None."""

    __slots__ = ("message", "reply")

    def __init__(self, message: Message, reply: Any = None) -> None:
        self.message = message
        self.reply = reply


class Actor:
    """Subclasses define `handle`; the runtime runs `run` as a task and sees to start, stop and crashes."""

    def __init__(self, name: str, capacity: int = 1024) -> None:
        self.name = name
        self.dead: PageforkError | None = None
        self.serving: Envelope | None = None
        self._capacity = capacity
        self._urgent: deque[Envelope] = deque()
        self._normal: deque[Envelope] = deque()
        self._mail = Signal()
        self._row = 0
        self._room: deque[anyio.Event] = deque()

    @property
    def queued(self) -> int:
        """How many messages wait in the mailbox."""
        return len(self._urgent) + len(self._normal)

    async def handle(self, message: Message) -> Any:
        """Serve one message; what it returns answers an `ask`. A PageforkError goes to the asker."""
        raise PageforkError(f"{self.name} does not take {type(message).__name__}")

    def epitaph(self, error: BaseException | None) -> PageforkError:
        """What `ask` raises once the actor crashed with `error`, or has stopped."""
        if error is not None:
            return WorkerDied(f"the {self.name} crashed: {error!r}; leave this runtime and open another")
        return WorkerDied(f"the {self.name} has stopped; open another runtime")

    async def run(self) -> None:
        """Serve messages until cancelled or crashed. Then every waiting and later `ask` fails at once."""
        try:
            while True:
                await self.turn()
        except Exception as error:
            self.die(self.epitaph(error), error)
            raise
        finally:
            self.die(self.epitaph(None))

    async def turn(self) -> None:
        """Wait for a message and serve it."""
        await self.serve(await self.next())

    async def serve(self, envelope: Envelope) -> None:
        self.serving = envelope
        try:
            value = await self.handle(envelope.message)
        except PageforkError as error:
            if envelope.reply is None:
                raise
            envelope.reply.fail(error)
            self.serving = None
        except Exception as error:
            self.die(self.epitaph(error), error)
            raise
        else:
            if envelope.reply is not None:
                envelope.reply.set(value)
            self.serving = None

    async def next(self) -> Envelope:
        """The next envelope, urgent ones first; a full mailbox does not hold up the event loop."""
        self._row += 1
        if self._row > IN_A_ROW:
            self._row = 1
            await anyio.lowlevel.checkpoint()
        while True:
            envelope = self.take()
            if envelope is not None:
                return envelope
            await self._mail.wait()

    def take(self) -> Envelope | None:
        """The next envelope if there is one; withdrawn ones are passed over."""
        while self._urgent or self._normal:
            if self._urgent:
                envelope = self._urgent.popleft()
            else:
                envelope = self._normal.popleft()
                if self._room:
                    self._room.popleft().set()
            if envelope.reply is None or not envelope.reply.done:
                return envelope
        return None

    def post(self, message: Message) -> None:
        """Send without waiting, on the urgent lane. A dead actor takes nothing."""
        if self.dead is None:
            self.urge(Envelope(message))

    def urge(self, envelope: Envelope) -> None:
        """Put an envelope on the urgent lane."""
        self._urgent.append(envelope)
        self._mail.set()

    async def tell(self, message: Message) -> None:
        """Send; waits while the mailbox is full. Cancelled while waiting, nothing was sent."""
        await self._put(Envelope(message))

    async def ask(
        self,
        message: Message,
        *,
        deadline: float | None = None,
        urgent: bool = False,
        late: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send and wait for the answer.

        Cancelled or past its deadline (seconds), the request is withdrawn and its end awaited, which is prompt:
        then either it did nothing, or it was done and `late` is called with the answer before the cancellation
        goes on. Raises DeadlineExceeded, and what the actor raises; WorkerDied at once if it is dead.
        """
        if deadline is None:
            return await self._exchange(message, urgent, late)
        with anyio.move_on_after(deadline):
            return await self._exchange(message, urgent, late)
        raise DeadlineExceeded(
            f"{self.name} did not answer {type(message).__name__} within {deadline} s; try again later"
        )

    async def _exchange(self, message: Message, urgent: bool, late: Callable[[Any], None] | None) -> Any:
        reply = Reply(self._mail)
        envelope = Envelope(message, reply)
        if urgent:
            self._check()
            self.urge(envelope)
        else:
            await self._put(envelope)
        try:
            await reply.settled()
        except anyio.get_cancelled_exc_class():
            if late is not None:
                reply.abandon(late)
            self.withdraw(envelope)
            with anyio.CancelScope(shield=True):
                await reply.settled()
            raise
        if reply.withdrawn:
            raise WorkerDied(f"{self.name} withdrew the request")
        return reply.result()

    def withdraw(self, envelope: Envelope) -> None:
        """The asker left: drop the request if it has not begun. Actors whose messages take time do more."""
        assert envelope.reply is not None
        if envelope in self._urgent or envelope in self._normal:
            envelope.reply.withdraw()

    def die(self, reason: PageforkError, cause: BaseException | None = None) -> None:
        """Fail all that waits, and all that comes later. Only the first reason counts."""
        if self.dead is not None:
            return
        self.dead = reason
        reason.__cause__ = cause
        serving = [] if self.serving is None else [self.serving]
        for envelope in (*serving, *self._urgent, *self._normal):
            if envelope.reply is not None:
                envelope.reply.fail(reason)
        self._urgent.clear()
        self._normal.clear()
        while self._room:
            self._room.popleft().set()

    def _check(self) -> None:
        if self.dead is not None:
            raise own(self.dead)

    async def _put(self, envelope: Envelope) -> None:
        self._check()
        while len(self._normal) >= self._capacity:
            room = anyio.Event()
            self._room.append(room)
            try:
                await room.wait()
            except BaseException:
                if room.is_set():
                    self._pass_on()
                else:
                    self._room.remove(room)
                raise
            self._check()
        self._normal.append(envelope)
        self._mail.set()

    def _pass_on(self) -> None:
        """A waiter for room left after it was called: call the next."""
        if self._room:
            self._room.popleft().set()
