"""Two ways to show a beam search: as a live tree in a terminal, and as plain lines anywhere else."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Protocol, TextIO

from msgspec import Struct

from pagefork.runtime import Beam, BeamSearchParams, Past

Decode = Callable[[list[int]], str]


class Frame(Struct, frozen=True):
    """Where the search stands after a step. blocks: in use now; private: what caches of their own would hold now."""

    step: int
    steps: int
    running: list[Past]
    finished: list[Past]
    pruned: list[Past]
    blocks: int
    private: int
    copied_bytes: int
    tokens_per_s: float


class Result(Struct, frozen=True):
    """tokens: those of all beams together. unshared_bytes: KV that forks would copy if a cache could not be shared."""

    beams: list[Beam]
    tokens: int
    seconds: float
    peak: int
    unshared: int
    copied_bytes: int
    unshared_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class View(AbstractContextManager[None], Protocol):
    """`loading` is called from another thread, the rest from the event loop's."""

    def loading(self, stage: str, fraction: float) -> None: ...

    def begin(self, model: str, prompt: str, params: BeamSearchParams, decode: Decode) -> None: ...

    def step(self, frame: Frame) -> None: ...

    def end(self, result: Result) -> None: ...


def plain(out: TextIO) -> View:
    return PlainView(out)


def pretty() -> View:
    """The live view; plain lines where rich is not installed."""
    try:
        from beam_tree import TreeView
    except ImportError:
        return PlainView(sys.stdout)
    return TreeView()


def size(count: int) -> str:
    """A count of bytes, for people."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def saved(result: Result) -> int:
    """Percent of the blocks that private caches would have used."""
    return round(100 * (1 - result.peak / result.unshared)) if result.unshared else 0


def one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ↵ ", text)


def common(one: str, other: str) -> str:
    """What both texts start with, up to the end of a word."""
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    return one[: one.rfind(" ", 0, same) + 1]


class PlainView(View):
    """A line a step; the last words of each beam's text are what changes, so those are what it shows."""

    WORDS = 48

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._told: set[str] = set()
        self._decode: Decode | None = None

    def __exit__(self, *_: object) -> None:
        self._out.flush()

    def loading(self, stage: str, fraction: float) -> None:
        tenth = f"fetching the model: {int(fraction * 10) * 10} %" if stage == "fetch" else "loading the model"
        if tenth not in self._told:
            self._told.add(tenth)
            self._line(tenth)

    def begin(self, model: str, prompt: str, params: BeamSearchParams, decode: Decode) -> None:
        self._decode = decode
        self._line(f"{model}, {params.width} beams, up to {params.max_tokens} tokens each: {one_line(prompt)!r}")

    def step(self, frame: Frame) -> None:
        assert self._decode is not None
        best = frame.running[0] if frame.running else frame.finished[0]
        text = one_line(self._decode(best.tokens()))
        self._line(
            f"step {frame.step:>3}  beams {len(frame.running)}  pruned {len(frame.pruned)}  "
            f"finished {len(frame.finished)}  blocks {frame.blocks:>3} of {frame.private:>3}  "
            f"{best.logprob:8.3f}  {'…' + text[-self.WORDS :] if len(text) > self.WORDS else text}"
        )

    def end(self, result: Result) -> None:
        self._line("")
        for rank, beam in enumerate(result.beams, 1):
            mark = "finished" if beam.finished else "cut off"
            self._line(f"{rank}. score {beam.score:.4f}, logprob {beam.logprob:.3f}, {len(beam.tokens)} tokens, {mark}")
            self._line(f"   {one_line(beam.text.strip())}")
        self._line("")
        self._line(f"{result.tokens} tokens in {result.seconds:.2f} s: {result.tokens_per_s:.1f} tokens/s")
        self._line(
            f"blocks at peak: {result.peak}; one private cache per beam: {result.unshared} ({saved(result)} % saved)"
        )
        self._line(
            f"KV copied: {size(result.copied_bytes)}; a whole cache copied at each fork: {size(result.unshared_bytes)}"
        )

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)
