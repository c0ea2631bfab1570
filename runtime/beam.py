"""Beam search on forks: beams that share a past share its blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any, Literal

import anyio
from msgspec import Struct

from pagefork.runtime.arguments import real, token_ids, whole
from pagefork.runtime.errors import InvalidRequest
from pagefork.runtime.messages import Append, Close, Fork, TopK
from pagefork.runtime.sequence import SequenceActor


class BeamSearchParams(Struct, frozen=True, kw_only=True):
    """Names and meaning are those of Hugging Face's `generate`.

    A finished beam's score is logprob / length ** length_penalty, its end token counted. early_stopping: True ends
    at `width` finished beams; False when no running beam could do better at its present length; "never" when none
    could at any length up to max_tokens.
    """

    width: int = 4
    max_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise InvalidRequest where a field is out of its range."""
        whole("width", self.width, 1, 1024)
        whole("max_tokens", self.max_tokens, 1)
        real("length_penalty", self.length_penalty, "finite")
        token_ids("stop_tokens", self.stop_tokens)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequest(f'early_stopping must be True, False or "never", not {self.early_stopping!r}')


class Beam(Struct, frozen=True):
    """A hypothesis. tokens: the generated ids, the end token included; text without it. logprob: their sum."""

    tokens: list[int]
    text: str
    score: float
    logprob: float
    finished: bool


class Past:
    """A hypothesis as a chain of last tokens, so that growing one costs the same at any length."""

    __slots__ = ("length", "logprob", "parent", "token")

    def __init__(self, parent: Past | None, token: int, logprob: float) -> None:
        self.parent = parent
        self.token = token
        self.logprob = logprob
        self.length: int = 1 if parent is None else parent.length + 1

    def tokens(self) -> list[int]:
        out: list[int] = []
        node: Past | None = self
        while node is not None:
            out.append(node.token)
            node = node.parent
        return out[::-1]


class Live(Struct, frozen=True):
    """A running beam: its sequence and what it generated so far (None before the first token)."""

    actor: SequenceActor
    past: Past | None


OnStep = Callable[[int, list[Past], list[Past]], Any]
"""Called after each step with its number, the running beams best first and the finished ones best first."""


class Ranking:
    """The finished hypotheses, the best `width` of them."""

    def __init__(self, params: BeamSearchParams) -> None:
        self._params = params
        self._heap: list[tuple[float, int, Past, bool]] = []
        self._count = 0

    def add(self, past: Past, finished: bool) -> None:
        score = past.logprob / past.length**self._params.length_penalty
        entry = (score, -self._count, past, finished)
        self._count += 1
        if len(self._heap) < self._params.width:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    @property
    def full(self) -> bool:
        return len(self._heap) == self._params.width

    @property
    def worst(self) -> float:
        return self._heap[0][0]

    def best_first(self) -> list[tuple[float, Past, bool]]:
        return [(score, past, finished) for score, _, past, finished in sorted(self._heap, reverse=True)]

    def settled(self, best_running: Past) -> bool:
        """Whether the search may stop: no running beam can beat the worst of `width` finished ones, as far as asked."""
        if not self.full:
            return False
        params = self._params
        if params.early_stopping is True:
            return True
        length = best_running.length
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        return bool(best_running.logprob / length**params.length_penalty <= self.worst)


async def search(
    root: SequenceActor,
    params: BeamSearchParams,
    stop: frozenset[int],
    max_tokens: int,
    on_step: OnStep | None = None,
) -> list[tuple[float, Past, bool]]:
    """Search from a sequence that holds the prompt, and close it. Returns (score, hypothesis, finished), best first.

    The algorithm is that of transformers' vectorised `_beam_search`: each step ranks the best
    `max(2, 1 + end tokens) * width` continuations; those of the first `width` that end are finished, the best `width`
    that do not end go on.
    """
    ranking = Ranking(params)
    live = [Live(root, None)]
    keep = max(2, 1 + len(stop)) * params.width
    try:
        for step in range(1, max_tokens + 1):
            candidates = _rank(live, await _tops(live, keep), keep)
            last = step == max_tokens
            for past, _ in candidates[: params.width]:
                if past.token in stop or last:
                    ranking.add(past, past.token in stop)
            going = [(past, parent) for past, parent in candidates if past.token not in stop][: params.width]
            if on_step is not None:
                on_step(step, [past for past, _ in going], [past for _, past, _ in ranking.best_first()])
            if last or not going or ranking.settled(going[0][0]):
                break
            live = await _regrow(live, going)
    finally:
        for beam in live:
            beam.actor.post(Close())
    return ranking.best_first()


async def _tops(live: list[Live], k: int) -> list[list[tuple[int, float]]]:
    tops: list[list[tuple[int, float]]] = [[] for _ in live]

    async def top(index: int) -> None:
        tops[index] = await live[index].actor.ask(TopK(k))

    await _each(top, range(len(live)))
    return tops


def _rank(live: list[Live], tops: list[list[tuple[int, float]]], keep: int) -> list[tuple[Past, int]]:
    """The best continuations of all beams with the beam that each continues; equal ones in beam order."""
    scored = [
        ((beam.past.logprob if beam.past else 0.0) + logprob, token, index)
        for index, (beam, top) in enumerate(zip(live, tops, strict=True))
        for token, logprob in top
    ]
    scored.sort(key=lambda entry: -entry[0])
    return [(Past(live[index].past, token, total), index) for total, token, index in scored[:keep]]


async def _regrow(live: list[Live], going: list[tuple[Past, int]]) -> list[Live]:
    """The next beams: a beam that goes on once keeps its sequence, further children fork it, the rest close."""
    children: dict[int, list[Past]] = {}
    for past, index in going:
        children.setdefault(index, []).append(past)
    for index, beam in enumerate(live):
        if index not in children:
            beam.actor.post(Close())
    grown: list[Live] = []

    async def grow(index: int) -> None:
        parent, pasts = live[index].actor, children[index]
        actors = [parent]
        grown.append(Live(parent, pasts[0]))
        if len(pasts) > 1:
            actors += await parent.ask(Fork(len(pasts) - 1), late=close_all)
            grown.extend(Live(actor, past) for actor, past in zip(actors[1:], pasts[1:], strict=True))
        for actor, past in zip(actors, pasts, strict=True):
            await actor.ask(Append([past.token]))

    try:
        await _each(grow, children)
    except BaseException:
        close_all(beam.actor for beam in grown)
        raise
    order = {id(past): rank for rank, (past, _) in enumerate(going)}
    return sorted(grown, key=lambda beam: order[id(beam.past)])


async def _each(function: Callable[[int], Any], indices: Iterable[int]) -> None:
    """Run `function` on all indices at once; the first error, bare, once the others are cancelled."""
    failed: list[BaseException] = []

    async def run(index: int, scope: anyio.CancelScope) -> None:
        try:
            await function(index)
        except Exception as error:
            failed.append(error)
            scope.cancel()

    async with anyio.create_task_group() as group:
        for index in indices:
            group.start_soon(run, index, group.cancel_scope)
    if failed:
        raise failed[0]


def close_all(actors: Iterable[SequenceActor]) -> None:
    for actor in actors:
        actor.post(Close())
