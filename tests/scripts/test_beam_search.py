"""beam_search.py: what it counts, what it shows, and the script as a user runs it."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import beam_search
import beam_views
import pytest
import tokenizers
import toy_model
from beam_views import Result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "beam_search.py"
PROMPT = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=600, check=False
    )


def options(**changes: Any) -> argparse.Namespace:
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(toy_model.VOCAB)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    default = {"model": (toy_model.ToyModel(), tokenizer), "prompt": PROMPT, "width": 3, "max_tokens": 10}
    return argparse.Namespace(**{**default, "length_penalty": 1.0, **changes})


async def search(view: beam_views.View, **changes: Any) -> Result:
    with view:
        result = await beam_search.search(options(**changes), view)
        view.end(result)
    return result


@pytest.mark.anyio
async def test_private_caches_are_counted_step_by_step() -> None:
    result = await search(beam_views.plain(io.StringIO()), prompt=f"{PROMPT} {PROMPT}")
    # One beam computes the prompt of 20 tokens; then 3 go on, whose 29 tokens at the last step need two blocks each.
    assert result.tokens == 1 + 9 * 3
    assert result.unshared == 3 * 2
    assert 2 <= result.peak < result.unshared
    assert result.copied_bytes > 0 and result.unshared_bytes > 0
    assert [beam.score for beam in result.beams] == sorted((beam.score for beam in result.beams), reverse=True)


@pytest.mark.anyio
async def test_one_beam_shares_and_copies_nothing() -> None:
    result = await search(beam_views.plain(io.StringIO()), width=1)
    assert result.peak == result.unshared
    assert result.copied_bytes == result.unshared_bytes == 0


@pytest.mark.anyio
async def test_plain_lines_say_every_step_and_every_beam() -> None:
    out = io.StringIO()
    result = await search(beam_views.plain(out))
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step") for line in lines) == 10
    for rank, beam in enumerate(result.beams, 1):
        assert f"{rank}. score {beam.score:.4f}" in out.getvalue()
        assert f"   {beam.text}" in lines
    assert f"blocks at peak: {result.peak}; one private cache per beam: {result.unshared}" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.anyio
async def test_the_tree_shows_beams_and_savings() -> None:
    console = pytest.importorskip("rich.console")
    from beam_tree import TreeView

    out = io.StringIO()
    result = await search(TreeView(console.Console(file=out, force_terminal=True, width=160, highlight=False)))
    shown = out.getvalue()
    assert "●" in shown and "✗" in shown and "step" in shown
    assert all(f"{beam.score:.4f}" in shown for beam in result.beams)
    assert "a private cache per beam" in shown


def test_an_error_is_one_line_on_stderr() -> None:
    done = run("--model", "no-such-folder/model.gguf", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr


@pytest.mark.model
@pytest.mark.slow
def test_json_from_the_real_model() -> None:
    done = run("--json", "--prompt", "The capital of France is", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"model", "prompt", "width", "beams", "tokens_per_s", "seconds", "blocks"}
    assert result["blocks"].keys() == {"peak", "unshared", "copied_bytes"}
    assert (result["model"], result["width"], len(result["beams"])) == ("smollm2-135m", 4, 4)
    best = result["beams"][0]
    assert best.keys() == {"text", "tokens", "score", "logprob", "finished"}
    assert best["text"].startswith(" Paris")
