"""stress.py as a user runs it; and that it would notice a runtime that mixes blocks up."""

from __future__ import annotations

import io
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import schedule
import stress
import stress_driver
import toy_model
from stress_oracle import LoneOracle
from stress_view import LiveView, NoView, Picture, PlainView

from pagefork.cache.blocks import BlockPool
from pagefork.cache.grant import Grant
from pagefork.cache.ledger import Ledger
from pagefork.kernels import dispatch
from pagefork.kernels.device import Device
from pagefork.runtime import Runtime, holdings
from pagefork.runtime.actor import Envelope
from pagefork.runtime.allocator import Allocator
from pagefork.runtime.messages import Publish, Release, Reserve
from pagefork.runtime.work import Work

SCRIPT = Path(__file__).parents[2] / "scripts" / "stress.py"
BACKENDS = ["asyncio", "trio"]
EVERYTHING = ["--prefix", "--priorities", "--beams", "--faults"]
FIELDS = {
    "ok",
    "ops",
    "sequences",
    "forks",
    "cancels",
    "tokens",
    "copies",
    "preemptions",
    "prefix_hits",
    "evictions",
    "waited",
    "expired",
    "content_errors",
    "leaked_blocks",
    "p99_loop_lag_ms",
    "seconds",
}


def run(*arguments: str, cwd: Path | None = None) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )
    return done.returncode, json.loads(done.stdout)


def in_process(*arguments: str, backend: str = "asyncio", view: NoView | None = None) -> dict[str, Any]:
    options = stress.parse(["--backend", backend, *arguments])
    return anyio.run(stress.stress, options, None, view, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "load",
    [[], EVERYTHING, ["--window", *EVERYTHING], ["--window", "some", *EVERYTHING]],
    ids=["plain", "everything", "everything with windows", "everything with windows in some layers"],
)
def test_a_full_pool_loses_and_mixes_up_nothing(backend: str, load: list[str], tmp_path: Path) -> None:
    status, result = run("--ops", "1000", "--seed", "3", "--backend", backend, *load, cwd=tmp_path)
    assert status == 0, result
    assert result.keys() >= FIELDS
    assert result["ok"] and result["ops"] == 1000
    assert result["content_errors"] == result["leaked_blocks"] == 0
    # It would prove little if these had not happened.
    happened = ["exhausted", "preemptions", "waited", "forks", "cancels", "copies", "tokens", "kv_rows_checked"]
    if load:
        happened += ["prefix_hits", "evictions", "beams", "crashes"]
    if "--window" in load:
        happened += ["kv_rows_given_back"]
    assert [name for name in happened if result[name] <= 0] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_says_under_stress_what_it_says_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoneOracle, "PROMPTS", 2)
    monkeypatch.setattr(LoneOracle, "ANSWER", 10)
    monkeypatch.setattr(LoneOracle, "longest", LoneOracle.PROMPT + 10)
    result = in_process("--model", "smollm2-135m", "--ops", "20", "--sequences", "4", "--prefix")
    assert result["ok"] and result["tokens"] > 0, result


@pytest.mark.parametrize("load", [[], ["--window"], ["--window", "some"]], ids=["none", "windows", "some"])
def test_the_pool_is_a_share_of_the_demand(load: list[str]) -> None:
    class Highest(NoView):
        every = 0.02
        blocks = 0

        def show(self, picture: Picture) -> None:
            self.blocks = max(self.blocks, picture.own + picture.shared)

    view = Highest()
    result = in_process("--ops", "960", "--sequences", "24", "--blocks", "2048", *load, view=view)
    assert result["ok"] and result["exhausted"] == result["preemptions"] == result["waited"] == 0
    options = stress.parse(["--sequences", "24", "--demand", "1", *load])
    all_of_it = stress.pool_size(options) * (2 if options.window == "some" else 1)
    assert 0.7 * all_of_it < view.blocks < 1.4 * all_of_it


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


def test_what_is_asked_for_is_drawn() -> None:
    load = schedule.Load(prefix=True, priorities=True, beams=True, faults=True)
    ops = list(itertools.islice(schedule.operations(0, 0, toy_model.VOCAB, load), 2000))
    assert {op.kind for op in ops} == {*schedule.WEIGHTS, "beams", "crash"}
    assert len({op.priority for op in ops}) > 2
    assert {0.0, None} < {op.deadline for op in ops}
    heads = set(schedule.heads(0, toy_model.VOCAB))
    prompts = [op.tokens for op in ops if op.kind == "open"]
    assert {prompt[: schedule.HEAD] for prompt in prompts} == heads
    assert heads & set(prompts)


def test_a_block_that_is_not_copied_before_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Ledger.take

    def without_copies(self: Ledger, *arguments: Any) -> Grant:
        grant = take(self, *arguments)
        return Grant(grant.first, grant.ids, [], grant.hit)

    monkeypatch.setattr(Ledger, "take", without_copies)
    result = in_process("--ops", "400", "--sequences", "16")
    assert not result["ok"] and result["content_errors"] > 0
    assert "seed 0, task" in result["errors"][0]


def test_a_write_to_a_shared_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "_unwritable", lambda *_: ((), ()))
    result = in_process("--ops", "400", "--sequences", "16")
    assert not result["ok"] and result["content_errors"] > 0


