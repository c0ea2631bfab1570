"""Arbiter: who is served, who waits and who gives way when the pool is full."""

from __future__ import annotations

from array import array

import pytest

from pagefork.cache.arbiter import Arbiter, Event, Expired, Granted, Preempt, Refused, Waiting, Yield
from pagefork.cache.blocks import BlockPool
from pagefork.cache.ledger import Ledger

SIZE = 4


def arbiter(blocks: int, **options: float) -> Arbiter:
    return Arbiter(Ledger(BlockPool(blocks, SIZE)), **options)  # type: ignore[arg-type]


def said(first: int, n: int) -> array[int]:
    return array("i", range(first, first + n))


def granted(answer: object) -> Granted:
    assert isinstance(answer, Granted)
    return answer


def waiting(answer: object) -> int:
    assert isinstance(answer, Waiting)
    return answer.ticket


def only(events: list[Event]) -> Event:
    (event,) = events
    return event


def test_what_fits_is_granted_at_once() -> None:
    one = arbiter(4)
    assert granted(one.request(1, 16, 0, now=0)).grant.ids[0] == [0, 1, 2, 3]
    assert one.tick(0) == [] and one.next_deadline is None
    one.check()


def test_what_can_never_fit_is_refused_at_once() -> None:
    one = arbiter(4)
    answer = one.request(1, 17, 0, now=0)
    assert isinstance(answer, Refused) and (answer.reason, answer.wanted, answer.total) == ("too large", 5, 4)
    assert one.ledger.table(1) is None and one.waiting == 0


def test_requests_wait_in_the_order_of_arrival_and_none_passes_by() -> None:
    one = arbiter(4)
    one.request(1, 12, 0, now=0)
    big = waiting(one.request(2, 8, 0, now=1))
    small = waiting(one.request(3, 1, 0, now=2))
    assert one.tick(2) == [], "neither may preempt who came before"
    one.forget(1)
    first, second = one.tick(3)
    assert (granted(first).ticket, granted(second).ticket) == (big, small)


def test_a_request_that_takes_no_block_passes_by() -> None:
    one = arbiter(4)
    one.request(1, 10, 0, now=0)
    waiting(one.request(2, 8, 0, now=1))
    one.request(1, 12, 10, now=2)
    assert granted(one.request(1, 12, 10, now=2)).grant.copies == []


def test_adopting_idle_blocks_takes_them_from_who_waits() -> None:
    one = arbiter(4)
    one.request(1, 8, 0, said(0, 8), now=0)
    one.ledger.publish(1, said(0, 8), 8)
    one.request(9, 8, 0, now=0)
    one.release(1)
    waiting(one.request(2, 12, 0, now=1))
    waiting(one.request(3, 8, 0, said(0, 12), now=2))


def test_priority_goes_first_by_as_much_as_its_seconds_of_waiting() -> None:
    one = arbiter(1, ageing=10)
    one.request(1, 4, 0, now=0)
    tickets = {
        name: waiting(one.request(name, 4, 0, now=now, priority=p))
        for name, now, p in [(2, 1, 0), (3, 5, 1), (4, 12, 1)]
    }
    order = []
    for owner in (1, 3, 2):
        one.forget(owner)
        order.append(granted(only(one.tick(20))).ticket)
    assert order == [tickets[3], tickets[2], tickets[4]]


def test_a_stream_of_urgent_requests_does_not_starve_a_low_one() -> None:
    """One level below the others, it is passed by those that come in the first ten seconds and by no more."""
    one = arbiter(2, ageing=10)
    one.request(0, 8, 0, now=0)
    waiting(one.request(1, 8, 0, now=0, priority=-1))
    served = []
    for now in range(1, 20):
        one.request(now + 1, 8, 0, now=now)
        one.forget(served[-1] if served else 0)
        served.append(granted(only(one.tick(now))).owner)
    assert served == [*range(2, 11), 1, *range(11, 20)]


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    one = arbiter(4)
    one.request(0, 16, 0, now=0)
    one.request(1, 16, 0, now=1)
    for now in range(2, 9):
        waiting(one.request(now, 4, 0, now=now))
    one.forget(0)
    assert granted(only(one.tick(9))).owner == 1
    one.forget(1)
    assert [granted(event).owner for event in one.tick(10)] == [2, 3, 4, 5]


