"""docs/models.md says what the installed mlx-lm's architectures come to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import models
import pytest
from architectures import CONFIGS, NEEDS, TEXT, is_model, names
from models import Verdict, page

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/models.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_configurations_name_architectures_that_exist() -> None:
    assert {*CONFIGS, *NEEDS, *TEXT} <= {name for name in names() if is_model(name)}


def test_a_stale_page_fails_the_check_and_says_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "docs" / "models.md"
    kept.parent.mkdir()
    verdict = Verdict("llama", "served", "full attention")
    kept.write_text(page([Verdict("llama", "refused", "no reason")]))
    monkeypatch.setattr(models, "PAGE", kept)
    monkeypatch.setattr(models, "verdicts", lambda: [verdict])
    assert models.main(["--check"]) == 1
    assert "+| llama | served | full attention |" in capsys.readouterr().out
    assert models.main([]) == 0
    assert models.main(["--check"]) == 0


def test_an_architecture_without_a_configuration_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ValueError(f"no sizes for {name}")

    monkeypatch.setattr(models, "tiny", broken)
    assert models.judge("llama") == Verdict(
        "llama", "unknown", "the tiny configuration does not run: ValueError: no sizes for llama"
    )
