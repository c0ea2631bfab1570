"""What the stress test has seen: counts, what was wrong, and enough of the past to see it again."""

from __future__ import annotations

import json
import shlex
import sys
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from schedule import Op

RECENT = 200


@dataclass
class Report:
    """What all tasks together have seen. recent: the operations that ended last, each with its end."""

    seed: int
    ops: int = 0
    sequences: int = 0
    forks: int = 0
    cancels: int = 0
    exhausted: int = 0
    beams: int = 0
    crashes: int = 0
    kv_rows: int = 0
    rows_given_back: int = 0
    content_errors: int = 0
    failures: list[str] = field(default_factory=list)
    recent: deque[tuple[int, int, Op, str]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def wrong(self, where: str, what: str) -> None:
        """A sequence is not what it should be."""
        self.content_errors += 1
        self.fail(f"{where}: {what}")

    def fail(self, what: str) -> None:
        if len(self.failures) < RECENT:
            self.failures.append(f"seed {self.seed}, {what}")


def explain(error: BaseException) -> list[str]:
    """The errors in a group, each with the place where it was raised."""
    if isinstance(error, BaseExceptionGroup):
        return [line for part in error.exceptions for line in explain(part)]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return [f"{type(error).__name__}: {error}{place}"]


def write_crash(path: Path, arguments: list[str], result: dict[str, Any], report: Report, running: list[str]) -> None:
    """Everything that is needed to run it again and to look for the cause, as one JSON object."""
    past = [
        {"task": task, "number": number, "end": end, "op": msgspec.to_builtins(op)}
        for task, number, op, end in report.recent
    ]
    text = {
        "command": shlex.join(["python", "scripts/stress.py", *arguments]),
        "errors": result["errors"],
        "running": running,
        "last": past,
        "result": {key: value for key, value in result.items() if key != "errors"},
    }
    path.write_text(json.dumps(text, indent=1) + "\n")


def print_crash(path: Path, arguments: list[str], result: dict[str, Any], report: Report) -> None:
    """The same in short, for whoever looks at the terminal."""
    for failure in result["errors"]:
        print(failure, file=sys.stderr)
    print("the last operations:", file=sys.stderr)
    for task, number, op, end in list(report.recent)[-10:]:
        print(f"  task {task}, operation {number}, {op.kind}: {end}", file=sys.stderr)
    print(f"again: {shlex.join(['python', 'scripts/stress.py', *arguments])}", file=sys.stderr)
    print(f"all of it: {path}", file=sys.stderr)


def resident() -> float | None:
    """MB of memory that this process has now, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * 4096 / 1e6
