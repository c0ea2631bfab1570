"""Checks of what callers pass: a wrong kind or size is refused before any actor sees it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from pagefork.runtime.errors import InvalidRequest
from pagefork.runtime.messages import SamplingParams

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


def seconds(deadline: float | None) -> float | None:
    """`deadline` as a float, or None; InvalidRequest for what is no time to wait."""
    return None if deadline is None else real("deadline", deadline, "seconds, not negative", 0)


def sampling_params(params: SamplingParams) -> SamplingParams:
    """`params` with plain Python numbers; InvalidRequest where a field is out of its range."""
    top_p = real("top_p", params.top_p, "in (0, 1]", 0, 1)
    if top_p == 0:
        raise InvalidRequest("top_p must be in (0, 1], not 0; for greedy tokens set temperature=0")
    return SamplingParams(
        max_tokens=whole("max_tokens", params.max_tokens, 1),
        temperature=real("temperature", params.temperature, "finite and not negative", 0),
        top_p=top_p,
        top_k=whole("top_k", params.top_k, 0, INT32),
        min_p=real("min_p", params.min_p, "in [0, 1]", 0, 1),
        seed=None if params.seed is None else whole("seed", params.seed, -(2**63), 2**64 - 1),
        stop_tokens=token_ids("stop_tokens", params.stop_tokens),
        ignore_eos=bool(params.ignore_eos),
    )
