"""A service in simulated time: what its sequences ask of pool, ledger and arbiter, and what comes of it."""

from __future__ import annotations

import heapq
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagefork.cache.arbiter import Arbiter, Event, Expired, Granted, Preempt, Refused, Waiting, Yield
from pagefork.cache.blocks import BlockPool
from pagefork.cache.grant import Grant
from pagefork.cache.ledger import Ledger

SECONDS_PER_TOKEN = 0.03
PREFILL_PER_SECOND = 8000
DEADLINE = 60.0
BEAM_STEP = 4
"""Tokens after which a beam group is ranked anew: fewer than a block, so that beams part inside of blocks."""


@dataclass(frozen=True)
class Trace:
    """The shares and sizes that a workload is drawn from. Lengths in tokens, times in seconds; `(median, sigma)` of
    lognormal distributions, whose tails are heavy."""

    prompt: tuple[float, float] = (250, 1.0)
    output: tuple[float, float] = (60, 0.9)
    longest: int = 8192
    systems: int = 64
    """System prompts, that of rank r in proportion to 1/r."""
    with_system: float = 0.4
    beams: float = 0.01
    beam_width: int = 4
    samples: float = 0.04
    more_turns: float = 0.2
    thinking: float = 4.0
    closed_early: float = 0.05
    priorities: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0, 1, -1, -1)


@dataclass(eq=False, slots=True)
class Sequence:
    owner: int
    tokens: array[int]
    target: int
    priority: int
    computed: int = 0
    room: int = 0
    fork: int = 0
    turns: int = 0
    ticket: int | None = None
    asked: float | None = None
    epoch: int = 0
    active: bool = False
    group: Group | None = None


@dataclass(eq=False, slots=True)
class Group:
    """Beams that are ranked together when all have come as far."""

    live: list[Sequence]
    ready: list[Sequence] = field(default_factory=list)


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    operations: int = 0
    cpu_seconds: float = 0.0
    """Processor time of the run: operations, and the simulation around them."""


