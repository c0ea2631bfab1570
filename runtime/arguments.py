"""Checks of what callers pass: a wrong kind or size is refused before any actor sees it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from pagefork.runtime.errors import InvalidRequest

INT32 = 2**31 - 1


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int within `[low, high]`; InvalidRequest otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be an integer, not {value!r}") from None
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, not {number}")
    return number


def real(name: str, value: Any, rule: str, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a finite float within `[low, high]`; InvalidRequest, which states the `rule`, otherwise."""
    try:
        number = float(value) if not isinstance(value, str) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        raise InvalidRequest(f"{name} must be {rule}, not {value!r}")
    return number


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """`value` as token ids; InvalidRequest otherwise."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be token ids, not {value!r}")
    return tuple(whole(f"each of {name}", token, 0, INT32) for token in value)
