"""simulate.py: a small run keeps its bounds, and the same seed gives the same run."""

from __future__ import annotations

import json

import pytest
import simulate
from simulation import Simulation, Trace


def test_a_quick_run_keeps_its_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and [run["blocks"] for run in result["runs"]] == [100, 1000, 10_000]
    large = result["runs"][-1]
    assert 0 < large["waste"] < 0.04
    assert large["occupancy"] > 0.5, "not under pressure, it would say nothing"
    for name in ("hits", "evictions", "preemptions", "copies", "forks", "closed_early", "saved_by_sharing"):
        assert large[name] > 0, name


def test_one_seed_is_one_run() -> None:
    def run(seed: int) -> tuple[int, int, list[float]]:
        report = Simulation(400, 60, 16, seed, 2.0, Trace()).run()
        return report.operations, report.counts["prefilled"], report.waits

    assert run(3) == run(3) != run(4)


@pytest.mark.parametrize("options", [["--blocks", "0"], ["--load", "0"]])
def test_options_out_of_range_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.parse(options)
