"""The worker actor: batches every ready job into one step after another and hands out what they give."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio.lowlevel
import msgspec

from pagefork.runtime.actor import Actor, Envelope, Reply
from pagefork.runtime.engine import HELD_BACK, EngineThread, StepResult
from pagefork.runtime.errors import PageforkError
from pagefork.runtime.lanes import Job, Lanes
from pagefork.runtime.messages import Cancel, Copied, Extend, Message, StepDone, StepFailed, Submit
from pagefork.runtime.planner import Flight, Planner
from pagefork.runtime.stream import Stream

QUIET_PASSES = 3
"""Scheduling passes without mail before a step is planned: what wakes together is batched together."""

LONGEST_RUN = 8
"""Steps of decodes alone that are planned at once, as far as HELD_BACK has room for them."""
RUN_TOKENS = 512
"""And how many tokens they may give: the event loop has no other turn while their readers take them."""


class Worker(Actor):
    """`depth`: how many steps may be on the device; 2 queues a step before the last one was read.

    Steps so short that several take no longer than HELD_BACK are planned several at a time.

    `chunk`: how many prompt tokens a step takes beside its decodes. `groups`: how many tables a job has. `copied` tells
    the allocator of copies done.
    """

    def __init__(
        self,
        engine: EngineThread,
        copied: Callable[[Message], None],
        *,
        block_size: int,
        max_batch: int,
        chunk: int,
        depth: int,
        groups: int = 1,
    ) -> None:
        super().__init__("worker", capacity=4096)
        self.steps = self.tokens = self.prompt_tokens = 0
        self._engine = engine
        self._copied = copied
        self._depth = depth
        self._lanes = Lanes(max_batch, block_size, groups)
        self._planner = Planner(self._lanes, chunk)
        self._jobs: dict[int, Job] = {}
        self._waiting: dict[int, tuple[Submit, Stream]] = {}
        self._parked: dict[int, tuple[Submit, Stream]] = {}
        self._ending: dict[int, Job] = {}
        self._cancels: dict[int, Reply] = {}
        self._flights: deque[Flight] = deque()
        self._awaited = 0  # how many of the flights the engine was asked for
        self._run_length = 1
        self._changing = False

    @property
    def jobs(self) -> int:
        """Jobs being served, or waiting for a lane or for their reader."""
        return len(self._jobs) + len(self._waiting) + len(self._parked)

    async def submit(self, submit: Submit, stream: Stream) -> None:
        """Send a Submit whose answers come in `stream`; cancelled while waiting for room, nothing was sent."""
        await self._put(Envelope(submit, stream))

    async def turn(self) -> None:
        """Wait for mail, serve all there is, launch what became ready."""
        await super().turn()
        await self._drain()
        self._advance()

    def post(self, message: Message) -> None:
        """Send without waiting. A step's tokens are handed out as it comes in: on asyncio their readers have had their
        turn when the task has its own and plans the next step, which saves a pass of the event loop."""
        if isinstance(message, StepDone) and self.dead is None:
            try:
                self._land(message)
            except Exception as error:
                message = StepFailed(error)
        super().post(message)

    def urge(self, envelope: Envelope) -> None:
        """An Extend must not overtake the Submit of its job, so it goes to the other lane, where it needs no room.

        It wakes nobody while no step can be planned: it is in time for the next one.
        """
        if not isinstance(envelope.message, Extend):
            super().urge(envelope)
            return
        self._normal.append(envelope)
        if len(self._flights) < self._depth:
            self._mail.set()

    async def serve(self, envelope: Envelope) -> None:
        match envelope.message:
            case StepDone():
                pass
            case Submit() as submit:
                self._changing = True
                self._waiting[submit.owner] = (submit, envelope.reply)
            case Cancel(owner=owner, pause=pause):
                self._cancel(owner, None if pause else "cancelled", envelope.reply)
            case Extend(owner=owner, first=first, ids=ids, limit=limit):
                self._extend(owner, first, ids, limit)
            case StepFailed(error=error):
                raise error
            case _:
                await super().serve(envelope)

    def die(self, reason: PageforkError, cause: BaseException | None = None) -> None:
        if self.dead is None:
            for job in self._jobs.values():
                job.stream.fail(reason)
            for _, stream in (*self._waiting.values(), *self._parked.values()):
                stream.fail(reason)
            for reply in self._cancels.values():
                reply.fail(reason)
        super().die(reason, cause)

    async def _drain(self) -> None:
        """Serve all mail; after what starts or ends jobs, until some passes of the event loop bring none."""
        quiet = 0
        while True:
            envelope = self.take()
            if envelope is not None:
                quiet = 0
                await self.serve(envelope)
            elif self._changing and quiet < QUIET_PASSES:
                quiet += 1
                await anyio.lowlevel.checkpoint()
            else:
                self._changing = False
                return

    def _advance(self) -> None:
        """Plan what can be planned, and ask for what the oldest steps give."""
        if self._waiting and not self._lanes.any_free:
            self._park(len(self._waiting))
        while self._waiting and self._lanes.any_free:
            owner = next(iter(self._waiting))
            self._jobs[owner] = job = self._lanes.open(*self._waiting.pop(owner))
            self._planner.add(job)
        plans = []
        while len(self._flights) < self._most() and (planned := self._planner.next()) is not None:
            plan, flight = planned
            plans.append(plan)
            self._flights.append(flight)
            self.steps += 1
            self.prompt_tokens += len(plan.tokens) - len(plan.lengths)
        collect = 0
        if self._flights and not self._awaited:
            self._awaited = collect = max(len(self._flights) - self._depth + 1, 1)
        if plans or collect:
            self._engine.step(plans, collect)

    def _most(self) -> int:
        """How many steps may be in flight: `depth`, and more if they are short and new ones of decodes alone."""
        flights = self._flights
        if self._awaited or not flights or any(flight.batch.given for flight in flights):
            return self._depth
        return self._depth - 1 + min(self._run_length, max(RUN_TOKENS // len(flights[-1].ends), 1))

    def _land(self, done: StepDone) -> None:
        self._awaited -= len(done.results)
        self._run_length = min(max(int(HELD_BACK / max(done.seconds, 1e-9)), 1), LONGEST_RUN)
        for result in done.results:
            self._retire(result)

    def _retire(self, result: StepResult) -> None:
        """The oldest step is done: hand out its tokens, and free the lanes that nothing names any more."""
        flight = self._flights.popleft()
        lanes, batch = self._lanes, flight.batch
        lanes.retired += 1
        lanes.next_token[batch.sampled_lanes] = result.ids
        for owner in flight.copied:
            self._copied(Copied(owner))
        self._hand_out(batch.sampled, result, flight.ends.tolist())
        for job, _ in batch.chunks:
            if not job.wants_logits and not job.left and not lanes.flying(job.lane):
                self._end(job, "done")
        for job in list(self._ending.values()):
            self._close_if_landed(job)

    def _hand_out(self, sampled: list[Job], result: StepResult, ends: list[int]) -> None:
        """Give every sampled job its token."""
        tokens = 0
        rows = zip(sampled, result.ids.tolist(), result.logprobs.tolist(), ends, strict=True)
        for row, (job, token, logprob, end) in enumerate(rows):
            if job.over:
                continue
            if not job.samples:
                self._end(job, "done", _top(result, row, job.submit.topk))
                continue
            job.stream.push(token, logprob)
            tokens += 1
            if token in job.stop:
                self._end(job, "stop")
            elif end >= job.last:
                self._end(job, "length")
        self.tokens += tokens

    def _extend(self, owner: int, first: int, ids: list[list[int]], limit: int) -> None:
        if (job := self._jobs.get(owner)) is not None:
            self._lanes.set_tables(job.lane, first, ids)
            self._lanes.lease(job, limit)
            return
        waiting = self._waiting.get(owner) or self._parked.pop(owner, None)
        if waiting is not None:
            submit, stream = waiting
            tables = [table[:first] + more for table, more in zip(submit.tables, ids, strict=True)]
            self._waiting[owner] = (msgspec.structs.replace(submit, tables=tables, limit=limit), stream)

    def _park(self, count: int) -> None:
        """Take the lanes of jobs that wait for their readers: whoever holds a lane must not wait for one without."""
        lanes = self._lanes
        for lane in lanes.idle()[:count].tolist():
            job = self._planner.job(lane)
            start = int(lanes.position[lane])
            submit = msgspec.structs.replace(
                job.submit,
                start=start,
                tokens=[int(lanes.next_token[lane])],
                tables=lanes.tables[:, lane].tolist(),
                copies=[],
            )
            self._parked[submit.owner] = (submit, job.stream)
            del self._jobs[submit.owner]
            lanes.close(lane)

    def _cancel(self, owner: int, finish: str | None, reply: Reply) -> None:
        waiting = self._waiting.pop(owner, None) or self._parked.pop(owner, None)
        if waiting is not None:
            submit, stream = waiting
            self._settle(submit, stream, submit.start, bool(submit.copies))
            if finish is not None:
                stream.end(finish)
        job = self._jobs.get(owner)
        if job is None:
            reply.set(None)
            return
        self._cancels[owner] = reply
        self._end(job, finish)
        self._close_if_landed(job)

    def _end(self, job: Job, finish: str | None, top: list[tuple[int, float]] | None = None) -> None:
        """Plan no more of a job; unless it is paused its stream ends."""
        self._changing = True
        if not job.over:
            job.over = True
            self._ending[job.submit.owner] = job
            self._planner.stop(job)
        if finish is not None:
            job.stream.end(finish, top=top)

    def _close_if_landed(self, job: Job) -> None:
        """Free the lane of a job that is over, unless a step in flight names it."""
        owner = job.submit.owner
        if self._lanes.flying(job.lane):
            return
        self._settle(job.submit, job.stream, int(self._lanes.position[job.lane]), bool(job.copies))
        self._lanes.close(job.lane)
        del self._jobs[owner], self._ending[owner]
        reply = self._cancels.pop(owner, None)
        if reply is not None:
            reply.set(None)

    def _settle(self, submit: Submit, stream: Stream, computed: int, undone: bool) -> None:
        """Say how far the K and V go; copies that no step did leave the block they were for without its first rows."""
        if undone:
            self._copied(Copied(submit.owner))
            computed = submit.start // self._lanes.block_size * self._lanes.block_size
        stream.computed = computed


def _top(result: StepResult, row: int, k: int) -> list[tuple[int, float]]:
    if not k or result.top_ids is None or result.top_logprobs is None:
        return []
    return list(zip(result.top_ids[row, :k].tolist(), result.top_logprobs[row, :k].tolist(), strict=True))
