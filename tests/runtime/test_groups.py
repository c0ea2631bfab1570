"""Models of which some layers have a window and others see everything: each group of layers has tables of its own."""

from __future__ import annotations

import itertools
import random

import anyio
import mlx.core as mx
import numpy as np
import pytest
from architectures import tiny
from bench_control import NullModel

from pagefork.cache.kv import PagedKVCache
from pagefork.runtime import BeamSearchParams, ContextOverflow, Runtime, SamplingParams
from pagefork.runtime.attention import Arrays, StepAttention
from pagefork.runtime.engine import Segment, StepPlan
from pagefork.runtime.forward import Engine
from pagefork.runtime.groups import MOST, Groups, grouped, longest, window_of
from pagefork.runtime.layers import LayerSpec
from pagefork.runtime.models import load
from pagefork.runtime.sampling import Sampling

from .double import Double, free, ledger, runtime, settled, take
from .test_window import WINDOW, poison, prompt_of, sound, stepwise

pytestmark = pytest.mark.anyio

SHAPE = (2, 64)
LAYOUTS = [(None, WINDOW), (None, WINDOW, WINDOW), (None, None, WINDOW)]


def windows_of(layers: int, every: int) -> list[int | None]:
    """The windows of layers of which the last in every so many sees all."""
    return [None if (layer + 1) % every == 0 else 512 for layer in range(layers)]


def held(rt: Runtime, owner: int, group: int) -> int:
    table = ledger(rt).table(owner, group)
    return 0 if table is None else len(table.live)


# Which layers share


@pytest.mark.parametrize(
    ("layers", "every", "groups", "pools"),
    [
        (24, 2, 2, 12),  # gpt-oss 20b
        (26, 6, 7, 4),  # gemma 3 1b
        (34, 6, 7, 5),  # 4b
        (48, 6, 6, 8),  # 12b
        (62, 6, 5, 13),  # 27b
        (64, 4, 4, 16),  # olmo 3 32b
    ],
)
def test_layers_are_put_in_few_groups_that_leave_little_unused(
    layers: int, every: int, groups: int, pools: int
) -> None:
    found = grouped(windows_of(layers, every), [SHAPE] * layers)
    assert (len(found.windows), found.pools) == (groups, pools) and groups * pools <= 1.08 * layers


@pytest.mark.parametrize("seed", range(200))
def test_layers_of_one_pool_are_of_different_groups_and_layers_of_one_group_alike(seed: int) -> None:
    rng = random.Random(seed)
    windows = [rng.choice([None, 8, 8, 16]) for _ in range(rng.randrange(1, 40))]
    found = grouped(windows, [SHAPE] * len(windows))
    assert len(set(found.places)) == len(found.places) == len(windows)
    assert {group for group, _ in found.places} == set(range(len(found.windows))) and len(found.windows) <= MOST
    assert {pool for _, pool in found.places} == set(range(found.pools))
    assert all(found.places[found.layer(pool)][1] == pool for pool in range(found.pools))
    assert list(found.windows) == sorted(found.windows, key=lambda window: window is not None), "None first"
    for group, window in enumerate(found.windows):
        own = [windows[layer] for layer, (other, _) in enumerate(found.places) if other == group]
        if window is not None:
            assert window == max(w for w in own if w is not None) and None not in own
        else:
            assert set(own) == {None} or len(found.windows) == 1


@pytest.mark.parametrize(
    ("windows", "shapes"),
    [
        ([None] * 4, [SHAPE] * 4),
        ([8] * 4, [SHAPE] * 4),
        ([8, None, 8, None], [SHAPE, (1, 64), SHAPE, (1, 64)]),
        ([8, None, None, None, None, None, None, None, None, None, None], [SHAPE] * 11),
    ],
    ids=["none slides", "all slide", "shapes differ", "little to save"],
)
def test_layers_are_all_in_one_group_where_several_are_of_no_use(
    windows: list[int | None], shapes: list[tuple[int, int]]
) -> None:
    found = grouped(windows, shapes)
    assert found.windows == ((None,) if None in windows else (8,))
    assert found.places == tuple((0, layer) for layer in range(len(windows)))


# How much fits


