"""What the stress test does, drawn from seeds alone: one seed, one list of operations, whatever comes of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from msgspec import Struct, msgpack

WEIGHTS = {
    "open": 6,
    "append": 20,
    "generate": 20,
    "sample": 8,
    "fork": 14,
    "fork_running": 6,
    "close_running": 4,
    "race": 6,
    "truncate": 14,
    "topk": 8,
    "close": 8,
}
LONG = 0.05
HEADS = 4
HEAD = 18
"""Tokens that prompts may share, more than a whole number of the default blocks."""
WHOLE = 0.2
"""Share of the prompts that are a head and nothing else, so that all of it was computed before."""


class Load(Struct, frozen=True):
    """What kind of schedule. prefix: prompts share heads. priorities: sequences differ in theirs. faults: more is
    cancelled, sequences crash."""

    prefix: bool = False
    priorities: bool = False
    beams: bool = False
    faults: bool = False

    @property
    def weights(self) -> dict[str, int]:
        return WEIGHTS | ({"beams": 4} if self.beams else {}) | ({"crash": 4} if self.faults else {})

    @property
    def cancelled(self) -> float:
        """Share of the operations that are cancelled if they have not ended in time."""
        return 0.35 if self.faults else 0.2


class Op(Struct, frozen=True):
    """One operation. Fractions are of what there is when it runs: which sequence (`pick`), how long, where.

    tokens: to open with, to append. count: tokens to generate, children to fork. fraction: how much of it. seed: to
    sample. priority: of a sequence to open. deadline: seconds to wait for blocks, 0 to be refused at once, None for as
    long as it takes. cancel_after: passes of the event loop after which the operation is cancelled, or None.
    """

    kind: str
    pick: float
    tokens: tuple[int, ...]
    count: int
    fraction: float
    seed: int
    priority: float
    deadline: float | None
    cancel_after: int | None


def operations(seed: int, task: int, vocab: int, load: Load = Load()) -> Iterator[Op]:  # noqa: B008
    """The endless operations of one task."""
    draw = random.Random(f"{seed}/{task}")
    kinds, weights = list(load.weights), list(load.weights.values())
    shared = heads(seed, vocab)
    while True:
        kind = draw.choices(kinds, weights)[0]
        longest = 40 if draw.random() < LONG else 6
        tokens = tuple(draw.randrange(vocab) for _ in range(draw.randint(1, longest)))
        if load.prefix and kind == "open":
            tokens = draw.choice(shared) + (tokens if draw.random() >= WHOLE else ())
        yield Op(
            kind=kind,
            pick=draw.random(),
            tokens=tokens,
            count=draw.randint(1, 14),
            fraction=draw.random(),
            seed=draw.getrandbits(32),
            priority=draw.choice((-1.0, 0.0, 0.0, 0.5, 2.0)) if load.priorities else 0.0,
            deadline=_deadline(draw),
            cancel_after=_cancel_after(draw) if draw.random() < load.cancelled else None,
        )


def heads(seed: int, vocab: int) -> list[tuple[int, ...]]:
    """What the prompts of all tasks begin with."""
    draw = random.Random(f"{seed}/heads")
    return [tuple(draw.randrange(vocab) for _ in range(HEAD)) for _ in range(HEADS)]


def _deadline(draw: random.Random) -> float | None:
    chance, length = draw.random(), draw.uniform(0.001, 0.05)
    return 0.0 if chance < 0.25 else length if chance < 0.4 else None


def _cancel_after(draw: random.Random) -> int:
    """Most operations end within ten passes; some wait longer for a step, or for blocks."""
    return int(2 ** draw.uniform(0, 6)) - 1


class Digest:
    """A short name for everything that one task did, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, op: Op) -> None:
        self._hash.update(msgpack.encode(op))

    def value(self) -> str:
        return self._hash.hexdigest()


def combined(digests: list[Digest]) -> str:
    """One name for the schedules of all tasks."""
    return hashlib.sha256("".join(digest.value() for digest in digests).encode()).hexdigest()[:16]
