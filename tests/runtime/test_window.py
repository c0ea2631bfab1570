"""Where layers have a window, blocks that fell out of it go back to the pool while their sequence lives.

Here it is mostly every layer that has one; `test_groups` is about models of which some see everything.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import anyio
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from architectures import CONFIGS, tiny
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from pagefork.cache.kv import PagedKVCache
from pagefork.runtime import (
    BeamSearchParams,
    ContextOverflow,
    PoolExhausted,
    Runtime,
    SamplingParams,
    Sequence,
    forward,
)
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.messages import Yielded

from .double import Double, free, ledger, runtime, settled, take

pytestmark = pytest.mark.anyio

WINDOW, SIZE = 10, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LONG = 1000.0
"""Seconds of patience that no test has."""
_RESERVE = Allocator._reserve


def ahead(tokens: list[int], count: int) -> list[int]:
    return Double.greedy(tokens, count, WINDOW)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(32), k=length)


def held(seq: Sequence) -> int:
    """How many blocks the sequence's table names."""
    table = seq._house.allocator.ledger.table(seq._actor.owner)
    return 0 if table is None else len(table.live)


async def turns(count: int) -> None:
    for _ in range(count):
        await checkpoint()


def sound(rt: Runtime) -> None:
    ledger(rt).check()
    rt._house.allocator.arbiter.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
async def test_a_generation_outgrows_the_pool_in_a_few_blocks(prefix: bool, depth: int) -> None:
    with anyio.fail_after(60):
        async with runtime(Double(depth=depth, windows=(WINDOW,)), blocks=8, lease=8, prefix_cache=prefix) as rt:
            async with await rt.sequence(PROMPT) as seq:
                assert await take(seq.generate(SamplingParams(max_tokens=400)), 400) == ahead(PROMPT, 400)
                assert len(seq) == 410
            await free(rt, 8)
            stats = rt.stats()
            # The window and the block it begins in, then a lease and the blocks that it begins and ends in.
            assert stats.blocks_peak <= 7 and stats.preemptions == 0 and stats.waited <= 2


async def test_a_sequence_that_rests_holds_its_window_alone() -> None:
    with anyio.fail_after(20):
        async with (
            runtime(Double(windows=(WINDOW,)), blocks=64, lease=8) as rt,
            await rt.sequence(prompt_of(100)) as seq,
        ):
            await seq.topk(1)
            # 90..99 are read again, and a copy that is not done goes back to 96, which reads from 87 on.
            await settled(rt, lambda: held(seq) == 4)
            await take(seq.generate(SamplingParams(max_tokens=60)), 60)
            await seq.topk(1)
            await settled(rt, lambda: held(seq) <= 4)
            assert rt.stats().blocks_referenced == held(seq)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [31, 32, 33, 64, 333])
async def test_a_prompt_longer_than_the_pool_is_computed_piece_by_piece(length: int, depth: int) -> None:
    prompt = prompt_of(length)
    with anyio.fail_after(20):
        async with runtime(Double(depth=depth, windows=(WINDOW,)), blocks=8) as rt, await rt.sequence(prompt) as seq:
            assert await take(seq.generate(SamplingParams(max_tokens=30)), 30) == ahead(prompt, 30)
            await seq.append(prompt)
            tokens = seq.tokens
            assert await take(seq.generate(SamplingParams(max_tokens=30)), 30) == ahead(tokens, 30)
            assert rt.stats().blocks_peak <= 8


async def test_pieces_cost_no_token_twice() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=8) as rt, await rt.sequence(prompt_of(200)) as seq:
            await seq.topk(1)
            assert 196 <= rt.stats().prompt_tokens <= 200


async def test_a_model_of_which_one_layer_sees_all_keeps_every_block() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,), tell=False)) as rt, await rt.sequence(prompt_of(100)) as seq:
            await take(seq.generate(SamplingParams(max_tokens=60)), 60)
            assert held(seq) == 40
        async with runtime(Double(windows=(WINDOW,), tell=False), blocks=8) as rt:
            with pytest.raises(ContextOverflow):
                await rt.sequence(prompt_of(33))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
async def test_a_pool_that_cannot_hold_a_window_serves_what_fits(blocks: int) -> None:
    """Three blocks for the window, and one to write in: below that nothing could ever be given back."""
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=blocks) as rt, await rt.sequence([1]) as seq:
            if blocks > 4:
                assert await take(seq.generate(SamplingParams(max_tokens=90)), 90) == ahead([1], 90)
            else:
                got = [step.token async for step in seq.generate(SamplingParams(max_tokens=90, ignore_eos=True))]
                assert got == ahead([1], len(got)) and len(got) == 4 * blocks - 1


