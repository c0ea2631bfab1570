"""A step's arrays on their way to a CUDA device and back: as the device does it, but on the CPU."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import anyio
import mlx.core as mx
import numpy as np
import pytest
import toy_model

from pagefork import kernels
from pagefork.kernels.device import Device
from pagefork.runtime import Runtime, SamplingParams, forward, transfer
from pagefork.runtime.attention import arrays_of
from pagefork.runtime.engine import Segment, StepPlan
from pagefork.runtime.planner import NO_COPIES
from pagefork.runtime.sampling import Sampling
from pagefork.runtime.transfer import CudaTransfer, Transfer


def land(target: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    view, at = np.array(target, copy=False), 0
    for array in arrays:
        found = np.array(array).ravel()
        view[at : at + found.size] = found.view(np.int32)
        at += found.size
    return mx.array(0)


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The memory that is kept in the host."""
    kept: list[tuple[int, int]] = []

    def keep_in_host(pointer: int, nbytes: int, keep: bool = True) -> None:
        (kept.append if keep else kept.remove)((pointer, nbytes))

    monkeypatch.setattr(kernels, "land", land)
    monkeypatch.setattr(transfer, "keep_in_host", keep_in_host)
    return kept


def some(rng: random.Random) -> list[np.ndarray]:
    """Arrays of all the types and shapes that a step sends, now and then more than a page of them."""
    most = rng.choice([1, 9, 300, 30_000])
    draws = np.random.default_rng(rng.randrange(1 << 30))
    shapes = [(draws.integers(1, most + 1),), (draws.integers(1, 9), draws.integers(1, most // 8 + 2))]
    types = [np.int32, np.uint32, np.float32]
    return [draws.integers(0, 1 << 30, shape).astype(dtype) for dtype in types for shape in shapes]


@pytest.mark.parametrize("seed", range(8))
def test_each_step_finds_what_was_sent_for_it_however_late_it_runs(seed: int, advice: list[tuple[int, int]]) -> None:
    rng, steps = random.Random(seed), 2
    way = CudaTransfer(steps)
    flights: deque[tuple[list[np.ndarray], list[mx.array]]] = deque()
    for _ in range(60):
        if len(flights) == steps:
            given, arrays = flights.popleft()  # evaluated only now, since MLX is lazy
            for one, array in zip(given, arrays, strict=True):
                assert array.shape == one.shape
                assert np.array_equal(np.array(array), one) and np.array(array).dtype == one.dtype
        way.begin()
        given = some(rng)
        arrays = way.send(given[:4]) + way.send(given[4:])
        flights.append((given, arrays))
    assert len(advice) == 2 * steps
    way.close()
    assert not advice


@pytest.mark.parametrize("seed", range(4))
def test_what_lands_is_read_after_later_steps_have_begun(seed: int, advice: list[tuple[int, int]]) -> None:
    rng, steps = random.Random(seed), 2
    way = CudaTransfer(steps)
    flights = deque()
    for _ in range(40):
        if len(flights) == steps:
            sent, arrival = flights.popleft()
            for one, found in zip(sent, arrival.read(), strict=True):
                assert found.shape == one.shape and found.dtype == one.dtype and np.array_equal(found, one)
                assert found.flags.owndata
        way.begin()
        sent = [one for one in some(rng) if one.dtype != np.uint32]
        flights.append((sent, way.receive([mx.array(one) for one in sent])))
    way.close()
    assert not advice


def loses(target: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    return land(target, [array + 1 for array in arrays])


def fails(target: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    raise RuntimeError("it does not compile")


def test_a_way_that_does_not_work_is_not_taken(
    advice: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "device", lambda: Device("cuda", "some GPU", 1))
    assert isinstance(transfer.transfer(2), CudaTransfer)
    advice.clear()
    for broken, problem in ((loses, "other values"), (fails, "does not compile")):
        monkeypatch.setattr(kernels, "land", broken)
        caplog.clear()
        assert type(transfer.transfer(2)) is Transfer
        assert problem in caplog.text and not advice


class Recorded(CudaTransfer):
    """Says what was asked of it."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.calls = ""

    def begin(self) -> None:
        self.calls += " "
        super().begin()

    def send(self, given: Sequence[np.ndarray]) -> list[mx.array]:
        self.calls += "s"
        return super().send(given)

    def receive(self, arrays: Sequence[mx.array]) -> transfer.Arrival:
        self.calls += "r"
        return super().receive(arrays)


@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_engine_sends_and_receives_each_step_on_its_own(
    temperature: float, advice: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)

    async def said() -> tuple[list[int], list[tuple[int, float]]]:
        async with Runtime.open((toy_model.ToyModel(), None), blocks=64, block_size=4) as rt:
            seq = await rt.sequence([1, 2, 3, 4, 5])
            best = await seq.topk(3)
            return [step.token async for step in seq.generate(params)], best

    with anyio.fail_after(60):
        expected = await said()
        ways: list[Recorded] = []

        def recorded(steps: int) -> Recorded:
            ways.append(Recorded(steps))
            return ways[-1]

        monkeypatch.setattr(forward, "transfer", recorded)
        assert await said() == expected
    steps = ways[0].calls.split()
    assert steps[-1] == ("ssr" if temperature else "sr") and set(steps) <= {"s", "sr", "ssr"} and len(steps) >= 12
    assert not advice, "closed with its runtime"


def plan(tokens: list[int], feed: list[int], chunk: int = 0) -> StepPlan:
    """Decodes of `tokens`, and a prompt's chunk of so many more, of two groups of layers."""
    decodes, total = len(tokens), len(tokens) + chunk
    ints = np.arange(total, dtype=np.int32)
    rows = ints[:decodes] if chunk else ints
    return StepPlan(
        tokens=np.array([*tokens, *range(900, 900 + chunk)], np.int32),
        positions=ints + 10,
        slots=np.stack([ints + 20, ints + 40]),
        feed=np.array(feed, np.int32),
        tables=np.arange(6 * decodes, dtype=np.int32).reshape(2, decodes, 3),
        lengths=ints[:decodes] + 11,
        segments=(Segment(decodes, chunk, 0, np.arange(8, dtype=np.int32).reshape(2, 4)),) if chunk else (),
        copies=NO_COPIES,
        rows=rows,
        sampling=Sampling(*(np.zeros(len(rows), np.float32) for _ in range(4)), np.zeros((len(rows), 2), np.uint32)),
    )


@pytest.mark.parametrize("way", [Transfer, lambda: CudaTransfer(2)], ids=["as MLX does it", "as on CUDA"])
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize(
    ("feed", "expected"),
    [
        ([], [1, 2, 3]),
        ([-1, -1, -1], [1, 2, 3]),
        ([0, 1, 2], [70, 71, 72]),
        ([2, 0, 1], [72, 70, 71]),
        ([-1, 2, -1], [1, 72, 3]),
    ],
    ids=str,
)
def test_rows_take_their_tokens_from_the_plan_or_from_the_step_before(
    way, chunk: int, feed: list[int], expected: list[int], advice: list[tuple[int, int]]
) -> None:
    given = plan([1, 2, 3], feed, chunk)
    found = arrays_of(given, mx.array([70, 71, 72]), way())
    assert found.tokens.tolist() == [*expected, *given.tokens[3:].tolist()]
    for name in ("positions", "slots", "tables", "lengths"):
        assert np.array_equal(np.array(getattr(found, name)), getattr(given, name)), name
    if chunk:
        assert found.rows is not None and found.rows.tolist() == [0, 1, 2]
        assert [[table.tolist() for table in tables] for tables in found.segments] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    else:
        assert found.rows is None and not found.segments


def test_fewer_rows_than_the_step_before_take_theirs(advice: list[tuple[int, int]]) -> None:
    found = arrays_of(plan([1, 2], [0, 1]), mx.array([70, 71, 72]), CudaTransfer(2))
    assert found.tokens.tolist() == [70, 71]
