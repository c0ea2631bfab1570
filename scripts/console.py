"""What the scripts share: where the library's log goes, and how an error ends a script. Import it before pagefork."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

import structlog


def quiet(level: int = logging.WARNING) -> None:
    """Send what pagefork logs from `level` on to stderr, so that stdout holds the script's own words alone."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def fail(error: object) -> NoReturn:
    """End the script with status 1 and one line."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(1)


quiet()
