"""What the worker knows of its jobs: one lane each, in whole arrays, so that a step's plan costs no loop over lanes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagefork.runtime.messages import Submit
from pagefork.runtime.sampling import Sampling
from pagefork.runtime.stream import Stream


class Lanes:
    """Struct of arrays, index = lane.

    position: the next position to be planned; positions below it hold K and V once no step in flight names the lane.
    limit: positions below it may be decoded. named: the last step that named the lane; steps count from 1, in their
    order, and those up to `retired` have retired. row: where among the ids that this step sampled the lane's next token
    is, until the step retires: then `next_token` holds it. tables: int32 `[groups, lanes, max_blocks]`; edits: how
    often one was written to.
    """

    def __init__(self, count: int, block_size: int, groups: int = 1) -> None:
        self.block_size = block_size
        self._size = np.int32(block_size)
        self.tables = np.zeros((groups, count, 8), dtype=np.int32)
        self.edits = 0
        self.position = np.zeros(count, dtype=np.int32)
        self.limit = np.zeros(count, dtype=np.int32)
        self.launched = self.retired = 0
        self.named = np.zeros(count, dtype=np.int64)
        self.row = np.zeros(count, dtype=np.int32)
        self.next_token = np.zeros(count, dtype=np.int32)
        self.running = np.zeros(count, dtype=np.bool_)
        self.key = np.zeros(count, dtype=np.uint64)
        self.temperature = np.zeros(count, dtype=np.float32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int32)
        self._free = list(range(count - 1, -1, -1))

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def open(self, submit: Submit, stream: Stream) -> Job:
        """Give a job a lane; call only while `any_free`."""
        lane = self._free.pop()
        job = Job(lane, submit, stream)
        self.position[lane] = submit.start
        self.lease(job, submit.limit)
        self.next_token[lane] = submit.tokens[-1]
        self.running[lane] = False
        self.set_tables(lane, 0, submit.tables)
        if submit.params is not None:
            params = submit.params
            self.key[lane] = submit.key
            self.temperature[lane] = params.temperature
            self.top_p[lane] = params.top_p
            self.min_p[lane] = params.min_p
            self.top_k[lane] = params.top_k
        else:
            self.temperature[lane] = 0
        return job

    def lease(self, job: Job, limit: int) -> None:
        """Positions below `limit` may be written; the last token that a job samples needs none."""
        self.limit[job.lane] = min(limit, job.last) if job.samples else limit

    def close(self, lane: int) -> None:
        """Free a lane that no step in flight names."""
        self.running[lane] = False
        self._free.append(lane)

    def set_tables(self, lane: int, first: int, ids: list[list[int]]) -> None:
        stop, (groups, lanes, width) = first + len(ids[0]), self.tables.shape
        if stop > width:
            wider = np.zeros((groups, lanes, max(stop, 2 * width)), dtype=np.int32)
            wider[:, :, :width] = self.tables
            self.tables = wider
        self.tables[:, lane, first:stop] = ids
        self.edits += 1

    def ready(self) -> npt.NDArray[np.intp]:
        """Lanes that can decode now."""
        return (self.running & (self.position < self.limit)).nonzero()[0]

    def idle(self) -> npt.NDArray[np.intp]:
        """Lanes that can do nothing before their lease is extended."""
        return (self.running & (self.named <= self.retired) & (self.position >= self.limit)).nonzero()[0]

    def flying(self, lane: int) -> bool:
        """Whether a step in flight names the lane."""
        return bool(self.named[lane] > self.retired)

    def slots(self, lanes: npt.NDArray[np.intp], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The slot of each (lane, position) in each group, `[groups, rows]`; one lane serves for all positions."""
        index = positions // self._size
        slots: npt.NDArray[np.int32] = (self.tables[:, lanes, index] - index) * self._size + positions
        return slots

    def width(self, length: int) -> int:
        """How many table entries a step of this longest length gets: few different numbers, at most 1/8 too many."""
        blocks = -(-length // self.block_size)
        step = max(8, 1 << max(blocks.bit_length() - 3, 0))
        return min(-(-blocks // step) * step, self.tables.shape[2])

    def tables_of(self, lane: int, length: int) -> npt.NDArray[np.int32]:
        """A copy of the entries that cover `length` positions, `[groups, entries]`."""
        return self.tables[:, lane, : -(-length // self.block_size)].copy()

    def sampling(self, lanes: npt.NDArray[np.intp]) -> Sampling:
        """The parameters of the rows that `lanes` sample, all but their keys."""
        return Sampling(
            temperature=self.temperature[lanes],
            top_p=self.top_p[lanes],
            min_p=self.min_p[lanes],
            top_k=self.top_k[lanes],
            keys=np.zeros((len(lanes), 2), dtype=np.uint32),
        )


class Job:
    """One Submit being served; `planned` of its tokens are in a step that was launched. `over`: plan no more of it.

    last: the position of the last token that it samples.
    """

    __slots__ = ("copies", "lane", "last", "over", "planned", "samples", "stop", "stream", "submit", "wants_logits")

    def __init__(self, lane: int, submit: Submit, stream: Stream) -> None:
        self.lane = lane
        self.submit = submit
        self.stream = stream
        self.planned = 0
        self.over = False
        self.copies = submit.copies
        self.stop = submit.stop
        self.last = submit.end - 1
        self.samples = submit.params is not None
        self.wants_logits = self.samples or submit.topk > 0

    @property
    def left(self) -> int:
        """How many of the given tokens are still to be planned."""
        return len(self.submit.tokens) - self.planned
