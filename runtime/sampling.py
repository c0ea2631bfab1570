"""Choosing tokens, on the device, for a whole batch in a few MLX calls whatever the mix of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pagefork.runtime.transfer import Transfer

_MASK64 = (1 << 64) - 1
_PLAIN = Transfer()


@dataclass(frozen=True)
class Sampling:
    """One entry per sampled row: temperature, top_p, min_p float32 `[rows]`, top_k int32, keys uint32 `[rows, 2]`.

    Nothing reads the keys where all rows are greedy.
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    keys: npt.NDArray[np.uint32]

    @cached_property
    def greedy(self) -> bool:
        """Every row takes its most likely token."""
        return not self.temperature.any()

    def keyed(self, keys: npt.NDArray[np.uint32]) -> Sampling:
        """The same with these keys."""
        return replace(self, keys=keys)


def mix(seed: int, salt: int) -> int:
    """64 well-mixed bits of two integers; the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def row_keys(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.uint32]:
    """The random key of each row, uint32 `[rows, 2]`, from its job's key and the position it samples for."""
    with np.errstate(over="ignore"):
        z = keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.stack([z >> np.uint64(32), z & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)


def choose(logits: mx.array, sampling: Sampling, topk: int = 0, transfer: Transfer = _PLAIN) -> tuple[mx.array, ...]:
    """A token for each row of `logits` `[rows, vocab]`: ids int32 and log-probabilities float32 `[rows]`.

    With `topk`, the ids and log-probabilities of the most likely tokens follow, `[rows, topk]`, best first.
    """
    logits = logits.astype(mx.float32)
    if sampling.greedy and not topk:
        return _most_likely(logits), mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    ids = sample(logits, total, sampling, transfer)
    chosen = (ids, (mx.take_along_axis(logits, ids[:, None], axis=-1) - total).squeeze(-1))
    return chosen + best(logits - total, topk) if topk else chosen


def sample(logits: mx.array, total: mx.array, sampling: Sampling, transfer: Transfer = _PLAIN) -> mx.array:
    """One token id per row, int32 `[rows]`, from float32 logits `[rows, vocab]` and their logsumexp `[rows, 1]`.

    Gumbel-max (Gumbel 1954): every operation is row by row, so a row's token does not depend on its batch.
    """
    greedy = _most_likely(logits)
    if sampling.greedy:
        return greedy
    logprobs = logits - total
    # Off is 2, since rounding can bring the sum of what comes before to 1.
    top_p = np.where(sampling.top_p < 1, sampling.top_p, 2).astype(np.float32)
    top_k = np.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1]).astype(np.int32)
    given = [array[:, None] for array in (sampling.temperature, top_p, top_k, sampling.min_p)]
    temperature, *limits, keys = transfer.send([*given, sampling.keys])
    kept = _filtered(logprobs, sampling, *limits)
    noise = mx.vmap(lambda key: mx.random.gumbel((logprobs.shape[-1],), key=key))(keys)
    drawn = mx.argmax(kept / mx.maximum(temperature, 1e-6) + noise, axis=-1).view(mx.int32)
    return mx.where(temperature[:, 0] > 0, drawn, greedy)


def _most_likely(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1).view(mx.int32)


def _filtered(logprobs: mx.array, sampling: Sampling, top_p: mx.array, top_k: mx.array, min_p: mx.array) -> mx.array:
    """Log-probabilities with what top_k, top_p and min_p, each `[rows, 1]`, exclude at -inf."""
    uses_k, uses_p = bool(sampling.top_k.any()), bool((sampling.top_p < 1).any())
    kept = logprobs
    if uses_k or uses_p:
        order = mx.argsort(-logprobs, axis=-1)
        ranked = mx.take_along_axis(logprobs, order, axis=-1)
        keep = mx.ones(ranked.shape, dtype=mx.bool_)
        if uses_p:
            probability = mx.exp(ranked)
            before = mx.cumsum(probability, axis=-1) - probability
            keep = (before < top_p) | (mx.arange(ranked.shape[-1]) == 0)  # the most likely token always stays
        if uses_k:
            keep = keep & (mx.arange(ranked.shape[-1])[None] < top_k)
        ranked = mx.where(keep, ranked, -mx.inf)
        kept = mx.put_along_axis(kept, order, ranked, axis=-1)
    if (sampling.min_p > 0).any():
        floor = mx.max(logprobs, axis=-1, keepdims=True) + mx.log(min_p)
        kept = mx.where(logprobs >= floor, kept, -mx.inf)
    return kept


def best(logprobs: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The `k` most likely tokens of each row, best first: ids int32 and log-probabilities float32, `[rows, k]`."""
    k = min(k, logprobs.shape[-1])
    ids = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.int32), mx.take_along_axis(values, order, axis=-1)
