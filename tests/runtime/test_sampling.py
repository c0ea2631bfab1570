"""Sampling: the filters of one row, whatever its batch mates ask for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefork.runtime.sampling import Sampling, choose, mix, row_keys

Row = tuple[float, float, float, int]
ROWS = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0, 1, 3, 99]),
)
VOCAB = 16


def sampling(rows: list[Row], keys: npt.NDArray[np.uint32]) -> Sampling:
    temperature, top_p, min_p = (np.array([row[i] for row in rows], np.float32) for i in range(3))
    return Sampling(temperature, top_p, min_p, np.array([row[3] for row in rows], np.int32), keys)


def logits_of(seed: int, rows: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2)


def log_softmax(logits: mx.array) -> npt.NDArray[np.float64]:
    wide = np.array(logits).astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def keys_of(seed: int, rows: int) -> npt.NDArray[np.uint32]:
    return row_keys(np.full(rows, mix(seed, 0), np.uint64), np.arange(rows))


def allowed(logprobs: npt.NDArray[np.float64], row: Row) -> set[int]:
    """The tokens that mlx-lm's filters leave: top_p and top_k by rank, min_p by the best token's probability."""
    temperature, top_p, min_p, top_k = row
    order = np.argsort(-logprobs, kind="stable")
    if temperature == 0:
        return {int(order[0])}
    probability = np.exp(logprobs[order])
    before = np.cumsum(probability) - probability
    keep = (before < top_p + 1e-6) | (np.arange(VOCAB) == 0)
    if top_k:
        keep &= np.arange(VOCAB) < top_k
    keep &= probability >= min_p * probability[0] * (1 - 1e-5)
    return set(order[keep].tolist())


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_a_token_is_one_that_its_own_filters_leave(rows: list[Row], seed: int) -> None:
    logits = logits_of(seed, len(rows))
    ids, values = (np.array(array) for array in choose(logits, sampling(rows, keys_of(seed, len(rows)))))
    for token, value, logprobs, row in zip(ids.tolist(), values, log_softmax(logits), rows, strict=True):
        assert token in allowed(logprobs, row)
        assert abs(value - logprobs[token]) < 1e-5, "the log-probability is the model's own, without filters"


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, min_size=2, max_size=6), seed=st.integers(0, 1 << 30))
def test_a_token_does_not_depend_on_its_batch_mates(rows: list[Row], seed: int) -> None:
    logits, keys = logits_of(seed, len(rows)), keys_of(seed, len(rows))
    together = np.array(choose(logits, sampling(rows, keys))[0])
    for index, row in enumerate(rows):
        part = slice(index, index + 1)
        assert int(np.array(choose(logits[part], sampling([row], keys[part]))[0])[0]) == together[index]


def test_draws_follow_the_distribution() -> None:
    count = 4000
    logits = mx.repeat(logits_of(3, 1), count, axis=0)
    ids = np.array(choose(logits, sampling([(1.0, 1.0, 0.0, 0)] * count, keys_of(9, count)))[0])
    expected = np.exp(log_softmax(logits)[0])
    assert np.abs(np.bincount(ids, minlength=VOCAB) / count - expected).max() < 0.03


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), k=st.integers(1, 20))
def test_the_best_come_best_first(seed: int, k: int) -> None:
    logits = logits_of(seed, 3)
    greedy = sampling([(0.0, 1.0, 0.0, 0)] * 3, keys_of(seed, 3))
    _, _, ids, values = (np.array(array) for array in choose(logits, greedy, k))
    logprobs = log_softmax(logits)
    order = np.argsort(-logprobs, axis=1)[:, :k]
    assert ids.tolist() == order.tolist()
    assert np.abs(values - np.take_along_axis(logprobs, order, axis=1)).max() < 1e-5


def test_keys_differ_by_job_and_by_position_and_mix_takes_any_integer() -> None:
    jobs = np.array([mix(seed, salt) for seed in range(-3, 30) for salt in range(30)], np.uint64)
    keys = np.concatenate([row_keys(jobs, np.full(len(jobs), position)) for position in range(20)])
    assert len({tuple(key) for key in keys.tolist()}) == len(keys)
    assert 0 <= mix(-(1 << 70), 1 << 70) < 1 << 64
