"""Which jobs a step serves, and its arrays."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from pagefork.runtime.engine import Ints, Segment, StepPlan
from pagefork.runtime.lanes import Job, Lanes
from pagefork.runtime.sampling import row_keys

Index = npt.NDArray[np.intp]
Chunk = tuple[Job, int]

NO_COPIES: Ints = np.zeros((0, 3), dtype=np.int32)
UNFED: Ints = np.zeros(0, dtype=np.int32)


class Batch:
    """Who is in a step, decodes first, and what follows from that alone: a batch of decodes serves for many steps.

    sampled: the jobs of the rows that need logits: the decodes, and the prompts whose last chunk this is. named: all
    jobs. given: those that take some of the tokens that they came with, and how many.
    """

    def __init__(self, lanes: Lanes, ready: list[Job], singles: list[Job], chunks: list[Chunk]) -> None:
        decodes = ready + singles
        self.ready = len(ready)
        self.chunks = chunks
        self.given = [(job, 1) for job in singles] + chunks
        self.sampled = decodes + [job for job, count in chunks if job.wants_logits and count == job.left]
        self.decodes = _lanes_of(decodes)
        self.named_lanes = _lanes_of(decodes + [job for job, _ in chunks])
        self.sampled_lanes = _lanes_of(self.sampled)
        self.rows = np.arange(len(self.sampled), dtype=np.int32)
        self.sampling = lanes.sampling(self.sampled_lanes)
        self.seeds = lanes.key[self.sampled_lanes]
        self.topk = max((job.submit.topk for job in self.sampled), default=0)
        self.name = self.decodes.tobytes()
        self._lanes = lanes
        self._tables: Ints | None = None
        self._written = (0, 0)  # what the tables were made from: how often lanes' were edited, and their width

    def tables(self, longest: int) -> Ints:
        """The tables of its decodes, wide enough for so many positions: the same array while none changes."""
        written = (self._lanes.edits, self._lanes.width(longest))
        if self._tables is None or written != self._written:
            self._written, self._tables = written, self._lanes.tables[:, self.decodes, : written[1]]
        return self._tables


class Flight(Struct, frozen=True):
    """A launched step: `stops`, where its `[named]` jobs now stand, and `ends`, where the tokens of the `[sampled]`
    rows go."""

    batch: Batch
    stops: Ints
    ends: Ints
    copied: list[int]


class Planner:
    """Every ready decode goes into the next step; prompts share `chunk` tokens of it, first come, first served."""

    def __init__(self, lanes: Lanes, chunk: int) -> None:
        self._lanes = lanes
        self._chunk = chunk
        self._prompts: deque[Job] = deque()
        self._by_lane: dict[int, Job] = {}
        self._steady: Batch | None = None

    def add(self, job: Job) -> None:
        self._prompts.append(job)
        self._by_lane[job.lane] = job

    def job(self, lane: int) -> Job:
        """The job that holds a lane."""
        return self._by_lane[lane]

    def stop(self, job: Job) -> None:
        """Plan no more of the job; steps in flight go on."""
        self._lanes.running[job.lane] = False
        self._steady = None  # which would keep its stream
        if job in self._prompts:
            self._prompts.remove(job)

    def next(self) -> tuple[StepPlan, Flight] | None:
        """The next step, its flight already counted in the lanes; None when no job is ready."""
        ready = self._lanes.ready()
        singles, chunks = self._take_prompts() if self._prompts else ([], [])
        if not len(ready) and not singles and not chunks:
            return None
        steady = self._steady
        if steady is not None and not singles and not chunks and steady.name == ready.tobytes():
            return self._assemble(steady)
        batch = Batch(self._lanes, [self._by_lane[lane] for lane in ready.tolist()], singles, chunks)
        self._steady = None if batch.given else batch  # so no batch outlives a job's entry into its lane
        planned = self._assemble(batch)
        self._lanes.row[batch.sampled_lanes] = batch.rows
        return planned

    def _take_prompts(self) -> tuple[list[Job], list[Chunk]]:
        """Jobs of which one given token is left, which decode; and (job, tokens) of the chunks that fit this step."""
        singles: list[Job] = []
        chunks: list[Chunk] = []
        budget, kept = self._chunk, deque[Job]()
        for job in self._prompts:
            count = min(job.left, budget)
            if job.left == 1:
                singles.append(job)
            elif count:
                chunks.append((job, count))
                budget -= count
            if job.left > 1 and count < job.left:
                kept.append(job)
        self._prompts = kept
        return singles, chunks

    def _assemble(self, batch: Batch) -> tuple[StepPlan, Flight]:
        lanes, decodes = self._lanes, batch.decodes
        positions = lanes.position[decodes]
        lengths = positions + 1
        plan = StepPlan(
            tokens=lanes.next_token[decodes],
            positions=positions,
            slots=lanes.slots(decodes, positions),
            feed=self._feed(batch) if lanes.launched > lanes.retired else UNFED,
            tables=batch.tables(int(lengths.max(initial=1))),
            lengths=lengths,
            segments=(),
            copies=NO_COPIES,
            rows=batch.rows,
            sampling=batch.sampling,
            topk=batch.topk,
        )
        flight = Flight(batch, stops=lengths, ends=lengths, copied=[])
        if batch.given:
            plan, flight = self._with_given(plan, flight)
        if not batch.sampling.greedy:
            plan = replace(plan, sampling=batch.sampling.keyed(row_keys(batch.seeds, flight.ends)))
        self._depart(flight)
        return plan, flight

    def _feed(self, batch: Batch) -> Ints:
        """Where the decodes find their tokens among the ids of the step before; -1 for those that come with them.

        No older step in flight has one: the worker begins to plan with one step in flight at most, and a lane that is
        left out of a step does not come back before the worker's next turn.
        """
        lanes, decodes = self._lanes, batch.decodes
        feed = np.where(lanes.named[decodes] > lanes.retired, lanes.row[decodes], np.int32(-1))
        feed[batch.ready :] = -1
        return feed

    def _with_given(self, plan: StepPlan, flight: Flight) -> tuple[StepPlan, Flight]:
        """The step of decodes, and beside it the rows of the prompt chunks and the copies of who is new."""
        lanes, batch = self._lanes, flight.batch
        tokens, places, slots, segments = [plan.tokens], [plan.positions], [plan.slots], []
        row = len(plan.tokens)
        rows, stops = list(range(row)), []
        for job, count in batch.chunks:
            start = job.submit.start + job.planned
            span = np.arange(start, start + count, dtype=np.int32)
            tokens.append(np.array(job.submit.tokens[job.planned : job.planned + count], dtype=np.int32))
            places.append(span)
            slots.append(lanes.slots(np.array(job.lane), span))
            segments.append(Segment(row, count, start, lanes.tables_of(job.lane, start + count)))
            row += count
            stops.append(start + count)
            if job.wants_logits and count == job.left:
                rows.append(row - 1)
        positions = np.concatenate(places)
        copies = [copy for job, _ in batch.given for copy in job.copies]
        plan = replace(
            plan,
            tokens=np.concatenate(tokens),
            positions=positions,
            slots=np.concatenate(slots, axis=1),
            segments=tuple(segments),
            copies=np.array(copies, dtype=np.int32).reshape(-1, 3),
            rows=np.array(rows, dtype=np.int32),
        )
        flight = Flight(
            batch,
            stops=np.concatenate([plan.lengths, np.array(stops, dtype=np.int32)]),
            ends=positions[rows] + 1,
            copied=[job.submit.owner for job, _ in batch.given if job.copies],
        )
        return plan, flight

    def _depart(self, flight: Flight) -> None:
        """Count the flight in the lanes, so that the step after it can be planned before it has retired."""
        lanes, batch = self._lanes, flight.batch
        lanes.launched += 1
        lanes.named[batch.named_lanes] = lanes.launched
        lanes.position[batch.named_lanes] = flight.stops
        for job, count in batch.given:
            job.planned += count
            job.copies = []
            lanes.running[job.lane] = job.samples and not job.left


def _lanes_of(jobs: list[Job]) -> Index:
    return np.array([job.lane for job in jobs], dtype=np.intp)