def test_a_published_block_that_is_not_computed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Work.append

    async def hasty(self: Work, tokens: list[int], patience: float) -> None:
        await append(self, tokens, patience)
        self._house.allocator.post(Publish(self._owner, self.tokens, self.length))

    monkeypatch.setattr(Work, "append", hasty)
    result = in_process("--ops", "800", "--sequences", "16", "--prefix")
    assert not result["ok"] and result["content_errors"] > 0


@pytest.mark.parametrize("layers", ["all", "some"])
def test_a_block_that_is_given_back_while_a_window_sees_it_is_noticed(
    layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = holdings.first_needed
    monkeypatch.setattr(holdings, "first_needed", lambda position, *rest: needed(position + 4, *rest))
    result = in_process("--ops", "400", "--sequences", "16", "--window", layers)
    assert not result["ok"] and result["content_errors"] > 0


@pytest.mark.parametrize("layers", ["all", "some"])
def test_a_sequence_that_goes_on_from_what_was_given_back_is_noticed(
    layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings.Holdings, "goes_on", lambda self, length: True)
    result = in_process("--ops", "400", "--sequences", "16", "--window", layers)
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
@pytest.mark.parametrize("windows", [toy_model.ALL, (2, None), (None, 5), (3, 4)])
async def test_the_toy_model_says_what_its_shadow_says(windows: toy_model.Windows) -> None:
    tokens = [5, 63, 0, 17, 17, 2, 40, 33, 1]
    async with Runtime.open((toy_model.ToyModel(windows), None), blocks=16, block_size=4) as rt:
        seq = await rt.sequence(tokens)
        top = await seq.topk(6)
        for layer in range(toy_model.LAYERS):
            k, v = await seq.read_kv(layer)
            expected = toy_model.expected_kv(tokens, layer, windows)
            assert np.isnan(k[0]).all() == (windows[layer] is not None), "given back where the layer has a window"
            gone = 4 if windows[layer] is not None else 0
            assert (k == expected[0])[gone:].all() and (v == expected[1])[gone:].all()
    assert [token for token, _ in top] == toy_model.best(tokens, 6, windows)
    assert [logprob for _, logprob in top] == pytest.approx(
        [toy_model.logprobs(tokens, windows)[token] for token, _ in top], abs=1e-3
    )


def test_a_hang_is_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(self: stress_driver.Driver, op: schedule.Op) -> str:
        await anyio.sleep_forever()

    monkeypatch.setattr(stress, "STUCK", 0.2)
    monkeypatch.setattr(stress_driver.Driver, "_perform", stuck)
    result = in_process("--ops", "10", "--sequences", "2")
    assert not result["ok"]
    assert "task 0, operation 0" in result["errors"][0]


def test_a_request_that_is_never_answered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, lost = Allocator._reserve, []

    def forgetful(self: Allocator, envelope: Envelope, message: Reserve) -> None:
        reserve(self, envelope, message)
        # Not the first alone: one whose asker is cancelled is taken back, and nothing was lost.
        if envelope in self._asking.values():
            lost.append(envelope)
            self.arbiter.withdraw(next(ticket for ticket, asking in self._asking.items() if asking is envelope))

    monkeypatch.setattr(stress, "STUCK", 3.0)
    monkeypatch.setattr(Allocator, "_reserve", forgetful)
    result = in_process("--ops", "2000", "--sequences", "16", "--demand", "0.3")
    assert lost and not result["ok"]
    assert "not ended after 3 s: task" in result["errors"][0]


def test_an_error_leaves_what_is_needed_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BlockPool, "refcounts", property(lambda self: self._view * 0 + 1))
    arguments = ["--ops", "300", "--sequences", "8", "--seed", "5", "--json", "--report", str(tmp_path / "crash.json")]
    assert stress.main(arguments) == 1
    said = capsys.readouterr()
    assert not json.loads(said.out)["ok"]
    crash = json.loads((tmp_path / "crash.json").read_text())
    assert shlex.split(crash["command"])[2:] == arguments
    assert crash["command"] in said.err
    assert crash["errors"] and crash["last"][-1]["op"]["kind"]


def test_the_pool_is_shown() -> None:
    console = pytest.importorskip("rich.console")
    picture = Picture(
        total=100,
        own=40,
        shared=20,
        cached=10,
        free=30,
        sequences=7,
        waiting=3,
        waited=12,
        preemptions=5,
        prefix_hits=4,
        evictions=2,
        ops=1234,
        exhausted=6,
        failures=0,
        seconds=9.0,
        speed=321.0,
    )
    plain, live = io.StringIO(), io.StringIO()
    for view in (PlainView(plain), LiveView(console.Console(file=live, force_terminal=True, width=100))):
        with view:
            view.show(picture)
    assert "used 60/100 (20 shared, 10 cached)  waiting 3  preempted 5  321 tokens/s" in plain.getvalue()
    for part in ("1,234 operations", "shared 20", "cached 10", "3 waiting", "5 preempted", "321 tokens/s"):
        assert part in live.getvalue()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gpu_whose_kernels_cannot_be_used_is_as_good(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There MLX's own operations must be told, as kernels are, what they come after."""
    monkeypatch.setattr(dispatch, "device", lambda: Device("reference", "some GPU", 1))
    found = in_process("--ops", "500", "--seed", "3", *EVERYTHING, backend=backend)
    assert found["ok"] and found["tokens"] and found["content_errors"] == found["leaked_blocks"] == 0
