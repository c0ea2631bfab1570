"""Which jobs a step serves, and its arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagefork.runtime.engine import Ints, Segment, StepPlan
from pagefork.runtime.lanes import Job, Lanes

Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Flight:
    """A launched step: the jobs of its sampled rows with their positions, and all jobs with where they now stand."""

    serial: int
    sampled: list[Job]
    sampled_lanes: Index
    positions: Ints
    named: list[Job]
    named_lanes: Index
    stops: Ints
    copied: list[int]


class Planner:
    """Every ready decode goes into the next step; prompts share `chunk` tokens of it, first come, first served."""

    def __init__(self, lanes: Lanes, chunk: int) -> None:
        self._lanes = lanes
        self._chunk = chunk
        self._prompts: deque[Job] = deque()
        self._by_lane: dict[int, Job] = {}
        self._serial = 0

    def add(self, job: Job) -> None:
        self._prompts.append(job)
        self._by_lane[job.lane] = job

    def job(self, lane: int) -> Job:
        """The job that holds a lane."""
        return self._by_lane[lane]

    def stop(self, job: Job) -> None:
        """Plan no more of the job; steps in flight go on."""
        self._lanes.running[job.lane] = False
        if job in self._prompts:
            self._prompts.remove(job)

    def next(self) -> tuple[StepPlan, Flight] | None:
        """The next step, its flight already counted in the lanes; None when no job is ready."""
        ready = self._lanes.ready()
        singles, chunks = self._take_prompts()
        if not len(ready) and not singles and not chunks:
            return None
        for job in singles:
            self._lanes.next_token[job.lane] = job.submit.tokens[-1]
        decodes = np.concatenate([ready, np.array([job.lane for job in singles], dtype=np.intp)])
        jobs = [self._by_lane[lane] for lane in ready.tolist()] + singles
        return self._assemble(decodes, jobs, chunks)

    def _take_prompts(self) -> tuple[list[Job], list[tuple[Job, int]]]:
        """Jobs of which one given token is left, which decode; and (job, tokens) of the chunks that fit this step."""
        singles: list[Job] = []
        chunks: list[tuple[Job, int]] = []
        budget, kept = self._chunk, deque[Job]()
        for job in self._prompts:
            left = len(job.submit.tokens) - job.planned
            count = min(left, budget)
            if left == 1:
                singles.append(job)
            elif count:
                chunks.append((job, count))
                budget -= count
            if left > 1 and count < left:
                kept.append(job)
        self._prompts = kept
        return singles, chunks

    def _assemble(self, decodes: Index, jobs: list[Job], chunks: list[tuple[Job, int]]) -> tuple[StepPlan, Flight]:
        lanes = self._lanes
        positions = lanes.position[decodes]
        width = lanes.width(int(positions.max()) + 1) if len(decodes) else 1
        tokens, places, slots = [lanes.next_token[decodes]], [positions], [lanes.slots(decodes, positions)]
        segments, rows, row = [], list(range(len(decodes))), len(decodes)
        ended: list[Job] = []  # prompts whose last chunk this is, and which want logits of it
        for job, count in chunks:
            start = job.submit.start + job.planned
            span = np.arange(start, start + count, dtype=np.int32)
            tokens.append(np.array(job.submit.tokens[job.planned : job.planned + count], dtype=np.int32))
            places.append(span)
            slots.append(lanes.slots(np.array(job.lane), span))
            segments.append(Segment(row, count, start, lanes.table(job.lane, start + count)))
            row += count
            if job.wants_logits and job.planned + count == len(job.submit.tokens):
                rows.append(row - 1)
                ended.append(job)
        flat = np.concatenate(places)
        named = jobs + [job for job, _ in chunks]
        named_lanes = np.concatenate([decodes, _lanes_of([job for job, _ in chunks])])
        stops = np.concatenate([positions, [job.submit.start + job.planned + n - 1 for job, n in chunks]]) + 1
        sampled = jobs + ended
        sampled_lanes = np.concatenate([decodes, _lanes_of(ended)])
        feed = lanes.feed[decodes]
        copies = [copy for job in named for copy in job.copies]
        flight = Flight(
            serial=self._serial,
            sampled=sampled,
            sampled_lanes=sampled_lanes,
            positions=flat[rows],
            named=named,
            named_lanes=named_lanes,
            stops=stops.astype(np.int32),
            copied=[job.submit.owner for job in named if job.copies],
        )
        sampling = lanes.sampling(sampled_lanes, flight.positions + 1)
        plan = StepPlan(
            tokens=np.concatenate(tokens),
            positions=flat,
            slots=np.concatenate(slots),
            feed=feed,
            tables=lanes.tables[decodes, :width],
            lengths=positions + 1,
            segments=tuple(segments),
            copies=np.array(copies, dtype=np.int32).reshape(-1, 3),
            rows=np.array(rows, dtype=np.int32),
            sampling=sampling,
            topk=max((job.submit.topk for job in sampled), default=0),
        )
        self._depart(flight, jobs, chunks)
        return plan, flight

    def _depart(self, flight: Flight, jobs: list[Job], chunks: list[tuple[Job, int]]) -> None:
        """Count the flight in the lanes, so that the step after it can be planned before it has retired."""
        lanes = self._lanes
        named = flight.named_lanes
        lanes.flights[named] += 1
        lanes.position[named] = flight.stops
        sampled = flight.sampled_lanes
        lanes.feed[sampled] = np.arange(len(sampled), dtype=np.int32)
        lanes.fed_by[sampled] = flight.serial
        lanes.running[sampled] = [job.samples for job in flight.sampled]
        for job, count in chunks:
            job.planned += count
        for job in jobs:
            job.planned = len(job.submit.tokens)
        for job in flight.named:
            job.copies = []
        self._serial += 1


def _lanes_of(jobs: list[Job]) -> Index:
    return np.array([job.lane for job in jobs], dtype=np.intp)
