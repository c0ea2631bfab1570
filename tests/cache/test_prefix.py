"""Prefix index and ledger: what is found again, what is evicted, and what is never shared."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pagefork.cache.blocks import BlockPool, BlocksExhausted
from pagefork.cache.ledger import Ledger
from pagefork.cache.prefix import PrefixIndex

SIZE = 4


def tokens(*counts: tuple[int, int]) -> array[int]:
    """`(value, n)` pairs: n tokens counted up from value."""
    return array("i", [value + i for value, n in counts for i in range(n)])


def ledger(blocks: int = 16, **options: bool) -> Ledger:
    return Ledger(BlockPool(blocks, SIZE), **options)


def computed(ledger: Ledger, owner: int, said: array[int]) -> list[int]:
    """An owner that has computed and published these tokens; returns its blocks."""
    ids = ledger.reserve(owner, len(said), 0, said).ids[0]
    ledger.publish(owner, said, len(said))
    return ids


@pytest.mark.parametrize("kind", [list, lambda said: said, lambda said: np.array(said, dtype=np.int32)])
def test_a_prompt_finds_the_blocks_of_its_longest_published_prefix(kind: type) -> None:
    one = ledger()
    said = tokens((0, 11))
    ids = computed(one, 1, said)
    assert one.index.lookup(kind(said)) == ids[:2]
    grant = one.reserve(2, 13, 0, kind(tokens((0, 9), (50, 4))))
    assert grant.hit == 8 and grant.first == 0 and grant.ids[0][:2] == ids[:2] and len(grant.ids[0]) == 4
    assert one.reserve(3, 4, 0, kind(tokens((1, 4)))).hit == 0
    assert (one.hits, one.hit_tokens) == (1, 8)
    one.check()


@pytest.mark.parametrize(("length", "hit"), [(8, 4), (9, 8), (4, 0), (1, 0)])
def test_whole_prompt_hit_still_leaves_a_token_to_compute(length: int, hit: int) -> None:
    one = ledger()
    computed(one, 1, tokens((0, 12)))
    grant = one.reserve(2, length, 0, tokens((0, length)))
    assert grant.hit == hit
    for position in range(hit, length):
        assert one.pool.refcounts[grant.ids[0][position // SIZE]] == 1


def test_prefix_off_publishes_and_adopts_nothing() -> None:
    one = ledger(prefix=False)
    computed(one, 1, tokens((0, 12)))
    one.release(1)
    assert one.pool.num_free == 16
    assert one.reserve(2, 12, 0, tokens((0, 12))).hit == 0


def test_an_owner_with_blocks_adopts_none() -> None:
    one = ledger()
    computed(one, 1, tokens((0, 12)))
    one.reserve(2, 2, 0)
    assert one.reserve(2, 12, 2, tokens((0, 12))).hit == 0
    one.check()


def test_idle_blocks_are_kept_and_counted() -> None:
    one = ledger()
    computed(one, 1, tokens((0, 10)))
    assert (one.cached, one.referenced, one.pool.num_free) == (0, 3, 13)
    assert one.release(1) == 3
    assert (one.cached, one.referenced, one.pool.num_free, one.available) == (2, 0, 14, 16)
    assert one.reserve(2, 10, 0, tokens((0, 10))).hit == 8
    assert one.cached == 0
    one.check()


def test_free_blocks_go_before_idle_ones() -> None:
    one = ledger(6)
    computed(one, 1, tokens((0, 8)))
    one.release(1)
    one.reserve(2, 16, 0)
    assert (one.cached, one.evictions) == (2, 0)
    one.reserve(2, 20, 16)
    assert (one.cached, one.evictions) == (1, 1)


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    one = ledger(9)
    old, new = tokens((0, 12)), tokens((100, 12))
    old_ids, new_ids = computed(one, 1, old), computed(one, 2, new)
    one.release(1)
    one.release(2)
    one.reserve(3, 16, 0)
    assert one.index.lookup(old) == old_ids[:2] and one.index.lookup(new) == new_ids
    one.release(3)
    assert one.reserve(4, 9, 0, old).hit == 8
    one.release(4)
    one.reserve(5, 24, 0)
    assert one.index.lookup(new) == new_ids[:1], "used less recently now"
    assert one.index.lookup(old) == old_ids[:2]
    one.check()


def test_a_refused_reserve_adopts_and_evicts_nothing() -> None:
    one = ledger(6)
    said = tokens((0, 12))
    computed(one, 1, said)
    one.release(1)
    computed(one, 2, tokens((100, 8)))
    with pytest.raises(BlocksExhausted) as error:
        one.reserve(3, 20, 0, tokens((0, 20)))
    assert (error.value.wanted, error.value.free) == (2, 1)
    assert one.table(3) is None and (one.cached, one.evictions, one.hits) == (3, 0, 0)
    assert one.reserve(3, 16, 0, tokens((0, 16))).hit == 12
    one.check()


def test_what_is_adopted_is_not_evicted_for_the_rest_of_the_grant() -> None:
    one = ledger(4)
    said = tokens((0, 8))
    ids = computed(one, 1, said)
    one.release(1)
    computed(one, 2, tokens((100, 4)))
    one.release(2)
    grant = one.reserve(3, 16, 0, tokens((0, 16)))
    assert grant.hit == 8 and grant.ids[0][:2] == ids and sorted(grant.ids[0]) == [0, 1, 2, 3]


def test_a_published_block_of_one_holder_is_written_in_place_and_not_found_any_more() -> None:
    one = ledger()
    said = tokens((0, 12))
    ids = computed(one, 1, said)
    one.shrink(1, 6)
    grant = one.reserve(1, 8, 6)
    assert grant.copies == [] and one.table(1).ids.tolist() == ids[:2]  # type: ignore[union-attr]
    assert one.pool.refcounts[ids[1]] == 1
    assert one.index.lookup(said) == ids[:1]
    assert one.cached == 0, "the idle tail could not be found any more"
    changed = said[:6] + tokens((50, 2))
    one.publish(1, changed, 8)
    assert one.index.lookup(changed) == ids[:2] and one.index.lookup(said) == ids[:1]
    one.check()


def test_a_published_block_with_another_holder_is_copied() -> None:
    one = ledger()
    said = tokens((0, 8))
    ids = computed(one, 1, said)
    one.share(1, [2], 6)
    ((source, target, rows),) = one.reserve(2, 8, 6).copies
    assert (source, rows) == (ids[1], 2) and target not in ids
    assert one.index.lookup(said) == ids
    changed = said[:6] + tokens((50, 2))
    one.publish(2, changed, 8)
    assert one.index.lookup(changed) == [ids[0], target]
    one.copied(2)
    one.check()


def test_forks_that_meet_again_find_each_other() -> None:
    one = ledger()
    said = tokens((0, 8))
    computed(one, 1, said)
    one.share(1, [2, 3], 6)
    for owner in (2, 3):
        one.reserve(owner, 12, 6)
        one.copied(owner)
        one.publish(owner, said[:6] + tokens((50, 6)), 12)
    kept = one.index.lookup(said[:6] + tokens((50, 6)))
    assert kept == one.table(2).ids.tolist()  # type: ignore[union-attr]
    one.release(2)
    one.release(3)
    assert one.cached == 2, "the copies of the second were never published"
    one.check()


def test_the_first_of_two_equal_chains_stays_published_and_the_second_goes_on_from_it() -> None:
    one = ledger()
    said = tokens((0, 8))
    first = one.reserve(1, 8, 0, said).ids[0]
    second = one.reserve(2, 12, 0, said + tokens((8, 4))).ids[0]
    one.publish(1, said, 8)
    one.publish(2, said + tokens((8, 4)), 12)
    assert one.index.lookup(tokens((0, 12))) == [*first, second[2]]
    one.release(1)
    one.release(2)
    assert one.cached == 3 and one.pool.num_free == 13
    one.reserve(3, 4 * 14, 0)
    assert one.index.lookup(tokens((0, 12))) == first, "the tail went first, though its owner was the last to leave"
    one.check()


def test_evicting_a_head_frees_what_could_not_be_found_without_it() -> None:
    one = ledger(8)
    said = tokens((0, 12))
    one.reserve(1, 4, 0, said[:4])
    one.reserve(2, 12, 0, said)
    one.publish(1, said, 4)
    one.publish(2, said, 12)
    one.release(1)
    one.reserve(3, 20, 0)
    assert len(one.index) == 0 and one.cached == 0
    one.check()
    one.publish(2, said, 12)
    assert one.index.lookup(said) == [], "nothing new to publish"
    one.reserve(2, 12, 11)
    one.publish(2, said, 12)
    assert one.index.lookup(said) == one.table(2).ids.tolist()  # type: ignore[union-attr]
    one.check()


def test_publishing_again_after_a_truncation_follows_the_new_tokens() -> None:
    one = ledger()
    said = tokens((0, 16))
    computed(one, 1, said)
    one.shrink(1, 4)
    changed = said[:4] + tokens((70, 8))
    one.reserve(1, 12, 4)
    one.publish(1, changed, 12)
    assert one.index.lookup(changed) == one.table(1).ids.tolist()  # type: ignore[union-attr]
    assert len(one.index.lookup(said)) == 4, "the tail is idle, and true still"
    one.check()


def test_other_weights_never_share() -> None:
    pool = BlockPool(8, SIZE)
    index = PrefixIndex(pool, "base", hasher=lambda parent, chunk: hash(chunk))
    said = tokens((0, 8))
    ids = pool.allocate(2)
    index.publish(index.root, said, ids, 2)
    assert index.lookup(said) == ids.tolist()
    assert index.follow(index.root_of("adapter"), said, 2).depth == 0
    assert index.follow(index.root_of("base"), said, 2).depth == 2


def test_hash_collision_is_no_hit() -> None:
    pool = BlockPool(8, SIZE)
    index = PrefixIndex(pool, hasher=lambda parent, chunk: 7)
    one, other = tokens((0, 4)), tokens((50, 4))
    ids = pool.allocate(4)
    chain = index.publish(index.root, one + other, ids[:2], 2)
    assert chain.depth == 1, "what collides stays out"
    assert index.publish(index.root, other, ids[2:3], 1).depth == 0
    assert index.lookup(one) == [int(ids[0])] and index.lookup(other) == [] == index.lookup(other + one)
    index.check()


def test_equal_tokens_behind_colliding_heads_are_no_hit() -> None:
    pool = BlockPool(8, SIZE)
    index = PrefixIndex(pool, hasher=lambda parent, chunk: hash(chunk) if chunk == tail else 7)
    one, other, last = tokens((0, 4)), tokens((50, 4)), tokens((90, 4))
    tail = last.tobytes()
    ids = pool.allocate(4)
    index.publish(index.root, one + last, ids[:2], 2)
    pool.free(ids[:2])
    index.settle(ids[:2])
    index.unpublish(int(ids[0]))
    index.publish(index.root, other, ids[2:3], 1)
    assert index.lookup(other + last) == ids[2:3].tolist()
    index.check()


def test_stale_tails_are_neither_kept_in_the_table_nor_published_as_new_tokens() -> None:
    one = ledger()
    said = tokens((0, 16))
    ids = one.reserve(1, 16, 0, said).ids[0]
    one.shrink(1, 5)
    assert one.table(1).ids.tolist() == ids[:2]  # type: ignore[union-attr]
    one.publish(1, said, 16)
    assert one.index.lookup(said) == ids[:1], "only what the table still covers"
    one.reserve(1, 16, 5)
    changed = said[:5] + tokens((60, 11))
    one.publish(1, changed, 5)
    assert one.index.lookup(said) == ids[:1] == one.index.lookup(changed), "nothing is published before it is computed"


def test_an_aliasing_copy_is_impossible_while_its_source_is_evictable() -> None:
    """The source of a copy not done yet is published and has no holder but the pin: it must outlast an eviction."""
    one = ledger(5)
    said = tokens((0, 8))
    computed(one, 1, said)
    one.share(1, [2], 6)
    ((source, target, _),) = one.reserve(2, 8, 6).copies
    one.release(1)
    assert one.cached == 0 and source != target
    with pytest.raises(BlocksExhausted):
        one.reserve(3, 12, 0)
    assert source not in one.reserve(3, 8, 0).ids[0]
    one.release(3)
    one.copied(2)
    assert one.cached == 1 and source in one.reserve(3, 12, 0).ids[0]
    one.check()