def test_idle_owners_are_preempted_first_the_longest_idle_before_others() -> None:
    one = arbiter(6)
    for owner in (1, 2, 3):
        one.request(owner, 8, 0, now=owner)
    one.idle(2, 10)
    one.idle(1, 11)
    ticket = waiting(one.request(4, 4, 0, now=12))
    assert only(one.tick(12)) == Preempt(2)
    assert one.tick(13) == [], "what is promised is not asked for twice"
    assert one.release(2) == 2
    assert granted(only(one.tick(14))).ticket == ticket
    assert granted(one.request(5, 4, 0, now=15))
    one.check()


def test_only_as_many_are_preempted_as_needed() -> None:
    one = arbiter(6)
    one.request(1, 4, 0, now=0)
    one.request(2, 20, 0, now=0)
    one.idle(1, 1)
    one.idle(2, 2)
    waiting(one.request(3, 16, 0, now=3))
    assert only(one.tick(3)) == Preempt(2), "with the larger the smaller is not needed"


def test_active_owners_behind_the_first_give_way_the_last_before_others() -> None:
    one = arbiter(6)
    for owner in (1, 2, 3):
        one.request(owner, 8, 0, now=owner)
    ticket = waiting(one.request(2, 12, 8, now=10))
    assert only(one.tick(10)) == Preempt(3)
    assert one.release(3) == 2
    assert granted(only(one.tick(11))).ticket == ticket
    again = waiting(one.request(3, 8, 0, now=12))
    assert one.tick(12) == [], "owners 1 and 2 came before"
    one.forget(1)
    assert granted(only(one.tick(13))).ticket == again
    one.check()


def test_who_waits_with_blocks_in_hand_yields_and_keeps_its_place() -> None:
    one = arbiter(4)
    one.request(1, 8, 0, now=1)
    one.request(2, 8, 0, now=2)
    second = waiting(one.request(2, 12, 8, now=3))
    waiting(one.request(3, 4, 0, now=4))
    first = waiting(one.request(1, 16, 8, now=5))
    assert only(one.tick(5)) == Yield(second, 2)
    one.release(2)
    assert granted(only(one.tick(6))).ticket == first
    again = waiting(one.request(2, 12, 0, now=7))
    one.idle(1, 8)
    assert only(one.tick(8)) == Preempt(1)
    one.release(1)
    assert granted(one.tick(9)[0]).ticket == again, "before owner 3, who asked earlier but began later"
    one.check()


def test_preempt_loop_ends_because_the_first_is_preempted_by_nobody() -> None:
    """Two that want the whole pool, each released and asking again whenever it is told to: the elder finishes."""
    one = arbiter(4)
    length = {1: 8, 2: 8}
    for owner in (1, 2):
        one.request(owner, 8, 0, now=owner)
    preempted = {1: 0, 2: 0}
    for now in range(3, 40):
        for owner in (1, 2):
            if owner in length and one.ledger.table(owner) is not None and length[owner] < 16:
                answer = one.request(owner, length[owner] + 1, length[owner], now=now)
                if isinstance(answer, Granted):
                    length[owner] += 1
        for event in one.tick(now):
            if isinstance(event, (Preempt, Yield)):
                preempted[event.owner] += 1
                one.release(event.owner)
                one.request(event.owner, length[event.owner], 0, now=now)
            elif isinstance(event, Granted) and event.owner == 1:
                length[1] += 1
        one.check()
        if length.get(1) == 16:
            break
    assert length[1] == 16 and preempted[1] == 0 and preempted[2] == 1


def test_nobody_is_preempted_in_vain() -> None:
    one = arbiter(4)
    one.request(1, 8, 0, now=0)
    one.share(1, [2], 8, now=1)
    one.request(3, 8, 0, now=2)
    waiting(one.request(4, 4, 0, now=3))
    assert one.tick(3) == [], "owner 2 holds nothing that owner 1 does not"
    assert one.next_deadline is not None
    assert one.tick(one.next_deadline) == []
    one.idle(1, 4)
    assert set(one.tick(10)) == {Preempt(1), Preempt(2)}, "together they free two"
    one.check()


def test_a_sharer_is_preempted_when_that_saves_the_copy() -> None:
    one = arbiter(1)
    one.request(1, 2, 0, now=0)
    one.share(1, [2], 2, now=1)
    ticket = waiting(one.request(1, 3, 2, now=2))
    assert only(one.tick(2)) == Preempt(2)
    assert one.release(2) == 0
    answer = granted(only(one.tick(3)))
    assert answer.ticket == ticket and answer.grant.copies == []


