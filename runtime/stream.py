"""The tokens of one job on their way from the worker to the reader."""

from __future__ import annotations

from array import array
from typing import Any

from pagefork.runtime.errors import own
from pagefork.runtime.signal import Signal


class Stream:
    """The worker appends, the reader takes: a message a token would cost more than the token.

    A reader that lags finds several tokens at once. `read` is what the reader has taken, and so how long the
    sequence is for its owner; what was computed past it is dropped when the reader leaves. `computed`: how many
    positions hold valid K and V, set once no step in flight names the job. `limit`: positions below it are leased;
    at `renew_at` tokens read the reader asks for more. `serial` tells one generation of a sequence from the next.
    """

    __slots__ = (
        "computed",
        "error",
        "finish",
        "limit",
        "logprobs",
        "read",
        "renew_at",
        "serial",
        "signal",
        "tokens",
        "top",
        "waiting",
    )

    def __init__(self, serial: int = 0) -> None:
        self.serial = serial
        self.tokens = array("i")
        self.logprobs: list[float] = []
        self.top: list[tuple[int, float]] = []
        self.finish: str | None = None
        self.error: BaseException | None = None
        self.computed: int | None = None
        self.limit = 0
        self.read = 0
        self.renew_at: int | None = None
        self.waiting = False
        self.signal = Signal()

    @property
    def done(self) -> bool:
        """No more tokens will come."""
        return self.finish is not None or self.error is not None

    def fail(self, error: BaseException) -> None:
        """No more tokens will come, since `error` happened."""
        self.end(error=error)

    def push(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.signal.set()

    def end(self, finish: str | None = None, error: BaseException | None = None, top: Any = None) -> None:
        """Say why no more tokens come; the first reason counts."""
        if not self.done:
            self.finish, self.error = finish, error
            self.top = top or []
            self.signal.set()

    async def wait(self) -> None:
        """Wait until no more tokens come. Raises the stream's error."""
        while not self.done:
            await self.signal.wait()
        if self.error is not None:
            raise own(self.error)

    def cut(self) -> None:
        """Drop what was not read; the reader finds the end."""
        del self.tokens[self.read :], self.logprobs[self.read :]
        self.end("cancelled")