async def test_the_longest_sequence_fits_a_pool_alone_and_is_no_shorter_than_without_windows() -> None:
    for windows, blocks, size, chunk in itertools.product(LAYOUTS, (2, 4, 5, 7, 12), (1, 4), (3, 8)):
        pool = blocks * len(windows)
        window = window_of(windows, pool, size, chunk)
        most = longest(window, len(windows), pool, size)
        assert most is not None and most >= blocks * size
        assert (most > blocks * size) <= (window is not None)
        with anyio.fail_after(30):
            async with runtime(Double(windows=windows), blocks=blocks, block_size=size, chunk=chunk, inline=True) as rt:
                prompt = prompt_of(most)
                async with await rt.sequence(prompt) as seq:
                    best = int(np.argmax(Double.logprobs(prompt)))
                    assert [token for token, _ in await seq.topk(1)] == [best]
                    with pytest.raises(ContextOverflow):
                        await seq.append([1])
                async with await rt.sequence(prompt[:1]) as seq:
                    got = [step.token async for step in seq.generate(SamplingParams(max_tokens=most, ignore_eos=True))]
                    assert got == Double.greedy(prompt[:1], most - 1)
                assert rt.stats().preemptions == rt.stats().waited == 0
                sound(rt)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", LAYOUTS)
async def test_a_generation_keeps_what_some_layers_see_and_gives_back_the_rest(
    windows: tuple[int | None, ...], depth: int
) -> None:
    prompt = prompt_of(30)
    with anyio.fail_after(60):
        async with runtime(Double(depth=depth, windows=windows), blocks=64, lease=8) as rt:
            async with await rt.sequence(prompt) as seq:
                assert await take(seq.generate(SamplingParams(max_tokens=170)), 170) == Double.greedy(prompt, 170)
                await seq.topk(1)
                owner = seq._actor.owner
                await settled(rt, lambda: held(rt, owner, -1) <= 4)
                for group, window in enumerate(windows):
                    assert held(rt, owner, group) == (50 if window is None else held(rt, owner, -1))
                sound(rt)
            await free(rt, 64 * len(windows))


async def test_more_sequences_fit_than_without_windows() -> None:
    """Each of 200 tokens: 50 blocks of the layers that see all, and a few of the others."""
    with anyio.fail_after(60):
        async with runtime(Double(windows=(None, WINDOW, WINDOW)), blocks=100) as rt:
            live = []
            for seed in range(5):
                live.append(await rt.sequence(prompt_of(200, seed)))
                await live[-1].topk(1)
            assert rt.stats().preemptions == 0 and all(seq._actor._work.held.entries == 50 for seq in live)


# What may be done with them


@pytest.mark.parametrize("windows", LAYOUTS)
async def test_beams_are_those_of_a_pool_that_keeps_everything(windows: tuple[int | None, ...]) -> None:
    params = BeamSearchParams(width=3, max_tokens=40, ignore_eos=True)
    found = []
    for tell, blocks in ((False, 400), (True, 400), (True, 40)):
        with anyio.fail_after(60):
            async with runtime(Double(windows=windows, tell=tell), blocks=blocks, patience=1000.0) as rt:
                found.append([(beam.tokens, beam.score) for beam in await rt.beam_search(prompt_of(50), params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("windows", LAYOUTS)
async def test_a_prefix_is_found_in_every_group_and_of_a_window_its_end_is_held(
    windows: tuple[int | None, ...],
) -> None:
    prompt = prompt_of(100)
    with anyio.fail_after(20):
        async with runtime(Double(windows=windows), blocks=64, prefix_cache=True) as rt:
            async with await rt.sequence(prompt) as first:
                await first.topk(1)
            await free(rt, 64 * len(windows))
            assert rt.stats().blocks_cached == 25 * len(windows)
            async with await rt.sequence([*prompt, 7, 8]) as second:
                assert rt.stats().prefix_hit_tokens == 100
                for group, window in enumerate(windows):
                    assert held(rt, second._actor.owner, group) == (25 if window is None else 3)
                told = Double.greedy([*prompt, 7, 8], 40)
                assert await take(second.generate(SamplingParams(max_tokens=40)), 40) == told
            sound(rt)


async def test_a_prefix_that_one_group_has_lost_is_found_as_far_as_all_have_it() -> None:
    prompt = prompt_of(60)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(None, WINDOW)), blocks=64, prefix_cache=True) as rt:
            async with await rt.sequence(prompt) as first:
                await first.topk(1)
            await free(rt, 128)
            index, roots = ledger(rt).index, ledger(rt)._roots
            chain = index.follow(roots[1], prompt, 15)
            index.unpublish(index.ids(chain)[8])
            async with await rt.sequence(prompt) as second:
                assert rt.stats().prefix_hit_tokens == 32
                assert await take(second.generate(SamplingParams(max_tokens=20)), 20) == Double.greedy(prompt, 20)
            sound(rt)


async def test_a_truncation_into_what_a_window_gave_back_computes_all_again() -> None:
    prompt = prompt_of(100)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(None, WINDOW)), blocks=64) as rt, await rt.sequence(prompt) as seq:
            await seq.topk(1)
            await settled(rt, lambda: held(rt, seq._actor.owner, 1) == 4)
            await seq.truncate(60)
            await settled(rt, lambda: rt.stats().blocks_referenced == 0)
            assert await take(seq.generate(SamplingParams(max_tokens=30)), 30) == Double.greedy(prompt[:60], 30)


