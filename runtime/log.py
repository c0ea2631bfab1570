"""The library's log: structured, and through the standard logger "pagefork", so that it is silent unless asked for.

To see it: `logging.basicConfig(level=logging.INFO)`.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

log: Any = structlog.wrap_logger(
    logging.getLogger("pagefork"),
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(key_order=["event"]),
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
)
