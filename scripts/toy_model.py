"""A model whose K and V say what they are, and whose next token anybody can compute from the tokens before it.

K of a token holds (token, position, layer, KV head); V holds a small hash of the four first, then the same. Queries
are zero, so attention is the plain mean of V, and mean x length the exact sum of the hashes: a row read from a wrong
block, a wrong length or a missed copy changes that sum and with it the next token. `expected_kv` and `logprobs` are the
same in NumPy, without blocks, batches or attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

VOCAB = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
"""The least that the kernels of a GPU take."""
TOLERANCE = 0.02
"""How far float32 may take a log-probability from `logprobs` over some hundred tokens; wrong tokens take it farther."""
_PRIME = 17
_GAIN = 6.0
# Between two tokens there is a favourite: no two of the best tokens are equally likely.
_TILT = 0.25


class ToyLayer(nn.Module):
    """Attends with queries of zero; returns the weighted sum of the hashes up to each position."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, tokens: mx.array, positions: mx.array, mask: Any, cache: Any) -> mx.array:
        """tokens, positions: int32 `[B, L]`; returns float32 `[B, L, 1]`."""
        keys, values = self._keys_values(tokens, positions)
        keys, values = cache.update_and_fetch(keys, values)
        queries = mx.zeros((tokens.shape[0], HEADS, tokens.shape[1], HEAD_DIM))
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=1.0, mask=mask)
        # A weight for each query head, so that heads cannot change places unseen.
        weights = mx.arange(1, HEADS + 1).astype(mx.float32)[None, :, None]
        return (out[..., 0] * weights).sum(axis=1)[..., None] * (positions + 1)[..., None]

    def _keys_values(self, tokens: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        token, position = tokens[:, None], positions[:, None]
        head = mx.arange(KV_HEADS)[None, :, None]
        digest = (token * token + 3 * token * position + 5 * position + 11 * self.layer + 7 * head) % _PRIME
        parts = [mx.broadcast_to(part, digest.shape) for part in (token, position, mx.array(self.layer), head)]
        padding = [mx.zeros_like(digest)] * (HEAD_DIM - 5)
        keys = mx.stack([*parts, mx.zeros_like(digest), *padding], axis=-1)
        return keys.astype(mx.float32), mx.stack([digest, *parts, *padding], axis=-1).astype(mx.float32)


class ToyTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [ToyLayer(layer) for layer in range(LAYERS)]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        mask = create_attention_mask(tokens[..., None], cache[0])
        offset = cache[0].offset
        start = offset[:, None] if isinstance(offset, mx.array) else offset
        positions = mx.broadcast_to(start + mx.arange(tokens.shape[1])[None], tokens.shape)
        return sum(
            (layer(tokens, positions, mask, own) for layer, own in zip(self.layers, cache, strict=True)),
            start=mx.zeros((*tokens.shape, 1)),
        )


class ToyModel(nn.Module):
    """An mlx-lm style model without a weight; give `(ToyModel(), None)` to `Runtime.open`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ToyTrunk()

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        total = self.model(tokens, cache)
        angle = total - VOCAB * mx.floor(total / VOCAB) - mx.arange(VOCAB) + _TILT
        return _GAIN * mx.cos(angle * (2 * math.pi / VOCAB))


def _digest_table() -> npt.NDArray[np.int64]:
    """`[layers, vocab, prime, kv_heads]`: positions count modulo the prime."""
    layer, token, position, head = np.ogrid[:LAYERS, :VOCAB, :_PRIME, :KV_HEADS]
    table: npt.NDArray[np.int64] = (
        token * token + 3 * token * position + 5 * position + 11 * layer + 7 * head
    ) % _PRIME
    return table


# Flat, one row for each (token, position modulo the prime): the shadows are the larger half of a stress test's work.
_DIGESTS = _digest_table().reshape(LAYERS, VOCAB * _PRIME, KV_HEADS).astype(np.float32)
_WEIGHTS = np.arange(1, HEADS + 1).reshape(KV_HEADS, -1).sum(axis=1)
_SUMS = (_digest_table() @ _WEIGHTS).sum(axis=0).reshape(-1)
_POSITIONS = np.arange(1 << 14)
_PHASES = _POSITIONS % _PRIME
_HEADS = np.arange(KV_HEADS, dtype=np.float32)


def expected_kv(tokens: Sequence[int], layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """K and V that `Sequence.read_kv(layer)` must give, `[length, kv_heads, head_dim]`."""
    ids = np.array(tokens, dtype=np.int64)
    k = np.zeros((len(ids), KV_HEADS, HEAD_DIM), dtype=np.float32)
    k[..., 0] = ids[:, None]
    k[..., 1] = _POSITIONS[: len(ids), None]
    k[..., 2] = layer
    k[..., 3] = _HEADS
    v = np.zeros_like(k)
    v[..., 0] = _DIGESTS[layer].take(ids * _PRIME + _PHASES[: len(ids)], axis=0)
    v[..., 1:5] = k[..., :4]
    return k, v


def _table() -> npt.NDArray[np.float64]:
    """Row s: the log-probabilities after tokens whose hashes add up to s, modulo the vocabulary."""
    logits = _GAIN * np.cos((np.arange(VOCAB)[:, None] - np.arange(VOCAB)[None] + _TILT) * (2 * math.pi / VOCAB))
    table: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return table


_LOGPROBS = _table()
_RANKED = np.argsort(-_LOGPROBS, axis=-1)


def _row(tokens: Sequence[int]) -> int:
    index = np.array(tokens, dtype=np.int64) * _PRIME + _PHASES[: len(tokens)]
    return int(_SUMS.take(index).sum() % VOCAB)


def logprobs(tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-probabilities of the token after `tokens`, float64 `[vocab]`."""
    return _LOGPROBS[_row(tokens)]


def best(tokens: Sequence[int], k: int) -> list[int]:
    """The `k` most likely next tokens, best first."""
    ranked: list[int] = _RANKED[_row(tokens), :k].tolist()
    return ranked
