"""The public API: what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import math
from typing import Any

import anyio
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from pagefork.runtime import (
    BeamSearchParams,
    ContextOverflow,
    InvalidRequest,
    PoolExhausted,
    Runtime,
    SamplingParams,
    SequenceClosed,
)

from .double import VOCAB, Double, free, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5]


def tiny_llama() -> llama.Model:
    mx.random.seed(7)
    args = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    return llama.Model(
        llama.ModelArgs(model_type="llama", num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=VOCAB, **args)
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": "3"},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"temperature": "warm"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": 1 << 40},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"seed": 1.5},
        {"seed": "a"},
        {"stop_tokens": ("a",)},
        {"stop_tokens": 5},
    ],
)
async def test_sampling_parameters_out_of_range_are_refused_at_once(fields: dict[str, Any]) -> None:
    with anyio.fail_after(10):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            with pytest.raises(InvalidRequest, match=next(iter(fields))):
                seq.generate(SamplingParams(**fields))
            assert await take(seq.generate(), 2) == Double.greedy(PROMPT, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"width": 1025},
        {"width": 2.5},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"early_stopping": "sometimes"},
        {"length_penalty": math.nan},
        {"length_penalty": "long"},
        {"stop_tokens": ("a",)},
    ],
)
async def test_beam_search_parameters_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with anyio.fail_after(10):
        async with runtime() as rt:
            with pytest.raises(InvalidRequest, match=next(iter(fields))):
                await rt.beam_search(PROMPT, BeamSearchParams(**fields))
            await free(rt, 64)


async def test_numbers_of_the_wrong_kind_or_size_are_refused_and_close_nothing() -> None:
    with anyio.fail_after(10):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            for count in (0, -1, 65537, 1.5, "2"):
                with pytest.raises(InvalidRequest, match="count"):
                    await seq.fork(count)  # type: ignore[arg-type]
            for k in (0, VOCAB + 1, 2.5, None):
                with pytest.raises(InvalidRequest, match="k must"):
                    await seq.topk(k)  # type: ignore[arg-type]
            for length in (-1, 6, 1.5, None):
                with pytest.raises(InvalidRequest, match="length"):
                    await seq.truncate(length)  # type: ignore[arg-type]
            for layer in (-1, 1, 0.5):
                with pytest.raises(InvalidRequest, match="layer"):
                    await seq.read_kv(layer)  # type: ignore[arg-type]
            assert seq.tokens == PROMPT and not seq.closed
            assert len(await seq.topk(np.int64(2))) == 2 and len(await seq.fork(np.int32(2))) == 2


async def test_tokens_outside_the_vocabulary_and_what_is_no_token_are_refused() -> None:
    with anyio.fail_after(10):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            for tokens in ([VOCAB], [-1], [1 << 70], [1.5], ["a"], None, 7, "text without a tokenizer"):
                with pytest.raises(InvalidRequest):
                    await rt.sequence(tokens)  # type: ignore[arg-type]
                with pytest.raises(InvalidRequest):
                    await seq.append(tokens)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest):
                _ = seq.text
            await seq.append(np.array([1, 2]))
            await seq.append(())
            assert seq.tokens == [*PROMPT, 1, 2] and len(seq) == 7 and "7 tokens" in repr(seq)


async def test_an_empty_sequence_has_nothing_to_go_on_from() -> None:
    with anyio.fail_after(10):
        async with runtime() as rt, await rt.sequence() as seq:
            for call in (seq.topk(1), take(seq.generate(), 1), rt.beam_search([])):
                with pytest.raises(InvalidRequest, match="at least one token"):
                    await call
            await seq.append(PROMPT)
            assert await take(seq.generate(), 1) == Double.greedy(PROMPT, 1)


async def test_the_context_bounds_what_is_appended_and_what_is_generated() -> None:
    with anyio.fail_after(10):
        async with runtime(Double(max_context=8)) as rt, await rt.sequence(PROMPT) as seq:
            with pytest.raises(ContextOverflow, match="9 tokens exceed the context of 8"):
                await seq.append([1, 2, 3, 4])
            assert seq.tokens == PROMPT
            steps = [step async for step in seq.generate()]
            assert [step.finish_reason for step in steps] == [None, None, "length"] and len(seq) == 8
            for call in (take(seq.generate(), 1), rt.beam_search(seq.tokens), rt.sequence([1] * 9)):
                with pytest.raises(ContextOverflow):
                    await call
            assert len((await rt.beam_search([1] * 6, BeamSearchParams(width=2)))[0].tokens) == 2


async def test_a_pool_too_small_says_how_many_blocks_were_wanted_and_changes_nothing() -> None:
    with anyio.fail_after(10):
        async with runtime(blocks=4) as rt, await rt.sequence([1] * 9) as seq:
            for call in (rt.sequence([1] * 5), rt.beam_search([1] * 5)):
                with pytest.raises(PoolExhausted, match=r"2 block\(s\) wanted, 1 of 4 free") as caught:
                    await call
                assert (caught.value.wanted, caught.value.free, caught.value.total) == (2, 1, 4)
            (child,) = await seq.fork()
            await child.append([2, 2])
            async with await rt.sequence([4]):
                with pytest.raises(PoolExhausted):
                    await child.append([3, 3])
                with pytest.raises(PoolExhausted):
                    await child.topk(1)
            assert child.tokens == [1] * 9 + [2, 2]
            assert (await child.topk(1))[0][0] == Double.greedy(child.tokens, 1)[0]
            await child.close()
            await free(rt, 1)


async def test_a_closed_sequence_serves_nothing_more() -> None:
    with anyio.fail_after(10):
        async with runtime() as rt:
            seq = await rt.sequence(PROMPT)
            await seq.close()
            await seq.close()
            calls = (seq.append([1]), seq.topk(1), seq.fork(), seq.truncate(0), seq.read_kv(0), take(seq.generate(), 1))
            for call in calls:
                with pytest.raises(SequenceClosed, match="make or fork another"):
                    await call
            assert seq.closed and "closed" in repr(seq)


async def test_stats_count_what_there_is() -> None:
    with anyio.fail_after(10):
        async with runtime() as rt, await rt.sequence(PROMPT) as seq:
            kids = await seq.fork(2)
            await take(kids[0].generate(SamplingParams(max_tokens=3)), 3)
            stats = rt.stats()
            assert (stats.blocks_total, stats.sequences, stats.forks, stats.tokens) == (64, 3, 2, 3)
            assert stats.blocks_free + stats.blocks_cached + stats.blocks_referenced == 64
            assert stats.blocks_peak >= stats.blocks_referenced and stats.copies <= 1 and stats.steps >= 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"blocks": 0},
        {"blocks": 1.5},
        {"blocks": 1 << 31},
        {"block_size": 0},
        {"max_batch": 0},
        {"prefill_step_size": 0},
        {"lease": 0},
        {"shutdown_timeout": -1.0},
        {"shutdown_timeout": math.nan},
    ],
)
async def test_a_runtime_of_impossible_size_is_refused(arguments: dict[str, Any]) -> None:
    with anyio.fail_after(10), pytest.raises(InvalidRequest, match=next(iter(arguments))):
        async with Runtime.open((tiny_llama(), None), **arguments):
            pytest.fail("opened")


async def test_a_real_model_gives_the_same_greedy_tokens_alone_in_a_batch_and_after_a_fork() -> None:
    model = tiny_llama()

    def oracle(tokens: list[int], count: int) -> list[int]:
        out = tokens[:]
        for _ in range(count):
            out.append(int(mx.argmax(model(mx.array([out]))[0, -1])))
        return out[len(tokens) :]

    prompts = [[n + 1, 2, 3, n, 5, 6][: n + 1] for n in range(6)]
    expected = [oracle(prompt, 12) for prompt in prompts]
    with anyio.fail_after(60):
        async with Runtime.open((model, None), blocks=64, block_size=4, prefill_step_size=3, lease=5) as rt:
            got: dict[int, list[int]] = {}

            async def read(index: int) -> None:
                async with await rt.sequence(prompts[index]) as seq:
                    generation = seq.generate(SamplingParams(max_tokens=12))
                    tokens = await take(generation, 4)
                    (child,) = await seq.fork()
                    assert await take(child.generate(), 8) == expected[index][4:]
                    await child.close()
                    got[index] = tokens + await take(generation, 8)

            async with anyio.create_task_group() as group:
                for index in range(len(prompts)):
                    group.start_soon(read, index)
            assert [got[index] for index in range(len(prompts))] == expected
            await free(rt, 64)


async def test_a_real_model_draws_the_same_tokens_in_any_batch_for_one_seed() -> None:
    params = SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, top_k=20, min_p=0.01, seed=11)
    other = SamplingParams(max_tokens=10, temperature=1.3, seed=1)
    with anyio.fail_after(60):
        async with Runtime.open((tiny_llama(), None), blocks=64, block_size=4) as rt:
            alone = await take((await rt.sequence(PROMPT)).generate(params), 10)
            got: list[list[int]] = []

            async def read(tokens: list[int], chosen: SamplingParams) -> None:
                drawn = await take((await rt.sequence(tokens)).generate(chosen), 10)
                if chosen is params:
                    got.append(drawn)

            async with anyio.create_task_group() as group:
                for n in range(4):
                    group.start_soon(read, [n, 1], other)
                    group.start_soon(read, PROMPT, params)
            assert got == [alone] * 4
