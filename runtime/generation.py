"""A running generation as its reader sees it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator

import anyio
from msgspec import Struct

from pagefork.runtime.errors import SequenceBusy, SequenceClosed, own
from pagefork.runtime.messages import Generate, Renew, Settle
from pagefork.runtime.sequence import SequenceActor
from pagefork.runtime.stream import Stream
from pagefork.runtime.tokenizer import TextStream, Tokenizer


class Step(Struct, frozen=True, gc=False):
    """One generated token.

    text: what it adds to the text; "" while a character is incomplete, for an end token, and without a tokenizer.
    logprob: natural log of its probability under the model's own distribution (temperature 1, no filters).
    finish_reason: None before the last token; then "stop" (this is an end token) or "length".
    """

    token: int
    text: str
    logprob: float
    finish_reason: str | None = None


class Generation(AsyncIterator[Step]):
    """Iterates over Steps; made by `Sequence.generate`.

    A token belongs to the sequence once it was taken from here. Leaving the loop early, `aclose()`, dropping the
    object, or changing the sequence otherwise ends the generation at the last token taken. Cancelled while waiting,
    `__anext__` took no token, and iteration may go on.
    """

    def __init__(self, actor: SequenceActor, request: Generate, tokenizer: Tokenizer | None) -> None:
        self._actor = actor
        self._request = request
        self._stream: Stream | None = None
        self._closed = False
        self._starting: anyio.CancelScope | None = None
        self._text: TextStream | None = tokenizer.stream() if tokenizer is not None else None
        self._thread = threading.get_ident()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Step:
        """The next token. Raises InvalidRequest for an empty sequence, PoolExhausted, SequenceClosed, SequenceBusy,
        ContextOverflow, WorkerDied; after an error the generation is over."""
        stream = self._stream
        if stream is None or stream.waiting or self._closed:
            stream = await self._begin()
        while stream.read >= len(stream.tokens):
            if stream.done:
                raise self._over(stream)
            stream.waiting = True
            try:
                await stream.signal.wait()
            finally:
                stream.waiting = False
        return self._take(stream)

    async def aclose(self) -> None:
        """End the generation at the last token taken; returns when its blocks past that are free.

        Idempotent. Cancelled, it still ends.
        """
        stream = None if self._closed else self._stream
        self._leave()
        if self._starting is not None:
            self._starting.cancel()
        if stream is not None:
            with contextlib.suppress(SequenceClosed):
                await self._actor.ask(Settle(stream.serial), urgent=True)

    def __del__(self) -> None:
        # Collected in another thread, the sequence's next operation ends the generation instead.
        if threading.get_ident() == self._thread:
            self._leave()

    async def _begin(self) -> Stream:
        """The stream for the first token; after the last there is none, nor while another task waits for one."""
        if self._closed:
            raise StopAsyncIteration
        if self._starting is not None or self._stream is not None:
            raise SequenceBusy("another task waits for the next token of this generation; let one task iterate")
        return await self._start()

    async def _start(self) -> Stream:
        stream: Stream | None = None
        try:
            with anyio.CancelScope() as self._starting:
                stream = await self._actor.ask(self._request, late=self._abandon)
        finally:
            self._starting = None
        if stream is None or self._closed:
            if stream is not None:
                self._abandon(stream)
            raise StopAsyncIteration
        self._stream = stream
        return stream

    def _take(self, stream: Stream) -> Step:
        read = stream.read
        token, logprob = stream.tokens[read], stream.logprobs[read]
        stream.read = read = read + 1
        finish = None
        if stream.finish is not None and read == len(stream.tokens):
            finish = stream.finish
            self._leave()
        elif stream.renew_at is not None and read >= stream.renew_at:
            stream.renew_at = None
            self._actor.post(Renew())
        if self._text is None:
            return Step(token, "", logprob, finish)
        text = "" if finish == "stop" else self._text.add(token)
        if finish is not None:
            text += self._text.flush()
        return Step(token, text, logprob, finish)

    def _over(self, stream: Stream) -> BaseException:
        """Why there are no more tokens; what a generation that failed held goes back."""
        if stream.error is not None:
            self._abandon(stream)
            return own(stream.error)
        self._leave()
        return StopAsyncIteration()

    def _leave(self) -> None:
        if self._stream is not None and not self._closed:
            self._abandon(self._stream)
        self._closed = True

    def _abandon(self, stream: Stream) -> None:
        self._actor.post(Settle(stream.serial))