async def test_a_window_of_one_position_counts_as_two() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(1,)), blocks=4, chunk=64) as rt, await rt.sequence(prompt_of(40)) as seq:
            assert await take(seq.generate(SamplingParams(max_tokens=8)), 8) == Double.greedy(prompt_of(40), 8, 1)


async def test_what_can_never_fit_beside_others_waits_and_what_fits_does_not() -> None:
    with anyio.fail_after(20):
        async with (
            runtime(Double(windows=(WINDOW,)), blocks=8, patience=0.0) as rt,
            await rt.sequence([7] * 200) as first,
        ):
            generation = first.generate(SamplingParams(max_tokens=8))
            await take(generation, 1)
            with pytest.raises(PoolExhausted):
                await rt.sequence(prompt_of(200))
            assert await take(generation, 7) == ahead([7] * 200, 8)[1:]


# Forks


@pytest.mark.parametrize("depth", [1, 2])
async def test_forks_share_what_is_left_and_each_gives_back_its_own(depth: int) -> None:
    prompt = prompt_of(70)
    expected = ahead(prompt, 100)
    with anyio.fail_after(30):
        async with runtime(Double(depth=depth, windows=(WINDOW,)), blocks=24, lease=4) as rt:
            parent = await rt.sequence(prompt)
            generation = parent.generate(SamplingParams(max_tokens=100))
            await take(generation, 9)
            kids = await parent.fork(3)
            sound(rt)
            assert rt.stats().blocks_referenced <= 7, "the children took none"
            grown = [kid.generate(SamplingParams(max_tokens=80)) for kid in kids]
            for count in range(4):
                for stream in grown:
                    assert await take(stream, 20) == expected[9 + 20 * count : 29 + 20 * count]
                sound(rt)
            assert await take(generation, 91) == expected[9:]
            grandchildren = await kids[0].fork(2)
            await kids[0].close()
            for seq in (parent, *kids[1:]):
                await seq.close()
            for seq in grandchildren:
                assert await take(seq.generate(SamplingParams(max_tokens=11)), 11) == expected[89:]
                await seq.close()
            await free(rt, 24)


async def test_beams_over_a_window_are_those_of_a_pool_that_keeps_everything() -> None:
    params = BeamSearchParams(width=3, max_tokens=40, ignore_eos=True)
    prompt = prompt_of(50)
    found = []
    for tell, blocks in ((False, 400), (True, 400), (True, 26)):
        with anyio.fail_after(60):
            async with runtime(Double(windows=(WINDOW,), tell=tell), blocks=blocks, patience=LONG) as rt:
                found.append([(beam.tokens, beam.score) for beam in await rt.beam_search(prompt, params)])
                if blocks == 26:
                    assert rt.stats().blocks_peak <= 26
    assert found[0] == found[1] == found[2]


async def test_a_fork_whose_copy_was_never_done_still_has_what_it_needs() -> None:
    """It computes the copied rows itself, from the start of their block on."""
    with anyio.fail_after(60):
        async with runtime(Double(windows=(WINDOW,)), lease=4, inline=True) as rt:
            for length in range(45, 49):
                prompt = prompt_of(length)
                async with await rt.sequence(prompt) as parent:
                    await parent.topk(1)
                    for count in range(2, 12):
                        kid = (await parent.fork())[0]
                        async with anyio.create_task_group() as group:
                            group.start_soon(take, kid.generate(), 3)
                            await turns(count)
                            group.cancel_scope.cancel()
                        tokens = kid.tokens
                        assert await take(kid.generate(), 5) == ahead(tokens, 5)
                        await kid.close()


# Truncation


@pytest.mark.parametrize("length", [0, 1, 40, 88, 95, 99, 100])
async def test_a_truncated_sequence_goes_on_as_if_it_had_never_been_longer(length: int) -> None:
    prompt = prompt_of(100)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=8) as rt, await rt.sequence(prompt) as seq:
            await take(seq.generate(SamplingParams(max_tokens=20)), 20)
            await seq.truncate(length)
            await seq.append([5, 6])
            tokens = [*prompt[:length], 5, 6]
            assert seq.tokens == tokens
            assert await take(seq.generate(SamplingParams(max_tokens=30)), 30) == ahead(tokens, 30)