def test_what_the_first_would_adopt_is_not_worth_preempting_for() -> None:
    one = arbiter(4)
    tokens = said(0, 16)
    one.request(1, 8, 0, tokens[:8], now=0)
    one.ledger.publish(1, tokens, 8)
    one.idle(1, 1)
    one.request(2, 8, 0, now=0)
    one.idle(2, 2)
    waiting(one.request(3, 16, 0, tokens, now=3))
    assert only(one.tick(3)) == Preempt(2)


def test_a_victim_that_asks_before_it_heard_is_told_to_yield() -> None:
    one = arbiter(2)
    one.request(1, 8, 0, now=0)
    one.idle(1, 1)
    ticket = waiting(one.request(2, 4, 0, now=2))
    assert only(one.tick(2)) == Preempt(1)
    assert isinstance(one.request(1, 8, 7, now=3), Yield)
    one.release(1)
    again = waiting(one.request(1, 8, 0, now=3))
    assert granted(only(one.tick(3))).ticket == ticket
    one.forget(2)
    assert granted(only(one.tick(4))).ticket == again


def test_a_ticket_expires_at_its_deadline() -> None:
    one = arbiter(1)
    one.request(1, 4, 0, now=0)
    late = waiting(one.request(2, 4, 0, now=0, deadline=9))
    soon = waiting(one.request(3, 4, 0, now=0, deadline=5))
    assert one.next_deadline == 5 and one.tick(4.9) == []
    assert only(one.tick(5)) == Expired(soon, 3, 1, 0)
    assert one.next_deadline == 9
    one.forget(1)
    assert granted(only(one.tick(6))).ticket == late and one.next_deadline is None
    assert not one.withdraw(late)


def test_withdrawn_tickets_hold_nobody_up_and_leak_nothing() -> None:
    one = arbiter(2)
    one.request(1, 4, 0, now=0)
    head = waiting(one.request(2, 8, 0, now=1))
    ticket = waiting(one.request(3, 4, 0, now=2))
    assert one.withdraw(head) and not one.withdraw(head)
    assert granted(only(one.tick(3))).ticket == ticket
    for owner in (1, 2, 3):
        one.forget(owner)
    assert one.ledger.pool.num_free == 2 and one.waiting == 0
    one.check()


def test_closing_an_owner_withdraws_its_ticket() -> None:
    one = arbiter(1)
    one.request(1, 4, 0, now=0)
    ticket = waiting(one.request(2, 4, 0, now=1, deadline=2))
    one.forget(2)
    one.forget(1)
    assert one.tick(5) == [] and not one.withdraw(ticket)


def test_a_second_request_of_an_owner_withdraws_its_first() -> None:
    one = arbiter(1)
    one.request(1, 4, 0, now=0)
    first = waiting(one.request(2, 4, 0, now=1))
    second = waiting(one.request(2, 3, 0, now=2))
    assert not one.withdraw(first)
    one.forget(1)
    assert granted(only(one.tick(3))).ticket == second


def test_a_full_queue_refuses_new_operations_but_not_those_that_were_preempted() -> None:
    one = arbiter(2, max_queue=1)
    one.request(1, 4, 0, now=0)
    one.request(2, 4, 0, now=1)
    waiting(one.request(3, 4, 0, now=2))
    answer = one.request(4, 4, 0, now=3)
    assert isinstance(answer, Refused) and (answer.reason, answer.wanted, answer.total) == ("queue full", 1, 1)
    waiting(one.request(2, 8, 4, now=4))


def test_a_waiting_request_finds_what_was_published_meanwhile() -> None:
    one = arbiter(4)
    tokens = said(0, 12)
    one.request(1, 12, 0, tokens, now=0)
    ticket = waiting(one.request(2, 12, 0, tokens, now=1))
    one.tick(1)
    one.ledger.publish(1, tokens, 12)
    event = granted(only(one.tick(2)))
    assert event.ticket == ticket and event.grant.hit == 8
    one.check()


@pytest.mark.parametrize("blocks", [1, 3])
def test_double_free_under_sharing_cannot_happen(blocks: int) -> None:
    one = arbiter(4)
    one.request(1, blocks * SIZE, 0, now=0)
    one.share(1, [2, 3], blocks * SIZE, now=1)
    assert [one.forget(o) for o in (1, 1, 2, 2, 3, 3)] == [0, 0, 0, 0, blocks, 0]
    assert one.ledger.pool.num_free == 4
    one.check()
