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
CANCELLED = 0.2
LONG = 0.05


class Op(Struct, frozen=True):
    """One operation. Fractions are of what there is when it runs: which sequence (`pick`), how long, where.

    tokens: to append. count: tokens to generate, children to fork. fraction: how much of it. seed: to sample.
    cancel_after: passes of the event loop after which the operation is cancelled, or None.
    """

    kind: str
    pick: float
    tokens: tuple[int, ...]
    count: int
    fraction: float
    seed: int
    cancel_after: int | None


def operations(seed: int, task: int, vocab: int) -> Iterator[Op]:
    """The endless operations of one task."""
    draw = random.Random(f"{seed}/{task}")
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    while True:
        longest = 40 if draw.random() < LONG else 6
        yield Op(
            kind=draw.choices(kinds, weights)[0],
            pick=draw.random(),
            tokens=tuple(draw.randrange(vocab) for _ in range(draw.randint(1, longest))),
            count=draw.randint(1, 14),
            fraction=draw.random(),
            seed=draw.getrandbits(32),
            # Most operations end within ten passes, some wait longer for a step.
            cancel_after=int(2 ** draw.uniform(0, 5)) - 1 if draw.random() < CANCELLED else None,
        )


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
