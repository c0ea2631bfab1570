"""Actors: bounded mailboxes, an urgent lane, and asks that always end."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pagefork.runtime.actor import IN_A_ROW, Actor, Reply, Signal
from pagefork.runtime.errors import DeadlineExceeded, InvalidRequest, PageforkError, WorkerDied
from pagefork.runtime.messages import Audit, Message, Release, TopK

pytestmark = pytest.mark.anyio


class Scribe(Actor):
    """Writes down the k of each TopK; stops before it while `gate` is closed."""

    def __init__(self, capacity: int = 4) -> None:
        super().__init__("scribe", capacity)
        self.seen: list[int] = []
        self.gate = anyio.Event()
        self.gate.set()

    async def handle(self, message: Message) -> Any:
        match message:
            case TopK(k=k):
                await self.gate.wait()
                if k < 0:
                    raise InvalidRequest("negative")
                if k > 999:
                    raise ZeroDivisionError("crash")
                self.seen.append(k)
                return 2 * k
            case Release(owner=owner):
                self.seen.append(-owner)
                return None
        return await super().handle(message)


async def test_a_full_mailbox_does_not_hold_up_the_other_tasks() -> None:
    scribe, most = Scribe(), 0
    for owner in range(100):
        scribe.post(Release(owner))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(scribe.run)
            while len(scribe.seen) < 100:
                before = len(scribe.seen)
                await checkpoint()
                most = max(most, len(scribe.seen) - before)
            group.cancel_scope.cancel()
    assert most <= 2 * IN_A_ROW  # trio runs the tasks of a pass in any order


async def crashing(actor: Actor) -> None:
    with pytest.raises(ZeroDivisionError):
        await actor.run()


async def blocked(actor: Scribe, group: anyio.abc.TaskGroup) -> None:
    """Close the gate and have the actor stand before it."""
    actor.gate = anyio.Event()
    await actor.tell(TopK(0))
    group.start_soon(actor.run)
    await anyio.wait_all_tasks_blocked()


async def test_answers_come_back_and_messages_are_served_in_order() -> None:
    scribe = Scribe()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(scribe.run)
            assert [await scribe.ask(TopK(k)) for k in range(10)] == [2 * k for k in range(10)]
            await scribe.tell(TopK(10))
            await scribe.ask(TopK(11))
            assert scribe.seen == list(range(12))
            group.cancel_scope.cancel()


async def test_a_typed_error_goes_to_the_asker_and_the_actor_lives_on() -> None:
    scribe = Scribe()
    async with anyio.create_task_group() as group:
        group.start_soon(scribe.run)
        with pytest.raises(InvalidRequest):
            await scribe.ask(TopK(-1))
        with pytest.raises(PageforkError, match="does not take Audit"):
            await scribe.ask(Audit())
        assert await scribe.ask(TopK(1)) == 2
        group.cancel_scope.cancel()


async def test_a_full_mailbox_holds_senders_back_and_lets_them_in_one_by_one() -> None:
    scribe = Scribe(capacity=3)
    async with anyio.create_task_group() as group:
        await blocked(scribe, group)
        for k in range(1, 9):
            group.start_soon(scribe.tell, TopK(k))
            await anyio.wait_all_tasks_blocked()
        assert scribe.queued == 3
        scribe.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert scribe.seen == list(range(9))
        group.cancel_scope.cancel()


async def test_the_urgent_lane_passes_a_full_mailbox() -> None:
    scribe = Scribe(capacity=2)
    async with anyio.create_task_group() as group:
        await blocked(scribe, group)
        await scribe.tell(TopK(1))
        await scribe.tell(TopK(2))
        with anyio.fail_after(5):
            scribe.post(Release(7))
            group.start_soon(lambda: scribe.ask(TopK(8), urgent=True))
            await anyio.wait_all_tasks_blocked()
            scribe.gate.set()
            await anyio.wait_all_tasks_blocked()
        assert scribe.seen == [0, -7, 8, 1, 2]
        group.cancel_scope.cancel()


async def test_an_ask_past_its_deadline_is_withdrawn_and_never_served() -> None:
    scribe = Scribe()
    async with anyio.create_task_group() as group:
        await blocked(scribe, group)
        with pytest.raises(DeadlineExceeded, match=r"TopK within 0\.01 s"):
            await scribe.ask(TopK(5), deadline=0.01)
        scribe.gate.set()
        assert await scribe.ask(TopK(6), deadline=5) == 12
        assert scribe.seen == [0, 6]
        group.cancel_scope.cancel()


async def test_a_deadline_counts_the_wait_for_room() -> None:
    scribe = Scribe(capacity=1)
    await scribe.tell(TopK(1))
    with anyio.fail_after(5), pytest.raises(DeadlineExceeded):
        await scribe.ask(TopK(2), deadline=0.01)
    assert scribe.queued == 1


async def test_a_request_that_was_served_when_its_asker_left_goes_to_late() -> None:
    scribe, orphans = Scribe(), []
    async with anyio.create_task_group() as group:
        await blocked(scribe, group)
        scribe.gate.set()
        await anyio.wait_all_tasks_blocked()
        scribe.gate = anyio.Event()
        async with anyio.create_task_group() as askers:
            askers.start_soon(lambda: scribe.ask(TopK(4), late=orphans.append))
            await anyio.wait_all_tasks_blocked()
            askers.cancel_scope.cancel()
            scribe.gate.set()
        assert orphans == [8], "it had begun, so its answer must not be lost"
        group.cancel_scope.cancel()


async def test_a_crash_fails_everything_pending_and_everything_later() -> None:
    scribe, errors = Scribe(capacity=2), []

    async def ask(k: int) -> None:
        with pytest.raises(WorkerDied, match="scribe crashed") as caught:
            await scribe.ask(TopK(k))
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        scribe.gate = anyio.Event()
        for k in (1000, 1, 2, 3, 4):
            group.start_soon(ask, k)
            await anyio.wait_all_tasks_blocked()
        group.start_soon(crashing, scribe)
        await anyio.wait_all_tasks_blocked()
        scribe.gate.set()
        with anyio.fail_after(5):
            while len(errors) < 5:
                await checkpoint()
            await ask(9)
            await scribe_refuses_tells(scribe)
    assert scribe.seen == [] and scribe.queued == 0
    assert isinstance(errors[0].__cause__, ZeroDivisionError)


async def scribe_refuses_tells(scribe: Scribe) -> None:
    with pytest.raises(WorkerDied):
        await scribe.tell(TopK(1))
    scribe.post(Release(1))
    assert scribe.queued == 0


async def test_a_cancelled_actor_fails_what_waits() -> None:
    scribe = Scribe()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as outer:

            async def ask() -> None:
                with pytest.raises(WorkerDied, match="has stopped"):
                    await scribe.ask(TopK(1))

            async with anyio.create_task_group() as group:
                await blocked(scribe, group)
                outer.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()


@pytest.mark.parametrize("victim", range(4))
async def test_a_sender_cancelled_while_it_waits_for_room_loses_nobody_elses_wake_up(victim: int) -> None:
    scribe = Scribe(capacity=1)
    scopes = [anyio.CancelScope() for _ in range(4)]

    async def send(index: int) -> None:
        with scopes[index]:
            await scribe.tell(TopK(index + 1))

    async with anyio.create_task_group() as senders:
        await scribe.tell(TopK(0))
        for index in range(4):
            senders.start_soon(send, index)
            await anyio.wait_all_tasks_blocked()
        # Room is given to the first; whoever leaves in the same breath must pass it on.
        assert scribe.take() is not None
        scopes[victim].cancel()
        heard = await everything(scribe)
        assert [k for k in heard if k != victim + 1] == [k for k in (1, 2, 3, 4) if k != victim + 1]
        assert scribe.queued == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_native_cancel_while_waiting_for_room_loses_nobody_elses_wake_up() -> None:
    scribe = Scribe(capacity=1)
    await scribe.tell(TopK(0))
    tasks = []
    for k in (1, 2, 3):
        tasks.append(asyncio.create_task(scribe.tell(TopK(k))))
        await anyio.wait_all_tasks_blocked()
    assert scribe.take() is not None
    tasks[0].cancel()
    assert await everything(scribe) == [2, 3]
    assert tasks[0].cancelled()


async def everything(scribe: Scribe) -> list[int]:
    """The k of all that is sent until no task has anything left to send."""
    heard = []
    await anyio.wait_all_tasks_blocked()
    while (envelope := scribe.take()) is not None:
        heard.append(envelope.message.k)
        await anyio.wait_all_tasks_blocked()
    return heard


async def test_a_reply_keeps_its_first_answer() -> None:
    reply = Reply()
    reply.set(1)
    reply.set(2)
    reply.fail(ValueError())
    reply.withdraw()
    assert reply.result() == 1 and not reply.withdrawn


async def test_a_signal_wakes_who_waits_and_keeps_nothing() -> None:
    signal = Signal()
    woken = 0

    async def wait() -> None:
        nonlocal woken
        await signal.wait()
        woken += 1

    signal.set()
    async with anyio.create_task_group() as group:
        for turn in range(3):
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert woken == turn
            signal.set()
            signal.set()
            await anyio.wait_all_tasks_blocked()
            assert woken == turn + 1


@pytest.mark.parametrize("first", ["set", "cancel"])
async def test_a_waiter_cancelled_before_or_after_it_was_woken_leaves_the_signal_usable(first: str) -> None:
    signal = Signal()
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await signal.wait()
        finally:
            ended.append(name)

    async with anyio.create_task_group() as group:
        for name in ("one", "two"):
            with anyio.fail_after(5):
                async with anyio.create_task_group() as inner:
                    inner.start_soon(wait, name)
                    await anyio.wait_all_tasks_blocked()
                    if first == "set":
                        signal.set()
                        inner.cancel_scope.cancel()
                    else:
                        inner.cancel_scope.cancel()
                        signal.set()
            signal.set()
        group.start_soon(wait, "three")
        await anyio.wait_all_tasks_blocked()
        assert ended == ["one", "two"]
        signal.set()
    assert ended == ["one", "two", "three"]
