"""Defects that the stress test has found, each as the shortest story that shows it."""

from __future__ import annotations

import threading
import time

import anyio
import mlx.core as mx
import pytest
import toy_model

from pagefork.runtime import ModelUnavailable, Runtime, SamplingParams

pytestmark = pytest.mark.anyio


async def test_a_generation_dropped_late_does_not_end_the_next_one() -> None:
    with anyio.fail_after(30):
        async with Runtime.open((toy_model.ToyModel(), None), blocks=64, block_size=4) as rt:
            seq = await rt.sequence([1, 2, 3])
            params = SamplingParams(max_tokens=6)
            old = seq.generate(params)
            await anext(old)
            new = seq.generate(params)
            tokens = [(await anext(new)).token]
            del old
            tokens += [step.token async for step in new]
            assert len(tokens) == 6
            assert seq.tokens[4:] == tokens


async def test_a_model_that_cannot_be_loaded_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process aborted when it ended while that thread took down its MLX streams."""
    clear, cleared = mx.clear_streams, threading.Event()

    def slow() -> None:
        time.sleep(0.1)
        clear()
        cleared.set()

    monkeypatch.setattr(mx, "clear_streams", slow)
    with pytest.raises(ModelUnavailable):
        async with Runtime.open("no-such-folder/model.gguf"):
            raise AssertionError("there is no such model")
    assert cleared.is_set()
