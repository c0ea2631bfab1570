"""Beam search against a search that recomputes everything, and against Hugging Face's beams on a real model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.runtime import BeamSearchParams, PoolExhausted, Runtime, SamplingParams

from .double import VOCAB, Double, free, ledger, runtime, settled, take

pytestmark = pytest.mark.anyio

ORACLES = json.loads((Path(__file__).parent.parent / "oracles" / "hf_beam_smollm2.json").read_text())
Hypothesis = tuple[float, list[int]]


@functools.cache
def logprobs(tokens: tuple[int, ...]) -> list[float]:
    return [float(np.float32(value)) for value in Double.logprobs(tokens)]


def naive(prompt: list[int], params: BeamSearchParams, stop: set[int]) -> list[Hypothesis]:
    """(score, tokens), best first: what transformers' `_beam_search` does, with whole lists and no cache."""
    live, done = [(0.0, ())], []
    keep = max(2, 1 + len(stop)) * params.width
    for step in range(1, params.max_tokens + 1):
        grown = [
            (total + value, (*tokens, token))
            for total, tokens in live
            for token, value in enumerate(logprobs((*prompt, *tokens)))
        ]
        grown = sorted(grown, key=lambda entry: -entry[0])[:keep]
        last = step == params.max_tokens
        for total, tokens in grown[: params.width]:
            if tokens[-1] in stop or last:
                done.append((total / len(tokens) ** params.length_penalty, list(tokens)))
        done = sorted(done, key=lambda entry: -entry[0])[: params.width]
        live = [entry for entry in grown if entry[1][-1] not in stop][: params.width]
        if last or not live or enough(done, live[0][0], step, params):
            break
    return done


def enough(done: list[Hypothesis], best: float, step: int, params: BeamSearchParams) -> bool:
    if len(done) < params.width:
        return False
    if params.early_stopping is True:
        return True
    longest = params.early_stopping == "never" and params.length_penalty > 0
    return best / (params.max_tokens if longest else step) ** params.length_penalty <= done[-1][0]


@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    width=st.integers(1, 5),
    count=st.integers(1, 9),
    penalty=st.sampled_from([0.0, 0.6, 1.0, 1.5, -0.5]),
    early=st.sampled_from([True, False, "never"]),
    stop=st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
async def test_beams_are_those_of_a_search_without_a_cache(
    prompt: list[int], width: int, count: int, penalty: float, early: Any, stop: set[int]
) -> None:
    params = BeamSearchParams(
        width=width, max_tokens=count, length_penalty=penalty, early_stopping=early, stop_tokens=tuple(stop)
    )
    with anyio.fail_after(30):
        async with runtime(blocks=128, inline=True) as rt:
            beams = await rt.beam_search(prompt, params)
            expected = naive(prompt, params, stop)
            assert [beam.tokens for beam in beams] == [tokens for _, tokens in expected]
            assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected], abs=1e-5)
            assert all(beam.finished == (beam.tokens[-1] in stop) for beam in beams)
            await free(rt, 128)


async def test_a_beam_of_one_is_greedy() -> None:
    with anyio.fail_after(20):
        async with runtime() as rt:
            (beam,) = await rt.beam_search([1, 2], BeamSearchParams(width=1, max_tokens=10))
            assert beam.tokens == Double.greedy([1, 2], 10) and not beam.finished


async def test_beams_share_their_past() -> None:
    prompt, peak = list(range(30)), 8 + 4 * 6
    with anyio.fail_after(20):
        async with runtime(blocks=128) as rt:
            await rt.beam_search(prompt, BeamSearchParams(width=4, max_tokens=12))
            assert rt.stats().blocks_peak <= peak < 4 * 11, "not a copy of the prompt for each beam"


@pytest.mark.parametrize("blocks", range(4, 12))
async def test_an_exhausted_pool_ends_the_search_and_leaves_nothing_behind(blocks: int) -> None:
    with anyio.fail_after(20):
        async with runtime(blocks=blocks, block_size=2) as rt, await rt.sequence([9]) as seq:
            try:
                await rt.beam_search([1, 2, 3], BeamSearchParams(width=4, max_tokens=5))
            except PoolExhausted:
                assert blocks < 16
            await settled(rt, lambda: rt.stats().sequences == 1)
            await free(rt, blocks - 1)
            assert await take(seq.generate(), 1) == Double.greedy([9], 1)


async def test_what_on_step_raises_ends_the_search_bare() -> None:
    def refuse(step: int, running: list[Any], finished: list[Any]) -> None:
        raise ZeroDivisionError

    with anyio.fail_after(20):
        async with runtime() as rt:
            with pytest.raises(ZeroDivisionError):
                await rt.beam_search([1, 2, 3], on_step=refuse)
            await free(rt, 64)
            assert ledger(rt).owners == 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_beams_and_greedy_tokens_of_a_real_model_are_hugging_faces() -> None:
    async with Runtime.open(blocks=512) as rt:
        for case in ORACLES:
            names = ("width", "max_tokens", "length_penalty", "early_stopping")
            beams = await rt.beam_search(case["ids"], BeamSearchParams(**{name: case[name] for name in names}))
            assert [beam.tokens for beam in beams] == [beam["tokens"] for beam in case["beams"]]
            assert [b.score for b in beams] == pytest.approx([b["score"] for b in case["beams"]], abs=1e-3)
        await free(rt, 512)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_greedy_tokens_of_a_real_model_are_the_oracles_alone_and_beside_eight_others() -> None:
    """The oracle's greedy tokens are transformers' and mlx-lm's."""
    expected = [case["greedy"] for case in ORACLES]
    async with Runtime.open(blocks=512) as rt:

        async def greedy(ids: list[int], count: int) -> list[int]:
            params = SamplingParams(max_tokens=count)
            async with await rt.sequence(ids) as seq:
                return [step.token async for step in seq.generate(params)]

        assert [await greedy(case["ids"], len(case["greedy"])) for case in ORACLES] == expected
        got: dict[int, list[int]] = {}

        async def read(index: int, ids: list[int], count: int) -> None:
            got[index] = await greedy(ids, count)

        async with anyio.create_task_group() as group:
            for index, case in enumerate(ORACLES):
                group.start_soon(read, index, case["ids"], len(case["greedy"]))
            for index, case in enumerate(ORACLES[:4], len(ORACLES)):
                group.start_soon(read, index, case["ids"][1:], 64)
        assert [got[index] for index in range(len(ORACLES))] == expected
