"""The planner: a batch that is used again gives the steps that one made anew would give."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from pagefork.runtime.lanes import Job, Lanes
from pagefork.runtime.messages import SamplingParams, Submit
from pagefork.runtime.planner import Flight, Planner
from pagefork.runtime.sampling import row_keys
from pagefork.runtime.stream import Stream

BLOCK = 4


def submit(owner: int, count: int, **fields: object) -> Submit:
    """A job of `count` given tokens with blocks for 64."""
    table = [owner * 16 + index for index in range(16)]
    return Submit(owner=owner, tokens=[owner + 1] * count, tables=[table], limit=40, end=60, **fields)  # type: ignore[arg-type]


class Bench:
    """A planner with its lanes, and a worker's part in their upkeep."""

    def __init__(self, count: int, chunk: int = 6) -> None:
        self.lanes = Lanes(count, BLOCK)
        self.planner = Planner(self.lanes, chunk)
        self.jobs: dict[int, Job] = {}
        self.flights: deque[Flight] = deque()

    def open(self, job: Submit) -> None:
        self.jobs[job.owner] = self.lanes.open(job, Stream())
        self.planner.add(self.jobs[job.owner])

    def launch(self) -> dict[str, list[object]] | None:
        """The next step in plain lists; None when there is none."""
        planned = self.planner.next()
        if planned is None:
            return None
        plan, flight = planned
        self.flights.append(flight)
        sampling = plan.sampling
        names = ("tokens", "positions", "feed", "lengths", "copies", "rows")
        facts = {name: getattr(plan, name).tolist() for name in names}
        (facts["slots"],), (facts["tables"],) = plan.slots.tolist(), plan.tables.tolist()
        facts["temperature"], facts["keys"] = sampling.temperature.tolist(), sampling.keys.tolist()
        facts["segments"] = [(s.row, s.count, s.start, *s.tables.tolist()) for s in plan.segments]
        facts["sampled"] = [job.submit.owner for job in flight.batch.sampled]
        facts["stops"], facts["ends"], facts["copied"] = flight.stops.tolist(), flight.ends.tolist(), flight.copied
        facts["topk"] = [plan.topk]
        return facts

    def retire(self, ids: list[int]) -> None:
        flight = self.flights.popleft()
        sampled = flight.batch.sampled_lanes
        self.lanes.retired += 1
        self.lanes.next_token[sampled] = np.array(ids[: len(sampled)], dtype=np.int32)

    def stop(self, owner: int) -> None:
        self.planner.stop(self.jobs[owner])

    def close_landed(self) -> None:
        for owner, job in list(self.jobs.items()):
            if (
                not self.lanes.running[job.lane]
                and not self.lanes.flying(job.lane)
                and job not in self.planner._prompts
            ):
                self.lanes.close(job.lane)
                del self.jobs[owner]


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_used_again_plans_what_one_made_anew_would(seed: int) -> None:
    rng = random.Random(seed)
    both = Bench(5), Bench(5)
    owner = reused = 0
    for _ in range(300):
        act = rng.choice(["open", "stop", "launch", "launch", "launch", "retire", "retire", "lease", "extend", "park"])
        live = list(both[0].jobs)
        assert live == list(both[1].jobs)
        if act == "open" and both[0].lanes.any_free:
            owner += 1
            params = SamplingParams(temperature=rng.choice([0.0, 0.7])) if rng.random() < 0.7 else None
            copies = [(1, 2, 3)] if rng.random() < 0.3 else []
            job = submit(owner, rng.randint(1, 9), params=params, key=owner, copies=copies, topk=rng.choice([0, 3]))
            for bench in both:
                bench.open(job)
        elif act == "stop" and live and rng.random() < 0.5:
            victim = rng.choice(live)
            for bench in both:
                bench.stop(victim)
        elif act == "lease" and live:
            job_of, limit = rng.choice(live), rng.randint(1, 63)
            for bench in both:
                bench.lanes.lease(bench.jobs[job_of], limit)
        elif act == "extend" and live:
            lengthened, first, ids = rng.choice(live), rng.randint(0, 15), [rng.randrange(400) for _ in range(3)]
            for bench in both:
                bench.lanes.set_tables(bench.jobs[lengthened].lane, first, [ids])
        elif act == "park":
            idle = both[0].lanes.idle().tolist()
            for bench in both if idle else ():
                del bench.jobs[bench.planner.job(idle[0]).submit.owner]
                bench.lanes.close(idle[0])
        elif act == "launch" and len(both[0].flights) < 2:
            both[1].planner._steady = None
            reused += both[0].planner._steady is not None
            assert both[0].launch() == both[1].launch()
        elif act == "retire" and both[0].flights:
            ids = [rng.randrange(100) for _ in range(5)]
            for bench in both:
                bench.retire(ids)
                bench.close_landed()
    assert reused


def test_a_lane_that_another_job_took_over_is_planned_with_what_is_the_others() -> None:
    bench = Bench(1)
    bench.open(submit(1, 1, params=SamplingParams()))
    for _ in range(3):
        assert (plan := bench.launch()) is not None and plan["sampled"] == [1]
        bench.retire([7])
    bench.stop(1)
    bench.close_landed()
    bench.open(submit(2, 1, params=SamplingParams(temperature=1.0), key=5))
    for position in range(1, 4):
        plan = bench.launch()
        assert plan is not None and plan["sampled"] == [2] and plan["temperature"] == [1.0]
        assert plan["keys"] == row_keys(np.array([5], np.uint64), np.array([position])).tolist()
        bench.retire([7])


def test_a_step_in_flight_keeps_its_arrays_while_the_next_is_planned_and_lanes_change() -> None:
    bench = Bench(2)
    for owner in (1, 2):
        bench.open(submit(owner, 1, params=SamplingParams()))
    bench.launch()
    plan, _ = bench.planner.next() or pytest.fail("no step")
    before = {
        name: getattr(plan, name).copy() for name in ("tokens", "positions", "slots", "feed", "tables", "lengths")
    }
    bench.planner.next()
    bench.lanes.set_tables(0, 0, [[99] * 16])
    bench.lanes.next_token[:] = 77
    for name, values in before.items():
        assert np.array_equal(getattr(plan, name), values), name
