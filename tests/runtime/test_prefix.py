"""Prompts that begin alike share their blocks, and nothing that anybody can see depends on it but the work done."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from pagefork.cache.ledger import Ledger
from pagefork.runtime import Runtime, SamplingParams

from .double import Double, free, runtime, settled, take
from .test_preemption import tiny_llama

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize("length", range(1, 13))
async def test_a_whole_prompt_hit_leaves_a_token_to_compute(length: int) -> None:
    prompt = PROMPT[:length]
    with anyio.fail_after(20):
        async with runtime(prefix_cache=True) as rt:
            for _ in range(3):
                async with await rt.sequence(prompt) as seq:
                    before = rt.stats().prompt_tokens
                    assert await take(seq.generate(), 6) == Double.greedy(prompt, 6)
                    computed = rt.stats().prompt_tokens - before
            assert computed <= 4 and rt.stats().prefix_hit_tokens == 2 * ((length - 1) // 4 * 4)
            await free(rt, 64)


async def test_a_fork_computes_what_is_pending_in_a_block_of_its_own_though_all_of_it_was_found() -> None:
    """The last position before the fork was written in a block that others were reading."""
    with anyio.fail_after(20):
        async with runtime(prefix_cache=True) as rt:
            seq, twin = await rt.sequence(PROMPT[:5]), await rt.sequence(PROMPT[:5])
            await seq.topk(1)
            rt._house.preempt(twin._actor.owner)
            (child,) = await twin.fork()
            for one in (seq, twin, child):
                assert await take(one.generate(), 3) == Double.greedy(PROMPT[:5], 3)
                await one.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("taken", [1, 4])
async def test_what_ran_on_past_an_end_token_is_not_published(
    taken: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps after it computed tokens that are nobody's; a fork looks how far its parent was computed."""
    publish, short = Ledger.publish, []

    def checked(self: Ledger, owner: int, tokens: Any, computed: int) -> None:
        short.append(computed > len(tokens))
        publish(self, owner, tokens, computed)

    monkeypatch.setattr(Ledger, "publish", checked)
    told = Double.greedy([1, 2, 3], 10)
    with anyio.fail_after(10):
        double = Double(depth=depth, seconds=0.0001)
        async with runtime(double, lease=64, prefix_cache=True, inline=True) as rt, await rt.sequence([1, 2, 3]) as seq:
            generation = seq.generate(SamplingParams(max_tokens=40, stop_tokens=(told[9],)))
            await take(generation, taken)
            await settled(rt, lambda: generation._stream is not None and generation._stream.finish is not None)
            (child,) = await seq.fork(1)
            assert await take(child.generate(), 20) == Double.greedy([1, 2, 3], taken + 20)[taken:]
            assert await take(generation, 10 - taken) == told[taken:]
            await seq.topk(1)
    assert short and not any(short)


async def test_the_prefix_cache_is_off_by_one_argument() -> None:
    with anyio.fail_after(20):
        async with runtime(prefix_cache=False) as rt:
            for _ in range(2):
                async with await rt.sequence(PROMPT) as seq:
                    await seq.topk(1)
            stats = rt.stats()
            assert (stats.prefix_hits, stats.prefix_hit_tokens, stats.blocks_cached) == (0, 0, 0)


async def test_what_differs_in_one_token_shares_only_what_comes_before_it() -> None:
    with anyio.fail_after(20):
        async with runtime(prefix_cache=True) as rt, await rt.sequence(PROMPT) as seq:
            await seq.topk(1)
            other = [*PROMPT[:6], 7, *PROMPT[7:]]
            async with await rt.sequence(other) as twin:
                assert (await twin.topk(1))[0][0] == Double.greedy(other, 1)[0]
                assert rt.stats().prefix_hit_tokens == 4


async def test_hits_change_neither_logits_nor_tokens_of_a_model() -> None:
    found: list[list[object]] = []
    for prefix in (False, True):
        answers: list[object] = []
        with anyio.fail_after(60):
            async with Runtime.open((tiny_llama(), None), blocks=64, block_size=4, prefix_cache=prefix) as rt:
                for prompt in (PROMPT, PROMPT, PROMPT + PROMPT, PROMPT[:6] + PROMPT):
                    async with await rt.sequence(prompt) as seq:
                        answers += [sorted(await seq.topk(32))]
                        params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True)
                        answers += [[step.token async for step in seq.generate(params)]]
                assert (rt.stats().prefix_hits > 0) is prefix
        found.append(answers)
    for off, on in zip(*found, strict=True):
        np.testing.assert_allclose(np.array(off), np.array(on), atol=1e-5)
