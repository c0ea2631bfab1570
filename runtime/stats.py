"""Where a runtime stands, in numbers."""

from __future__ import annotations

from msgspec import Struct

from pagefork.runtime.house import House


class Stats(Struct, frozen=True):
    """Counts since the runtime was opened, unless they say what is now.

    blocks_*: now, but for the peak, the most that were referenced; referenced blocks are held by sequences or pinned
    by copies, cached ones are kept for reuse. Where layers are in several groups, each group has blocks of its own, and
    all are counted. block_bytes: K and V of all layers, of such a group. copies: blocks copied on write, copied_bytes
    over all layers. steps: forward passes. tokens: sampled; prompt_tokens: computed in chunks. sequences:
    live now; forks: children made. prefix_hits: sequences that found cached blocks, prefix_hit_tokens in them;
    evictions: cached blocks given to others. preemptions: times a sequence was told to give up its blocks. waiting:
    operations that wait for blocks now; waited: requests that had to, expired: those of them that waited in vain. jobs:
    at the worker now. *_queue: messages in a mailbox now.
    """

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_referenced: int
    blocks_peak: int
    block_bytes: int
    copies: int
    copied_bytes: int
    steps: int
    tokens: int
    prompt_tokens: int
    sequences: int
    forks: int
    prefix_hits: int
    prefix_hit_tokens: int
    evictions: int
    preemptions: int
    waiting: int
    waited: int
    expired: int
    jobs: int
    allocator_queue: int
    worker_queue: int


def collect(house: House) -> Stats:
    """The numbers of now. Cheap: nothing is counted anew."""
    ledger, worker = house.allocator.ledger, house.worker
    pool = ledger.pool
    block_bytes = house.facts.kv_bytes // pool.num_blocks
    return Stats(
        blocks_total=pool.num_blocks,
        blocks_free=pool.num_free,
        blocks_cached=ledger.cached,
        blocks_referenced=ledger.referenced,
        blocks_peak=ledger.peak,
        block_bytes=block_bytes,
        copies=ledger.copies,
        copied_bytes=ledger.copied_rows * block_bytes // pool.block_size,
        steps=worker.steps,
        tokens=worker.tokens,
        prompt_tokens=worker.prompt_tokens,
        sequences=len(house.sequences),
        forks=house.forks,
        prefix_hits=ledger.hits,
        prefix_hit_tokens=ledger.hit_tokens,
        evictions=ledger.evictions,
        preemptions=house.allocator.arbiter.preempted,
        waiting=house.allocator.waiting,
        waited=house.allocator.waited,
        expired=house.allocator.arbiter.expired,
        jobs=worker.jobs,
        allocator_queue=house.allocator.queued,
        worker_queue=worker.queued,
    )
