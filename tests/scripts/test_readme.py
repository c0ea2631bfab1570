"""The README's example runs as it stands, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return str(code)


@pytest.mark.model
@pytest.mark.slow
def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", example()], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "blocks at peak" in done.stdout


def test_the_example_compiles_and_is_short() -> None:
    compile(example(), "README.md", "exec")
    assert len([line for line in example().splitlines() if line.strip()]) <= 15


def test_commands_exist() -> None:
    rules = (ROOT / "Makefile").read_text()
    for command in re.findall(r"make (\w+)", README):
        assert f"\n{command}:" in rules, command
    for script in re.findall(r"scripts/\w+\.py", README + (ROOT / "CHANGELOG.md").read_text()):
        assert (ROOT / script).is_file(), script