class Simulation:
    """One run: `sequences` Poisson arrivals at the rate that asks for `load` times the pool, until all are gone."""

    def __init__(self, blocks: int, sequences: int, block_size: int, seed: int, load: float, trace: Trace) -> None:
        self.ledger = Ledger(BlockPool(blocks, block_size))
        self.arbiter = Arbiter(self.ledger)
        self.report = Report()
        self._size = block_size
        self._left = sequences
        self._trace = trace
        self._draw = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any, int | None]] = []
        self._serial = 0
        self._due = self._ticking = False
        self._owners = 0
        self._live: dict[int, Sequence] = {}
        self._tickets: dict[int, Sequence] = {}
        self._noise = array("i", (self._draw.randrange(1, 50_000) for _ in range(1 << 18)))
        self._systems = [self._random(self._draw.randint(128, 1024)) for _ in range(trace.systems)]
        self._weights = [1 / (rank + 1) for rank in range(trace.systems)]
        self._rate = load * blocks / self._demand()
        self._sample_every = sequences / self._rate / 100
        self._arrivals_end = sequences / self._rate

    def run(self) -> Report:
        start = time.process_time()
        self._at(0.0, self._arrive)
        self._at(0.3 * self._arrivals_end, self._sample)
        while self._events or self._tickets:
            due = self.arbiter.next_deadline
            if due is not None and (not self._events or due < self._events[0][0]):
                self._now = max(self._now, due)
                self._tick()
                continue
            self._now, _, handler, sequence, epoch = heapq.heappop(self._events)
            if sequence is None or epoch is None or sequence.epoch == epoch:
                handler(sequence)
        self.report.cpu_seconds = time.process_time() - start
        self.ledger.check()
        self.arbiter.check()
        if self.ledger.available != self.ledger.pool.num_blocks or self.ledger.owners:
            raise AssertionError(f"{self.ledger.referenced} blocks are held by nobody that lives")
        return self.report

    # The workload

    def _random(self, n: int) -> array[int]:
        start = self._draw.randrange(len(self._noise) - n)
        return self._noise[start : start + n]

    def _length(self, shape: tuple[float, float]) -> int:
        median, sigma = shape
        return max(1, min(self._trace.longest, int(self._draw.lognormvariate(math.log(median), sigma))))

    def _demand(self) -> float:
        """Block seconds that a sequence asks for, the mean of many."""
        total = 0.0
        for _ in range(4000):
            prompt, output = self._length(self._trace.prompt), self._length(self._trace.output)
            seconds = output * SECONDS_PER_TOKEN + self._trace.more_turns * self._trace.thinking
            total += (prompt + output / 2) / self._size * seconds
        return total / 4000

    def _arrive(self, _: None) -> None:
        trace, draw = self._trace, self._draw
        self._left -= 1
        if self._left:
            self._at(draw.expovariate(self._rate), self._arrive)
        tokens = self._random(self._length(trace.prompt))
        if draw.random() < trace.with_system:
            tokens = draw.choices(self._systems, self._weights)[0] + tokens
        sequence = self._new(tokens, len(tokens) + self._length(trace.output), draw.choice(trace.priorities))
        kind = draw.random()
        if kind < trace.beams:
            sequence.group = Group([sequence])
        elif kind < trace.beams + trace.samples:
            sequence.fork = draw.randint(1, 3)
        while draw.random() < trace.more_turns:
            sequence.turns += 1
        if draw.random() < trace.closed_early:
            self._at(draw.expovariate(0.5), self._close_early, sequence, surely=True)
        self._ask(sequence)

    def _new(self, tokens: array[int], target: int, priority: int) -> Sequence:
        self._owners += 1
        sequence = self._live[self._owners] = Sequence(self._owners, tokens, target, priority)
        return sequence

    def _step(self, sequence: Sequence) -> None:
        """The tokens for which there was room have been computed."""
        sequence.tokens.extend(self._random(sequence.room - len(sequence.tokens)))
        sequence.computed = len(sequence.tokens)
        self._count(self.ledger.publish, sequence.owner, sequence.tokens, sequence.computed)
        if sequence.group is not None:
            self._rank(sequence, sequence.group)
            return
        epoch = sequence.epoch
        if sequence.fork:
            for child in self._fork(sequence, sequence.fork):
                child.target = len(child.tokens) + self._length(self._trace.output)
                self._ask(child)
            sequence.fork = 0
        if sequence.epoch != epoch:
            return  # preempted for its own children, it has asked again already
        if len(sequence.tokens) < sequence.target:
            self._ask(sequence)
        elif sequence.turns:
            sequence.turns -= 1
            sequence.active = False
            self._count(self.arbiter.idle, sequence.owner, self._now)
            self._at(self._draw.expovariate(1 / self._trace.thinking), self._next_turn, sequence)
            self._tick()
        else:
            self._close(sequence)

    def _next_turn(self, sequence: Sequence) -> None:
        sequence.tokens.extend(self._random(self._length((60, 1.0))))
        sequence.target = len(sequence.tokens) + self._length(self._trace.output)
        self._ask(sequence)

    def _fork(self, sequence: Sequence, count: int) -> list[Sequence]:
        length = len(sequence.tokens)
        children = [self._new(sequence.tokens[:], sequence.target, sequence.priority) for _ in range(count)]
        self._count(self.arbiter.share, sequence.owner, [child.owner for child in children], length, self._now)
        for child in children:
            child.computed = sequence.computed
        self.report.counts["forks"] += count
        return children

    def _rank(self, sequence: Sequence, group: Group) -> None:
        """A beam has come as far as the others will; when all have, some go on, once or more, and some are dropped."""
        group.ready.append(sequence)
        if len(group.ready) < len(group.live):
            return
        beams, group.ready = group.ready, []
        if len(sequence.tokens) >= sequence.target:
            for beam in beams:
                self._close(beam)
            return
        epochs = {beam.owner: beam.epoch for beam in beams}
        heirs = Counter(self._draw.choices(range(len(beams)), k=self._trace.beam_width))
        group.live = []
        for index, beam in enumerate(beams):
            if not heirs[index]:
                self._close(beam)
                continue
            group.live.append(beam)
            children = self._fork(beam, heirs[index] - 1) if heirs[index] > 1 else []
            for child in children:
                child.group = group
            group.live += children
        for beam in list(group.live):
            # Who was preempted meanwhile has asked again already, or was closed.
            if beam.epoch == epochs.get(beam.owner, 0):
                self._ask(beam)

    def _close_early(self, sequence: Sequence) -> None:
        if sequence.owner not in self._live:
            return
        self.report.counts["closed early"] += 1
        for one in list(sequence.group.live) if sequence.group is not None else [sequence]:
            if one.ticket is not None:
                self._count(self.arbiter.withdraw, one.ticket)
                del self._tickets[one.ticket]
                one.ticket = None
            if one.owner in self._live:
                self._close(one)

    def _close(self, sequence: Sequence) -> None:
        del self._live[sequence.owner]
        sequence.epoch += 1
        if sequence.ticket is not None:
            self._tickets.pop(sequence.ticket, None)
            sequence.ticket = None
        self._count(self.arbiter.forget, sequence.owner)
        self._tick()

    # What they ask for

    def _ask(self, sequence: Sequence) -> None:
        """Room up to the end of a block, so that few slots are empty and one request serves many tokens."""
        known = len(sequence.tokens)
        ahead = BEAM_STEP if sequence.group is not None else self._size - known % self._size
        sequence.room = max(known, min(known + ahead, sequence.target))
        sequence.active = True
        if sequence.asked is None:
            sequence.asked = self._now
        answer = self._count(
            self.arbiter.request,
            sequence.owner,
            sequence.room,
            min(sequence.computed, known - 1) if sequence.computed >= sequence.room else sequence.computed,
            sequence.tokens,
            now=self._now,
            priority=sequence.priority,
            deadline=self._now + DEADLINE,
        )
        match answer:
            case Granted(grant=grant):
                self._granted(sequence, grant)
            case Waiting(ticket=ticket):
                sequence.ticket = ticket
                self._tickets[ticket] = sequence
                self._tick()
            case Refused():
                self.report.counts["refused"] += 1
                self._give_up(sequence)
            case Yield():
                self._preempted(sequence)

    def _granted(self, sequence: Sequence, grant: Grant) -> None:
        report = self.report
        if grant.copies:
            self._count(self.ledger.copied, sequence.owner)
        if sequence.asked is not None:
            report.waits.append(self._now - sequence.asked)
            sequence.asked = None
        sequence.computed = max(sequence.computed, grant.hit)
        known = len(sequence.tokens)
        seconds = (known - sequence.computed) / PREFILL_PER_SECOND + (sequence.room - known) * SECONDS_PER_TOKEN
        report.counts["prefilled"] += known - sequence.computed
        self._at(seconds, self._step, sequence)

    def _preempted(self, sequence: Sequence) -> None:
        """It lets go of everything; its tokens stay, and if it was at work it asks again at once."""
        if sequence.ticket is not None:
            self._tickets.pop(sequence.ticket, None)
            sequence.ticket = None
        sequence.computed = 0
        self._count(self.arbiter.release, sequence.owner)
        group = sequence.group
        if sequence.active and not (group is not None and sequence in group.ready):
            sequence.epoch += 1
            self._ask(sequence)
        self._tick()

    def _give_up(self, sequence: Sequence) -> None:
        for one in list(sequence.group.live) if sequence.group is not None else [sequence]:
            if one.owner in self._live:
                self._close(one)

    def _tick(self) -> None:
        self._due = True
        if self._ticking:
            return
        self._ticking = True
        while self._due:
            self._due = False
            for event in self._count(self.arbiter.tick, self._now):
                self._hear(event)
        self._ticking = False

    def _hear(self, event: Event) -> None:
        if isinstance(event, Preempt):
            # It may have asked in the meantime, been told to yield, and let go already.
            if self.arbiter.is_victim(event.owner):
                self._preempted(self._live[event.owner])
            return
        sequence = self._tickets.pop(event.ticket, None)
        if sequence is None:
            return
        sequence.ticket = None
        if isinstance(event, Granted):
            self._granted(sequence, event.grant)
        elif isinstance(event, Yield):
            self._preempted(sequence)
        elif isinstance(event, Expired):
            self.report.counts["expired"] += 1
            self._give_up(sequence)

    # Time

    def _at(self, seconds: float, handler: Callable[[Any], None], sequence: Any = None, surely: bool = False) -> None:
        """Call the handler then, unless the sequence's work was given up in between, or `surely`."""
        self._serial += 1
        epoch = None if surely or sequence is None else sequence.epoch
        heapq.heappush(self._events, (self._now + seconds, self._serial, handler, sequence, epoch))

    def _count(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.report.operations += 1
        return call(*args, **options)

    def _sample(self, _: None) -> None:
        """What the pool holds now: slots without a token among those of held blocks, blocks saved by sharing."""
        ledger, size = self.ledger, self._size
        entries = empty = 0
        for sequence in self._live.values():
            table = ledger.table(sequence.owner)
            if table is not None and len(table):
                entries += len(table)
                empty += max(0, table.capacity - len(sequence.tokens))
        if entries:
            self.report.waste.append(empty / (ledger.referenced * size))
            self.report.saved.append(1 - ledger.referenced / entries)
            self.report.used.append(ledger.referenced / ledger.pool.num_blocks)
        if self._now < self._arrivals_end:
            self._at(self._sample_every, self._sample)