async def test_a_fork_truncated_into_what_its_parent_gave_back_goes_on() -> None:
    prompt = prompt_of(100)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=16) as rt, await rt.sequence(prompt) as seq:
            await seq.topk(1)
            for length in (99, 92, 88, 50, 1):
                kid = (await seq.fork())[0]
                await kid.truncate(length)
                assert await take(kid.generate(), 9) == ahead(prompt[:length], 9)
                await kid.close()


async def test_only_a_truncation_into_what_was_given_back_computes_again() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=64) as rt, await rt.sequence(prompt_of(100)) as seq:
            await seq.topk(1)
            before = rt.stats().prompt_tokens
            await seq.truncate(97)
            await seq.topk(1)
            assert rt.stats().prompt_tokens == before
            await settled(rt, lambda: held(seq) == 4)
            await seq.truncate(60)
            await settled(rt, lambda: held(seq) == 0)
            await seq.topk(1)
            assert rt.stats().prompt_tokens >= before + 59


async def test_a_cancelled_append_that_found_a_long_prefix_leaves_the_sequence_as_it_was() -> None:
    prompt = prompt_of(60)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), prefix_cache=True, inline=True) as rt:
            async with await rt.sequence(prompt) as first:
                await first.topk(1)
            for count in range(12):
                async with await rt.sequence(prompt[:5]) as seq:
                    async with anyio.create_task_group() as group:
                        group.start_soon(seq.append, prompt[5:])
                        await turns(count)
                        group.cancel_scope.cancel()
                    tokens = seq.tokens
                    assert tokens in (prompt[:5], prompt)
                    assert await take(seq.generate(SamplingParams(max_tokens=9)), 9) == ahead(tokens, 9)
                sound(rt)


async def test_keys_and_values_that_were_given_back_read_as_nan() -> None:
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,))) as rt, await rt.sequence(prompt_of(50)) as seq:
            await seq.topk(1)
            await settled(rt, lambda: held(seq) < 6)
            k, v = await seq.read_kv(0)
            gone = SIZE * (13 - held(seq))
            assert 0 < gone <= 50 - WINDOW
            assert np.isnan(k[:gone]).all() and np.isnan(v[:gone]).all()
            assert k[gone:].ravel().tolist() == seq.tokens[gone:] and v[gone:].ravel().tolist() == list(range(gone, 50))


# Prefixes


async def test_a_prefix_that_is_kept_is_found_and_its_last_window_held() -> None:
    prompt = prompt_of(100)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=64, prefix_cache=True) as rt:
            async with await rt.sequence(prompt) as first:
                await first.topk(1)
            await free(rt, 64)
            assert rt.stats().blocks_cached == 25
            async with await rt.sequence([*prompt, 7, 8]) as second:
                assert held(second) <= 5 and rt.stats().prefix_hit_tokens == 100
                assert await take(second.generate(SamplingParams(max_tokens=40)), 40) == ahead([*prompt, 7, 8], 40)
            async with await rt.sequence(prompt[:50]) as third:
                assert rt.stats().prefix_hit_tokens == 148
                assert await take(third.generate(SamplingParams(max_tokens=40)), 40) == ahead(prompt[:50], 40)
            sound(rt)


async def test_a_pool_full_of_one_prefix_serves_a_sequence_that_begins_with_it() -> None:
    """To adopt all of it would leave no block to write in."""
    prompt = prompt_of(33)
    with anyio.fail_after(20):
        async with runtime(Double(windows=(WINDOW,)), blocks=8, prefix_cache=True) as rt:
            for _ in range(3):
                async with await rt.sequence(prompt) as seq:
                    assert await take(seq.generate(SamplingParams(max_tokens=40)), 40) == ahead(prompt, 40)


# Preemption


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
async def test_a_generation_goes_on_unchanged_at_whichever_turn_it_is_preempted(prefix: bool, depth: int) -> None:
    prompt = prompt_of(45)
    double = Double(depth=depth, windows=(WINDOW,))
    with anyio.fail_after(60):
        async with runtime(double, blocks=8, patience=LONG, prefix_cache=prefix, inline=True) as rt:
            for count in range(0, 120, 7):
                async with await rt.sequence(prompt) as seq, anyio.create_task_group() as group:
                    generation = seq.generate(SamplingParams(max_tokens=40))
                    got: list[int] = []

                    async def read(generation: Any = generation, got: list[int] = got) -> None:
                        got += [step.token async for step in generation]

                    group.start_soon(read)
                    for pause in (count, count % 5, 11):
                        await turns(pause)
                        rt._house.preempt(seq._actor.owner)
                assert got == ahead(prompt, 40)
                sound(rt)


