"""stress.py as a user runs it; and that it would notice a runtime that mixes blocks up."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import schedule
import stress
import toy_model

from pagefork.cache.ledger import Grant, Ledger
from pagefork.runtime import Runtime
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.messages import Release

SCRIPT = Path(__file__).parents[2] / "scripts" / "stress.py"
BACKENDS = ["asyncio", "trio"]
FIELDS = {
    "ok",
    "ops",
    "sequences",
    "forks",
    "cancels",
    "tokens",
    "copies",
    "content_errors",
    "leaked_blocks",
    "p99_loop_lag_ms",
    "seconds",
}


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout)


def in_process(*arguments: str, backend: str = "asyncio") -> dict[str, Any]:
    options = stress.parse(["--backend", backend, *arguments])
    return anyio.run(stress.stress, options, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_pool_loses_and_mixes_up_nothing(backend: str) -> None:
    status, result = run("--ops", "500", "--sequences", "32", "--blocks", "96", "--seed", "3", "--backend", backend)
    assert status == 0, result
    assert result.keys() >= FIELDS
    assert result["ok"] and result["ops"] == 500
    assert result["content_errors"] == result["leaked_blocks"] == 0
    # It would prove little if these had not happened.
    assert min(result[name] for name in ("exhausted", "forks", "cancels", "copies", "tokens", "kv_rows_checked")) > 0


def test_seconds_end_a_run() -> None:
    result = in_process("--seconds", "0.5", "--sequences", "4")
    assert result["ok"] and result["ops"] > 0


def test_same_seed_same_schedule() -> None:
    one, two, other = (
        in_process("--ops", "60", "--sequences", "8", "--seed", seed, backend=backend)
        for seed, backend in (("7", "asyncio"), ("7", "trio"), ("8", "asyncio"))
    )
    assert one["schedule"] == two["schedule"] != other["schedule"]
    assert one["ops"] == two["ops"] == 60


def test_a_task_draws_operations_of_every_kind() -> None:
    ops = list(itertools.islice(schedule.operations(0, 0, toy_model.VOCAB), 1000))
    assert {op.kind for op in ops} == set(schedule.WEIGHTS)
    assert {op.cancel_after is None for op in ops} == {True, False}


def test_a_block_that_is_not_copied_before_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Ledger.reserve

    def without_copies(self: Ledger, owner: int, length: int, write_from: int | None = None) -> Grant:
        grant = reserve(self, owner, length, write_from)
        return Grant(grant.first, grant.ids, [])

    monkeypatch.setattr(Ledger, "reserve", without_copies)
    result = in_process("--ops", "400", "--sequences", "16")
    assert not result["ok"] and result["content_errors"] > 0
    assert "seed 0, task" in result["errors"][0]


def test_a_write_to_a_shared_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Ledger.reserve
    monkeypatch.setattr(Ledger, "reserve", lambda self, owner, length, write_from=None: reserve(self, owner, length))
    result = in_process("--ops", "400", "--sequences", "16")
    assert not result["ok"] and result["content_errors"] > 0


def test_a_lost_release_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    post, lost = Allocator.post, []

    def lossy(self: Allocator, message: Any) -> None:
        if isinstance(message, Release) and not lost:
            lost.append(message)
        else:
            post(self, message)

    monkeypatch.setattr(Allocator, "post", lossy)
    result = in_process("--ops", "200", "--sequences", "8")
    assert not result["ok"] and result["leaked_blocks"] > 0


@pytest.mark.anyio
async def test_the_toy_model_says_what_its_shadow_says() -> None:
    tokens = [5, 63, 0, 17, 17, 2, 40]
    async with Runtime.open((toy_model.ToyModel(), None), blocks=16, block_size=4) as rt:
        seq = await rt.sequence(tokens)
        top = await seq.topk(6)
        for layer in range(toy_model.LAYERS):
            k, v = await seq.read_kv(layer)
            expected = toy_model.expected_kv(tokens, layer)
            assert (k == expected[0]).all() and (v == expected[1]).all()
    assert [token for token, _ in top] == toy_model.best(tokens, 6)
    assert [logprob for _, logprob in top] == pytest.approx(
        [toy_model.logprobs(tokens)[token] for token, _ in top], abs=1e-3
    )


def test_a_hang_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(self: stress.Driver, op: schedule.Op) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(stress, "PATIENCE", 0.2)
    monkeypatch.setattr(stress.Driver, "_perform", stuck)
    result = in_process("--ops", "10", "--sequences", "2")
    assert not result["ok"]
    assert "task 0, operation 0" in result["errors"][0]
