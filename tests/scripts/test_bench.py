"""Every benchmark runs, at sizes too small to say anything about speed, and prints the fields it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench.py"


def bench(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments, "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_control_compares_host_costs(backend: str) -> None:
    rows = bench("control", "--quick", "--backend", backend)["rows"]
    assert [row["sequences"] for row in rows] == [1, 32, 256]
    assert all(row["us_per_token"] > 0 and row["mlx_lm_us_per_token"] > 0 for row in rows)


@pytest.mark.parametrize("shape", ["tiny", "tiny-sliding"])
def test_decode_compares_with_the_peer_and_the_bound(shape: str) -> None:
    rows = bench("decode", "--shape", shape, "--case", "3,20", "--tokens", "8")["rows"]
    assert set(rows[0]) >= {"batch", "context", "bound", "tokens_per_s", "mlx_lm_tokens_per_s", "ratio"}


def test_products_are_timed_beside_those_of_mlx() -> None:
    (row,) = bench("products", "--quick", "--rows", "2")["us_per_layer"]
    assert row["rows"] == 2 and row["mlx"] > 0 and "linear" in row


def test_lag_of_the_null_model() -> None:
    assert bench("lag", "--model", "null", "--readers", "8", "--tokens", "200")["ticks"] > 0


@pytest.mark.model
def test_ttft_says_what_a_long_prompt_costs_the_others() -> None:
    figures = bench("ttft", "--readers", "2", "--length", "40", "--chunk", "16")
    assert figures["steps"] >= 3
    assert figures["worst_gap_ms"] > 0


@pytest.mark.model
def test_a_prompt_whose_head_is_known_computes_its_tail() -> None:
    figures = bench("prefix", "--length", "60", "--shared", "48")
    assert figures["cold_tokens_computed"] == 60
    assert figures["warm_tokens_computed"] == 12


@pytest.mark.model
def test_beam_is_timed_without_a_peer() -> None:
    assert bench("beam", "--width", "2", "--tokens", "2", "--repeats", "1")["seconds"] > 0


@pytest.mark.model
def test_beams_share_blocks() -> None:
    assert 0 < bench("sharing", "--width", "2", "--tokens", "20", "--prompts", "1")["mean"] < 1
