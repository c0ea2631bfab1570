"""Every message, on one page, with who sends it to whom. Plain data only, so any actor could live in another process.

caller    -> Sequence   Append, Generate, Fork, Truncate, TopK, ReadKV              (ask)
                        Close                                                       (urgent tell)
reader    -> Sequence   Renew, Settle                                               (urgent tell)
Sequence  -> Allocator  Reserve -> Granted | Yielded | Exhausted, Share -> None     (ask)
                        Trim, Shrink, Copied, Publish, Idle, Surrender, Release     (urgent tell)
Allocator -> Sequence   Preempt                                                     (urgent tell)
Sequence  -> itself     Resume, Preempt, Renew                                      (urgent tell)
Sequence  -> Worker     Submit (answers come in the job's Stream)                   (tell)
                        Extend                                                      (tell, room or not)
                        Cancel -> None                                              (ask)
Worker    -> Allocator  Copied                                                      (urgent tell)
Engine    -> Worker     StepDone, StepFailed                                        (urgent tell, from its thread)
Runtime   -> Sequence   Close                                                       (urgent tell)
          -> Allocator  Audit -> int                                                (ask)
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How tokens are chosen; the names and the order of the filters are mlx-lm's.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. The filters see the distribution at
    temperature 1. A token depends on (seed, fork lineage, position, logits) alone; seed None draws one.
    stop_tokens are added to the model's own end tokens unless ignore_eos.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False


class Message(Struct, frozen=True, tag=True):
    """Base of all messages."""


# caller -> Sequence


class Append(Message, frozen=True):
    tokens: list[int]
    patience: float | None = None


class Generate(Message, frozen=True):
    params: SamplingParams
    patience: float | None = None


class Fork(Message, frozen=True):
    count: int


class Truncate(Message, frozen=True):
    length: int


class TopK(Message, frozen=True):
    k: int


class ReadKV(Message, frozen=True):
    layer: int


class Close(Message, frozen=True):
    pass


class Renew(Message, frozen=True):
    """The reader has consumed enough of its lease for another. `wait`: all of it, and there were no blocks at once."""

    wait: bool = False


class Settle(Message, frozen=True):
    """The reader of generation `serial` took its last token, or left; a later generation is not meant."""

    serial: int


class Preempt(Message, frozen=True):
    """Allocator -> Sequence: surrender your blocks to one that goes first, and go on when there are blocks again."""


class Resume(Message, frozen=True):
    """A sequence to itself: submit the paused job again."""


# Sequence -> Allocator


class Reserve(Message, frozen=True):
    """Blocks for `length` tokens; those that hold positions from `write_from` on must be the owner's alone.

    tokens: an array("i") of what an owner without blocks holds or will hold, for which others may have computed K
    and V. patience: seconds to wait when there are not enough blocks.
    """

    owner: int
    length: int
    write_from: int | None = None
    tokens: Any = None
    priority: float = 0.0
    patience: float = 0.0


class Granted(Message, frozen=True):
    """The owner's tables from entry `first` on, one for each group of layers; `copies` are (source, destination, filled
    rows), to be done first.

    hit: the tables' first tokens whose K and V are there already, as far as a window lets the next one read them: of a
    table with a window the first `trimmed` entries have no blocks then.
    """

    first: int
    ids: list[list[int]]
    copies: list[tuple[int, int, int]]
    hit: int = 0
    trimmed: int = 0


class Yielded(Message, frozen=True):
    """Not granted: the owner gives way to another. It surrenders all that it holds and asks again."""


class Exhausted(Message, frozen=True):
    """Not granted in time, or never to be: `wanted` blocks, of which `free` could be had, in a pool of `total`."""

    wanted: int
    free: int
    total: int


class Share(Message, frozen=True):
    """The first `length` tokens of `owner` become each child's too."""

    owner: int
    children: list[int]
    length: int


class Shrink(Message, frozen=True):
    """The owner keeps the blocks of its first `length` tokens."""

    owner: int
    length: int


class Trim(Message, frozen=True):
    """Where a group has a window the owner gives back the blocks whose positions all lie before `start`.

    No step in flight reads them.
    """

    owner: int
    start: int


class Copied(Message, frozen=True):
    """The steps that did the owner's copies have retired: their sources may go."""

    owner: int


class Publish(Message, frozen=True):
    """K and V of the first `computed` of `tokens` (an array("i")) are written: others may share the full blocks."""

    owner: int
    tokens: Any
    computed: int


class Idle(Message, frozen=True):
    """The owner has no operation in progress: it may be preempted before those that have."""

    owner: int


class Surrender(Message, frozen=True):
    """The owner gives up its blocks and will ask again; its operation keeps its rank."""

    owner: int


class Release(Message, frozen=True):
    """The owner is gone: everything it holds is returned."""

    owner: int


class Audit(Message, frozen=True):
    """Runtime -> Allocator: check the ledger; answered with how many blocks nobody holds, cached ones included."""


# Sequence -> Worker


class Submit(Message, frozen=True):
    """Compute `tokens` at positions from `start` on, then sample up to position `end`, or take the best `topk`.

    `tables`, one for each group of layers, cover at least `limit` positions, those that may be written; where a group
    has a window, the entries before those that are read hold any block. With neither sampling nor topk the K and V are
    computed and nothing else.
    """

    owner: int
    start: int = 0
    tokens: list[int] = []
    tables: list[list[int]] = []
    limit: int = 0
    copies: list[tuple[int, int, int]] = []
    end: int = 0
    params: SamplingParams | None = None
    key: int = 0
    stop: frozenset[int] = frozenset()
    topk: int = 0


class Extend(Message, frozen=True):
    """The lease grows: each table's entries from `first` on, and positions below `limit` may be written."""

    owner: int
    first: int
    ids: list[list[int]]
    limit: int


class Cancel(Message, frozen=True):
    """Drop the owner's job; answered when no step in flight names it. `pause`: its stream does not end."""

    owner: int
    pause: bool = False


# Engine -> Worker


class StepDone(Message, frozen=True):
    """What the oldest steps in flight gave, in their order, and how many `seconds` they took on average, or fewer."""

    results: list[Any]
    seconds: float


class StepFailed(Message, frozen=True):
    error: Any
