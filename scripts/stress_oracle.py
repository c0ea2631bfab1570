"""What a model must say in the stress test: the toy's arithmetic, or what a real model said when it was alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import toy_model
from schedule import HEADS, Op

from pagefork.runtime import Runtime, SamplingParams


class Oracle(Protocol):
    """shortest, longest: how many tokens a sequence may have. layers: those whose K and V can be told, maybe none.
    kept: of how many positions at the end each of those keeps K and V at least; None for all.

    demand: tokens that one task's sequences would hold at peak in a pool without end, shared ones counted once;
    measured.
    """

    vocab: int
    layers: int
    kept: toy_model.Windows
    shortest: int
    longest: int
    demand: float

    def possible(self, kind: str) -> str:
        """What is done instead of an operation whose outcome could not be told."""

    def prompt(self, op: Op) -> list[int]:
        """What a sequence may begin with."""

    def more(self, tokens: Sequence[int], op: Op) -> list[int]:
        """What may be appended."""

    def best(self, tokens: Sequence[int], k: int) -> list[int]:
        """The most likely next tokens, best first: up to k of them."""

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64] | None:
        """Those of every next token, where they are known."""

    def kv(self, tokens: Sequence[int], layer: int) -> Any: ...


class ToyOracle(Oracle):
    """Any tokens will do: `toy_model` says what must come of them."""

    vocab = toy_model.VOCAB
    layers = toy_model.LAYERS
    windows: toy_model.Windows = toy_model.ALL
    kept: toy_model.Windows = toy_model.ALL
    shortest = 0
    longest = 64
    demand = 28.0

    def possible(self, kind: str) -> str:
        return kind

    def prompt(self, op: Op) -> list[int]:
        return list(op.tokens)

    def more(self, tokens: Sequence[int], op: Op) -> list[int]:
        return list(op.tokens)

    def best(self, tokens: Sequence[int], k: int) -> list[int]:
        return toy_model.best(tokens, k, self.windows)

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64] | None:
        return toy_model.logprobs(tokens, self.windows)

    def kv(self, tokens: Sequence[int], layer: int) -> Any:
        return toy_model.expected_kv(tokens, layer, self.windows)


class NarrowOracle(ToyOracle):
    """The toy with a window in each layer, which share one table; sequences may be longer than what is held of them."""

    windows = toy_model.NARROW
    kept = (9, 9)
    longest = 96
    demand = 20.0


class MixedOracle(ToyOracle):
    """The toy with a window in its first layer alone: each layer has a table of its own."""

    windows = toy_model.MIXED
    kept = windows
    longest = 96
    demand = 26.0


# Two appends in either order, and sampled tokens, would leave the known track.
_KNOWN = {"race": "append", "sample": "generate"}


class LoneOracle(Oracle):
    """Every sequence is a prompt and what the model itself, alone, adds to it; so all that may follow is known."""

    PROMPTS = 6
    PROMPT = 24
    ANSWER = 24
    layers = 0
    kept = toy_model.ALL
    shortest = PROMPT
    longest = PROMPT + ANSWER
    demand = 32.0

    def __init__(self, vocab: int, tracks: list[list[int]]) -> None:
        self.vocab = vocab
        self._tracks = tracks
        self._by_prompt = {tuple(track[: self.PROMPT]): track for track in tracks}

    @classmethod
    async def listen(cls, rt: Runtime, seed: int, prefix: bool) -> LoneOracle:
        """Ask the model, one prompt at a time."""
        draw = random.Random(f"{seed}/prompts")
        vocab = rt._house.facts.vocab_size
        heads = [[draw.randrange(vocab) for _ in range(cls.PROMPT * 3 // 4)] for _ in range(HEADS)]
        tracks = []
        for _ in range(cls.PROMPTS):
            head = draw.choice(heads) if prefix else []
            prompt = head + [draw.randrange(vocab) for _ in range(cls.PROMPT - len(head))]
            async with await rt.sequence(prompt) as seq:
                async for _step in seq.generate(SamplingParams(max_tokens=cls.ANSWER, ignore_eos=True)):
                    pass
                tracks.append(seq.tokens)
        return cls(vocab, tracks)

    def possible(self, kind: str) -> str:
        return _KNOWN.get(kind, kind)

    def prompt(self, op: Op) -> list[int]:
        track = self._tracks[op.seed % len(self._tracks)]
        return track[: self.PROMPT + int(op.fraction * op.count)]

    def more(self, tokens: Sequence[int], op: Op) -> list[int]:
        return self._track(tokens)[len(tokens) : len(tokens) + len(op.tokens)]

    def best(self, tokens: Sequence[int], k: int) -> list[int]:
        return self._track(tokens)[len(tokens) : len(tokens) + 1]

    def logprobs(self, tokens: Sequence[int]) -> npt.NDArray[np.float64] | None:
        return None

    def kv(self, tokens: Sequence[int], layer: int) -> Any:
        raise NotImplementedError("a real model's K and V are not told")

    def _track(self, tokens: Sequence[int]) -> list[int]:
        return self._by_prompt[tuple(tokens[: self.PROMPT])]