async def test_keys_and_values_that_were_given_back_read_as_nan_and_the_others_as_they_are() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(None, WINDOW))) as rt, await rt.sequence(prompt_of(50)) as seq:
            await seq.topk(1)
            await settled(rt, lambda: held(rt, seq._actor.owner, 1) < 6)
            for layer in (0, 1):
                k, v = await seq.read_kv(layer)
                gone = 4 * (13 - held(rt, seq._actor.owner, 1)) if layer else 0
                assert np.isnan(k[:gone]).all() and np.isnan(v[:gone]).all()
                assert k[gone:].ravel().tolist() == seq.tokens[gone:]
                assert v[gone:].ravel().tolist() == list(range(gone, 50))


# Models


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "cohere2", "olmo3"])
async def test_a_model_of_mlx_lm_says_what_it_says_with_its_own_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that could not hold its tokens if every layer kept them."""
    model, prompt = tiny(name), prompt_of(30)
    layers = load((model, None))
    windows = layers.groups.windows
    layers.restore()
    assert None in windows and len(windows) > 1
    full, pages = windows.count(None), 40 * len(windows)
    with anyio.fail_after(120):
        async with Runtime.open((model, None), blocks=40, block_size=4, prefill_step_size=8, lease=8) as rt:
            poison(rt, monkeypatch)
            async with await rt.sequence(prompt) as seq:
                got = await take(seq.generate(SamplingParams(max_tokens=200, ignore_eos=True)), 200)
                kid = (await seq.fork())[0]
                rest = await take(kid.generate(SamplingParams(max_tokens=9, ignore_eos=True)), 9)
                await kid.close()
            stats = rt.stats()
            assert stats.blocks_total == pages and stats.blocks_peak < pages and stats.preemptions == 0
            assert full * 60 <= stats.blocks_peak < len(windows) * 60
    tokens = [*prompt, *got, *rest]
    logits = mx.concatenate(stepwise(model, tokens[:-1]))[29:]
    chosen = mx.take_along_axis(logits, mx.array(tokens[30:])[:, None], axis=1)[:, 0]
    assert float((logits.max(axis=1) - chosen).max()) <= 2e-4 * float(mx.abs(logits).max())


def test_a_step_without_logits_is_done_when_every_pool_is() -> None:
    """The last layer's pool need not be the last."""

    class Pools:
        num_blocks, nbytes = 4, 0

        def __init__(self) -> None:
            self.arrays = [mx.array(index) for index in range(9)]

        def pending(self) -> list[mx.array]:
            return self.arrays

    class Silent(NullModel):
        groups = Groups((None, 8), ((0, 0), (0, 1), (0, 2), (1, 0)))

    kv, none = Pools(), np.zeros(0, np.int32)
    engine = Engine(Silent(), kv, depth=1)  # type: ignore[arg-type]
    engine.launch(
        StepPlan(
            tokens=np.ones(1, np.int32),
            positions=np.zeros(1, np.int32),
            slots=np.zeros((2, 1), np.int32),
            feed=none,
            tables=np.zeros((2, 0, 8), np.int32),
            lengths=none,
            segments=(Segment(0, 1, 0, np.zeros((2, 1), np.int32)),),
            copies=np.zeros((0, 3), np.int32),
            rows=none,
            sampling=Sampling(*(np.zeros(0, np.float32) for _ in range(4)), np.zeros((0, 2), np.uint32)),
        )
    )
    ((_, awaited),) = engine._flights
    assert [id(array) for array in awaited] == [id(array) for array in kv.arrays[-3:]]


def test_no_pool_is_copied_where_several_layers_write_it_in_a_step() -> None:
    """MLX's own operations write in place only what nothing unevaluated names: without waiting it is 2 pools more."""
    groups = Groups((None, *[8] * 5), tuple((group, 0) for group in range(6)))
    spec = LayerSpec(heads=4, kv_heads=4, head_dim=64, scale=0.125)
    kv = PagedKVCache(2000, 16, [spec.shape], mx.float32)
    for step in range(4):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        one = mx.array([step], dtype=mx.int32)
        slots, tables = [one + 32 * group for group in range(6)], [mx.array([2 * group]) for group in range(6)]
        arrays = Arrays(one, one, mx.zeros((0,), mx.int32), slots, tables, one, [tables])
        segment = Segment(0, 1, step, np.zeros((6, 1), np.int32))
        how = StepAttention(kv, [spec] * 6, groups, arrays, 0, [segment], waits=True)
        x = mx.ones((1, 4, 64))
        for layer in range(6):
            x = x + how.attend(layer, x, x * 0.5, x * 0.25, None)
        mx.eval(x, *kv.pending())
        assert mx.get_peak_memory() - before < kv.nbytes / 20
