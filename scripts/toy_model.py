"""A model whose K and V say what they are, and whose next token anybody can compute from the tokens before it.

K of a token holds (token, position, layer, KV head); V holds a small hash first of these and of what the layer below
gave, then the same. Queries are zero, so attention is the plain mean of V, and mean x length the exact sum of the
hashes: a row read from a wrong block, a wrong length or a missed copy changes that sum, with it K and V of the layer
above, and the next token. `expected_kv` and `logprobs` are the same in NumPy, without blocks, batches or attention.

With windows each layer sees the last positions only, so K and V depend on how far back the computation began.
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

Windows = tuple[int | None, int | None]
"""How many positions each layer's queries see, their own included; None for all."""

VOCAB = 64
LAYERS = 2
ALL: Windows = (None, None)
NARROW: Windows = (6, 9)
"""Windows that most sequences of a stress test outgrow."""
MIXED: Windows = (9, None)
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
    """Attends with queries of zero; returns the weighted sum of the hashes that each position sees."""

    def __init__(self, layer: int, window: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.window = window

    def __call__(self, tokens: mx.array, positions: mx.array, below: mx.array, cache: Any) -> mx.array:
        """tokens, positions: int32 `[B, L]`; below: sums of the layer below; both it and these: float32 `[B, L, 1]`."""
        mask = create_attention_mask(tokens[..., None], cache, window_size=self.window)
        keys, values = cache.update_and_fetch(*self._keys_values(tokens, positions, below))
        queries = mx.zeros((tokens.shape[0], HEADS, tokens.shape[1], HEAD_DIM))
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=1.0, mask=mask)
        # A weight for each query head, so that heads cannot change places unseen.
        weights = mx.arange(1, HEADS + 1).astype(mx.float32)[None, :, None]
        seen = positions + 1 if self.window is None else mx.minimum(positions + 1, self.window)
        return (out[..., 0] * weights).sum(axis=1)[..., None] * seen[..., None]

    def _keys_values(self, tokens: mx.array, positions: mx.array, below: mx.array) -> tuple[mx.array, mx.array]:
        token, position = tokens[:, None], positions[:, None]
        head = mx.arange(KV_HEADS)[None, :, None]
        digest = token * token + 3 * token * position + 5 * position + 11 * self.layer + 7 * head
        digest = (digest + below[..., 0].round().astype(mx.int32)[:, None]) % _PRIME
        parts = [mx.broadcast_to(part, digest.shape) for part in (token, position, mx.array(self.layer), head)]
        padding = [mx.zeros_like(digest)] * (HEAD_DIM - 5)
        keys = mx.stack([*parts, mx.zeros_like(digest), *padding], axis=-1)
        return keys.astype(mx.float32), mx.stack([digest, *parts, *padding], axis=-1).astype(mx.float32)


class ToyTrunk(nn.Module):
    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.layers = [ToyLayer(layer, window) for layer, window in enumerate(windows)]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        offset = cache[0].offset
        start = offset[:, None] if isinstance(offset, mx.array) else offset
        positions = mx.broadcast_to(start + mx.arange(tokens.shape[1])[None], tokens.shape)
        total = below = mx.zeros((*tokens.shape, 1))
        for layer, own in zip(self.layers, cache, strict=True):
            below = layer(tokens, positions, below, own)
            total = total + below
        return total


class ToyModel(nn.Module):
    """An mlx-lm style model without a weight; give `(ToyModel(), None)` to `Runtime.open`."""

    def __init__(self, windows: Windows = ALL) -> None:
        super().__init__()
        self.model = ToyTrunk(windows)

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        total = self.model(tokens, cache)
        angle = total - VOCAB * mx.floor(total / VOCAB) - mx.arange(VOCAB) + _TILT
        return _GAIN * mx.cos(angle * (2 * math.pi / VOCAB))


def _digest_table() -> npt.NDArray[np.int64]:
    """`[layers, vocab, prime, kv_heads]`, without what the layer below gave: positions count modulo the prime."""
    layer, token, position, head = np.ogrid[:LAYERS, :VOCAB, :_PRIME, :KV_HEADS]
    table: npt.NDArray[np.int64] = (
        token * token + 3 * token * position + 5 * position + 11 * layer + 7 * head
    ) % _PRIME
    return table


# Flat, one row for each (token, position modulo the prime): the shadows are the larger half of a stress test's work.
_DIGESTS = _digest_table().reshape(LAYERS, VOCAB * _PRIME, KV_HEADS)
_WEIGHTS = np.arange(1, HEADS + 1).reshape(KV_HEADS, -1).sum(axis=1)
_POSITIONS = np.arange(1 << 14)
_PHASES = _POSITIONS % _PRIME
_HEADS = np.arange(KV_HEADS, dtype=np.float32)


def _digests(tokens: Sequence[int], windows: Windows) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Each layer's `[length, kv_heads]`, and all that the last position sees of them, weighted."""
    rows = np.array(tokens, dtype=np.int64) * _PRIME + _PHASES[: len(tokens)]
    digests, total, below = [], 0, np.zeros(len(rows), dtype=np.int64)
    for layer, window in enumerate(windows):
        digests.append((_DIGESTS[layer].take(rows, axis=0) + below[:, None]) % _PRIME)
        below = (digests[-1] @ _WEIGHTS).cumsum()
        if window is not None:
            below[window:] -= below[:-window].copy()
        total += int(below[-1]) if len(below) else 0
    return digests, total


def expected_kv(
    tokens: Sequence[int], layer: int, windows: Windows = ALL
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """K and V that `Sequence.read_kv(layer)` must give, `[length, kv_heads, head_dim]`."""
    k = np.zeros((len(tokens), KV_HEADS, HEAD_DIM), dtype=np.float32)
    k[..., 0] = np.array(tokens, dtype=np.int64)[:, None]
    k[..., 1] = _POSITIONS[: len(tokens), None]
    k[..., 2] = layer
    k[..., 3] = _HEADS
    v = np.zeros_like(k)
    v[..., 0] = _digests(tokens, windows)[0][layer]
    v[..., 1:5] = k[..., :4]
    return k, v


def _table() -> npt.NDArray[np.float64]:
    """Row s: the log-probabilities after tokens whose hashes add up to s, modulo the vocabulary."""
    logits = _GAIN * np.cos((np.arange(VOCAB)[:, None] - np.arange(VOCAB)[None] + _TILT) * (2 * math.pi / VOCAB))
    table: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return table


_LOGPROBS = _table()
_RANKED = np.argsort(-_LOGPROBS, axis=-1)


def logprobs(tokens: Sequence[int], windows: Windows = ALL) -> npt.NDArray[np.float64]:
    """Log-probabilities of the token after `tokens`, float64 `[vocab]`."""
    return _LOGPROBS[_digests(tokens, windows)[1] % VOCAB]


def best(tokens: Sequence[int], k: int, windows: Windows = ALL) -> list[int]:
    """The `k` most likely next tokens, best first."""
    ranked: list[int] = _RANKED[_digests(tokens, windows)[1] % VOCAB, :k].tolist()
    return ranked