@pytest.mark.parametrize("length", range(11, 21))
async def test_whichever_request_for_blocks_is_told_to_give_way_a_fork_goes_on_right(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the past is found again, the piece that is left to compute may end where the fork does: its last token must
    still be able to see its window."""
    prompt = prompt_of(length)
    for number in range(6):
        give_way(monkeypatch, {number})
        double = Double(windows=(5,))
        with anyio.fail_after(20):
            async with runtime(double, blocks=48, block_size=1, chunk=5, lease=1, prefix_cache=True, inline=True) as rt:
                seq = await rt.sequence(prompt)
                (child,) = await seq.fork(1)
                for one in (child, seq):
                    got = await take(one.generate(SamplingParams(max_tokens=6)), 6)
                    assert got == Double.greedy(prompt, 6, 5)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_fork_of_a_generation_that_was_found_again_past_its_reader_goes_on_right(depth: int) -> None:
    """What was computed ahead of the reader was published, and found again when the generation went on: of the past
    it holds what its own next token needs, which is less than a child needs that ends at the reader."""
    prompt, window = prompt_of(11), 3
    with anyio.fail_after(20):
        for ahead in range(1, 5):
            double = Double(depth=depth, windows=(window,))
            async with runtime(double, block_size=1, lease=4 + ahead, prefix_cache=True, inline=True) as rt:
                seq = await rt.sequence(prompt)
                generation = seq.generate(SamplingParams(max_tokens=40))
                got = await take(generation, 4)
                await turns(40)
                rt._house.preempt(seq._actor.owner)
                await turns(60)
                (child,) = await seq.fork(1)
                told = Double.greedy(prompt, 12, window)
                assert await take(child.generate(SamplingParams(max_tokens=8)), 8) == told[4:]
                assert got + await take(generation, 8) == told


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("part", range(4))
async def test_whatever_is_asked_and_told_to_give_way_every_token_is_right(
    part: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where so many groups of layers keep every block beside those that have a window."""
    for seed in range(part, 48, 4):
        rng = random.Random(seed)
        window, size, chunk = rng.choice([2, 3, 5, 9]), rng.choice([1, 1, 2, 4]), rng.choice([1, 3, 5, 8])
        give_way(monkeypatch, set(rng.sample(range(30), rng.randrange(1, 9))))
        windows = (None,) * kept + (window,) * (1 + kept % 2)
        double = Double(windows=windows, depth=rng.choice([1, 2]), seconds=rng.choice([1.0, 0.0003]))
        prefix, lease = rng.random() < 0.7, rng.choice([1, 2, 5, 9])
        with anyio.fail_after(30):
            async with runtime(
                double, blocks=200, block_size=size, chunk=chunk, lease=lease, prefix_cache=prefix, inline=True
            ) as rt:
                await stroll(rt, rng, None if kept else window)


def give_way(monkeypatch: pytest.MonkeyPatch, told: set[int]) -> None:
    """Have the allocator tell those who ask for blocks as number `told` to give way, as it may tell anybody."""
    reserve, asked = _RESERVE, itertools.count()

    def answer(self: Allocator, envelope: Any, message: Any) -> None:
        if next(asked) in told:
            envelope.reply.set(Yielded())
        else:
            reserve(self, envelope, message)

    monkeypatch.setattr(Allocator, "_reserve", answer)


async def stroll(rt: Runtime, rng: random.Random, window: int | None) -> None:
    """A dozen operations on a family of sequences, one after the other. `window`: of the layers that see most."""
    family = [await rt.sequence(prompt_of(rng.randrange(1, 30)))]
    for _ in range(12):
        seq, act = rng.choice(family), rng.randrange(6)
        tokens = seq.tokens
        if act == 0 and len(family) < 4:
            family += await seq.fork(1)
        elif act == 1:
            await seq.append(prompt_of(rng.randrange(1, 12), rng.randrange(5)))
        elif act == 2:
            best = np.argsort(-Double.logprobs(tokens if window is None else tokens[-window:]))[:3].tolist()
            assert [token for token, _ in await seq.topk(3)] == best
        elif act == 3:
            await seq.truncate(rng.randrange(1, len(tokens) + 1))
        else:
            count = rng.randrange(1, 12)
            generation = seq.generate(SamplingParams(max_tokens=rng.choice([count, 40])))
            assert await take(generation, count) == Double.greedy(tokens, count, window)
            if rng.random() < 0.5:
                await generation.aclose()
            elif rng.random() < 0.5:
                family += await seq.fork(1)


async def test_a_preempted_generation_whose_past_is_kept_computes_little_again() -> None:
    """The prefix that is found goes beyond the piece that would be computed first."""
    prompt = prompt_of(150)
    with anyio.fail_after(20):
        double = Double(windows=(WINDOW,))
        async with runtime(double, blocks=64, prefix_cache=True, lease=4) as rt, await rt.sequence(prompt) as seq:
            generation = seq.generate(SamplingParams(max_tokens=40))
            await take(generation, 20)
            before = rt.stats().prompt_tokens
            rt._house.preempt(seq._actor.owner)
            await settled(rt, lambda: rt.stats().prefix_hits == 1)
            assert await take(generation, 20) == ahead(prompt, 40)[20:]
            assert rt.stats().prompt_tokens <= before + 8


@pytest.mark.parametrize("ends", ["aclose", "close"])
async def test_it_ends_promptly_while_it_computes_a_long_past_again(ends: str) -> None:
    prompt = prompt_of(400)
    with anyio.fail_after(60):
        for count in range(0, 60, 6):
            async with runtime(Double(windows=(WINDOW,)), blocks=8, patience=LONG, inline=True) as rt:
                seq = await rt.sequence(prompt)
                generation = seq.generate(SamplingParams(max_tokens=20))
                await take(generation, 3)
                rt._house.preempt(seq._actor.owner)
                await turns(count)
                steps = rt.stats().steps
                await (generation.aclose() if ends == "aclose" else seq.close())
                assert rt.stats().steps <= steps + 5
                await seq.close()
                await free(rt, 8)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("windows", [(WINDOW,), (None, WINDOW), (None, WINDOW, WINDOW)])
async def test_many_in_a_pool_for_few_say_what_each_says_alone(
    windows: tuple[int | None, ...], prefix: bool, depth: int
) -> None:
    """Long and short ones that generate, fork, append and truncate, in a fraction of the blocks that they want."""
    preemptions = 0
    with anyio.fail_after(120):
        for seed in range(4):
            double = Double(depth=depth, windows=windows)
            # What keeps every block has to fit: up to 300 tokens.
            blocks = 8 + seed % 5 if None not in windows else 44 // len(windows) + 24 + seed % 5
            async with runtime(
                double,
                blocks=blocks,
                lease=1 + seed % 9,
                max_batch=64 if seed % 2 else 3,
                patience=LONG,
                prefix_cache=prefix,
                inline=seed % 3 > 0,
            ) as rt:
                async with anyio.create_task_group() as group:
                    for index in range(6):
                        rng = random.Random(100 * seed + index)
                        group.start_soon(wander, rt, rng, None if None in windows else WINDOW)
                sound(rt)
                await free(rt, blocks * len(windows))
                preemptions += rt.stats().preemptions
    assert preemptions > 20, "the pool was too small now and then"


async def wander(rt: Runtime, rng: random.Random, window: int | None) -> None:
    family = [await rt.sequence(prompt_of(rng.randrange(1, 60), rng.randrange(4)))]
    for _ in range(6):
        seq = rng.choice(family)
        before, act = seq.tokens, rng.randrange(6)
        if act == 0 and len(family) < 5:
            family += await seq.fork(rng.randrange(1, 3))
        elif act == 1:
            await seq.truncate(rng.randrange(1, len(seq) + 1))
        elif act == 2:
            await seq.append(prompt_of(rng.randrange(30), rng.randrange(4)))
        else:
            generation, count = seq.generate(SamplingParams(max_tokens=40, ignore_eos=True)), rng.randrange(1, 40)
            expected = Double.greedy(before, count, window)
            assert await take(generation, count // 2) == expected[: count // 2]
            if rng.random() < 0.3:
                family += await seq.fork()
                assert family[-1].tokens == before + expected[: count // 2]
            assert await take(generation, count - count // 2) == expected[count // 2 :]
            # One that waits for others must not keep its blocks from them by a generation that it does not read.
            await generation.aclose()
        await turns(rng.choice([0, 0, 3, 9]))
    for seq in family:
        await seq.close()


# Models


def sliding_llama(window: int) -> llama.Model:
    """A tiny llama of which every layer slides; mlx-lm wants one layer of full attention, so that one is told later."""
    mx.random.seed(3)
    args = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4}
    kinds = ["full_attention", *["sliding_attention"] * 2]
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=64,
            layer_types=kinds,
            sliding_window=window,
            tie_word_embeddings=False,
            **args,
        )
    )
    model.model.layers[0].use_sliding = True
    model.update(tree_map(lambda weight: weight * 3 if weight.ndim > 1 else weight, model.parameters()))
    return model


def poison(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what no sequence holds is NaN whenever a step begins."""
    launch = forward.Engine.launch
    refcounts = ledger(rt).pool.refcounts

    def poisoned(self: forward.Engine, plan: Any) -> None:
        unheld = mx.array(refcounts == 0)[:, None, None, None]
        kv: PagedKVCache = self._kv
        kv._k, kv._v = (
            [mx.where(unheld, mx.nan, pool).astype(pool.dtype) for pool in pools] for pools in (kv._k, kv._v)
        )
        mx.eval(kv._k, kv._v)
        launch(self, plan)

    monkeypatch.setattr(forward.Engine, "launch", poisoned)


def agrees(model: nn.Module, tokens: list[int], start: int) -> None:
    """Each token from `start` on is the best after those before it, computed at once and without a cache of ours."""
    logits = model(mx.array([tokens[:-1]]))[0, start - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(tokens[start:])[:, None], axis=1)[:, 0]
    assert float((logits.max(axis=1) - chosen).max()) <= 2e-4 * float(mx.abs(logits).max())


async def test_a_model_says_a_thousand_tokens_in_a_pool_of_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = sliding_llama(32), prompt_of(40)
    own = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=200)]
    with anyio.fail_after(120):
        async with Runtime.open((model, None), blocks=8, block_size=16, lease=32) as rt:
            poison(rt, monkeypatch)
            async with await rt.sequence(prompt) as seq:
                got = [step.token async for step in seq.generate(SamplingParams(max_tokens=1000))]
            assert rt.stats().blocks_peak <= 7 and len(seq) == 1040
    agrees(model, prompt + got, 40)
    assert len(set(got)) > 20 and got[:200] == own


async def test_a_prompt_of_a_thousand_tokens_in_a_pool_of_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = sliding_llama(32), [token * 2 for token in prompt_of(1000)]
    with anyio.fail_after(120):
        async with Runtime.open((model, None), blocks=8, block_size=16) as rt:
            poison(rt, monkeypatch)
            async with await rt.sequence(prompt) as seq:
                got = await take(seq.generate(SamplingParams(max_tokens=50)), 50)
                await seq.truncate(990)
                assert await seq.topk(1) and rt.stats().prompt_tokens >= 1900
                again = await take(seq.generate(SamplingParams(max_tokens=20)), 20)
                kids = await seq.fork(2)
                rest = await take(kids[1].generate(SamplingParams(max_tokens=60)), 60)
            assert rt.stats().blocks_peak <= 8
    agrees(model, prompt + got, 1000)
    agrees(model, prompt[:990] + again + rest, 990)


@pytest.mark.parametrize("name", ["exaone_moe", "spark2_5", "step3p5"])
async def test_architectures_of_mlx_lm_whose_layers_all_slide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, name, CONFIGS.get(name, {}) | {"layer_types": ["sliding_attention"] * 4})
    model, prompt = tiny(name), prompt_of(30)
    with anyio.fail_after(120):
        async with Runtime.open((model, None), blocks=8, block_size=4, prefill_step_size=8, lease=8) as rt:
            poison(rt, monkeypatch)
            async with await rt.sequence(prompt) as seq:
                got = await take(seq.generate(SamplingParams(max_tokens=100, ignore_eos=True)), 100)
    tokens = prompt + got
    logits = mx.concatenate(stepwise(model, tokens[:-1]))[29:]
    chosen = mx.take_along_axis(logits, mx.array(got)[:, None], axis=1)[:, 0]
    assert float((logits.max(axis=1) - chosen).max()) <= 2e-4 * float(mx.abs(logits).max())


def stepwise(model: nn.Module, tokens: list[int]) -> list[mx.array]:
    """mlx-lm's own logits after each token, by its own cache."""
    cache, out = make_prompt_cache(model), []
    for token in tokens:
        out.append(model(mx.array([[token]]), cache=cache)[0].astype(mx.float32))
        mx.eval(out[-1])
    return out
