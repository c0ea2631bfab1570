"""The engine double notices what it is there to notice."""

from __future__ import annotations

import anyio
import numpy as np
import pytest
from msgspec.structs import replace

from pagefork.runtime import SamplingParams

from .double import Double, ledger, runtime, take

pytestmark = pytest.mark.anyio

PROMPT = [3, 1, 4, 1, 5]


async def last_decode(double: Double) -> None:
    """Have the double serve a few decode steps of one sequence, and forget how they ended."""
    async with runtime(double, inline=True) as rt, await rt.sequence(PROMPT) as seq:
        assert await take(seq.generate(SamplingParams(max_tokens=4)), 4) == double.greedy(PROMPT, 4)
        plan = double.plans[-1]
        for spoilt, complaint in (
            (replace(plan, tables=plan.tables[..., ::-1].copy()), "not its past"),
            (replace(plan, lengths=plan.lengths + 1), "not its past"),
            (replace(plan, slots=np.array([[63 * 4]], np.int32)), "shared or free blocks written"),
            (replace(plan, copies=np.array([[63, 62, 1]], np.int32)), "copy's blocks are not held"),
            (replace(plan, tables=np.full_like(plan.tables, 60)), "visible block is not held"),
        ):
            with pytest.raises(AssertionError, match=complaint):
                double.launch(spoilt)
        ledger(rt).share(seq._actor.owner, [99], 8)
        with pytest.raises(AssertionError, match="shared or free blocks written"):
            double.launch(plan)
        ledger(rt).release(99)


async def test_a_wrong_plan_is_refused() -> None:
    with anyio.fail_after(10):
        await last_decode(Double())


async def test_a_fault_that_the_double_finds_ends_the_runtime() -> None:
    with anyio.fail_after(10), pytest.raises(Exception, match="failed to launch"):
        async with runtime(Double(fail_launch=0)) as rt, await rt.sequence(PROMPT) as seq:
            await seq.topk(1)
