"""The sequences that one task of the stress test holds, each beside its shadow, and the checks of one by the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import toy_model
from stress_oracle import Oracle
from stress_report import Report

from pagefork.runtime import Generation, PageforkError, Runtime, SamplingParams, Sequence


@dataclass(eq=False)
class Held:
    """A sequence and its shadow: the plain list of tokens that it ought to hold."""

    seq: Sequence
    shadow: list[int]


class Family:
    """touched: those that the operation in progress is about. now: which operation that is, for messages."""

    def __init__(self, rt: Runtime, report: Report, oracle: Oracle, task: int) -> None:
        self.rt = rt
        self.report = report
        self.oracle = oracle
        self.held: list[Held] = []
        self.touched: list[Held] = []
        self.now = f"task {task}, not begun"

    def add(self, seq: Sequence, shadow: Iterable[int]) -> None:
        held = Held(seq, list(shadow))
        self.held.append(held)
        self.touched.append(held)
        self.report.sequences += 1

    def forget(self, held: Held) -> None:
        self.held.remove(held)
        if held in self.touched:
            self.touched.remove(held)

    async def drop(self, held: Held) -> None:
        self.forget(held)
        await held.seq.close()

    async def shorten(self, held: Held, length: int) -> None:
        with self.either(held, held.shadow[:length]):
            await held.seq.truncate(length)

    # What a sequence may have become

    @contextmanager
    def either(self, held: Held, after: list[int]) -> Iterator[None]:
        """The sequence becomes `after`, or raising stays as it was; cancelled, whichever of the two it says."""
        before = held.shadow
        try:
            yield
        except PageforkError:
            raise
        except BaseException:
            held.shadow = self.among(held.seq, [before, after])
            raise
        else:
            held.shadow = after

    def among(self, seq: Sequence, states: list[list[int]]) -> list[int]:
        """What the sequence holds, which should be one of `states`."""
        tokens = seq.tokens
        if tokens not in states:
            self.report.wrong(self.now, f"{seq!r} holds {tokens}, none of {states}")
        return tokens

    # Checks

    async def read(self, held: Held, generation: Generation, params: SamplingParams, stop: int, read: int = 0) -> int:
        """Take tokens until `stop` of them were read, each checked against what the model must say; returns how many.

        A token belongs to the sequence from the moment it was taken, whatever happens next.
        """
        while read < stop:
            step = await anext(generation, None)
            if step is None:
                self.wrong(held, f"the generation ended after {read} of {params.max_tokens} tokens")
                break
            expected, logprobs = self.oracle.best(held.shadow, 1), self.oracle.logprobs(held.shadow)
            held.shadow.append(step.token)
            read += 1
            finish = "stop" if step.token in params.stop_tokens else "length" if read == params.max_tokens else None
            if params.temperature == 0 and [step.token] != expected:
                self.wrong(held, f"generated {step.token} at {len(held.shadow) - 1}, not {expected}")
            elif logprobs is not None and not _close(step.logprob, logprobs[step.token]):
                self.wrong(held, f"log-probability {step.logprob} of {step.token}, not {logprobs[step.token]}")
            elif step.finish_reason != finish and not held.seq.closed:
                self.wrong(held, f"finish reason {step.finish_reason} of token {read}, not {finish}")
            if step.finish_reason is not None:
                break
        return read

    def check_top(self, held: Held, top: list[tuple[int, float]]) -> None:
        """What `topk` gave."""
        expected, logprobs = self.oracle.best(held.shadow, len(top)), self.oracle.logprobs(held.shadow)
        if [token for token, _ in top][: len(expected)] != expected:
            self.wrong(held, f"topk gave {top}, not {expected}")
        elif logprobs is not None and not all(_close(logprob, logprobs[token]) for token, logprob in top):
            self.wrong(held, f"topk gave {top}, not the log-probabilities {[logprobs[token] for token, _ in top]}")

    def check_tokens(self) -> None:
        for held in self.touched:
            if held.seq.tokens != held.shadow or len(held.seq) != len(held.shadow):
                self.wrong(held, f"it holds {held.seq.tokens}")
                held.shadow = held.seq.tokens

    async def check_kv(self, several: Iterable[Held], layers: Iterable[int]) -> None:
        """Every row of K and V that the sequences claim to have computed and not to have given back."""
        for held, layer in itertools.product(list(several), layers):
            found = await held.seq.read_kv(layer)
            rows = len(found[0])
            if rows > len(held.shadow):
                self.wrong(held, f"K and V of {rows} tokens in layer {layer}")
                continue
            gone = self._given_back(held, layer, found[0])
            self.report.kv_rows += rows - gone
            self.report.rows_given_back += gone
            for name, got, expected in zip("KV", found, self.oracle.kv(held.shadow[:rows], layer), strict=True):
                got, expected = got[gone:], expected[gone:]
                if not np.array_equal(got, expected):
                    row = int(np.flatnonzero((got != expected).any(axis=(1, 2)))[0])
                    self.wrong(
                        held, f"{name} of layer {layer} at {row} is {got[row].tolist()}, not {expected[row].tolist()}"
                    )

    def _given_back(self, held: Held, layer: int, k: npt.NDArray[np.float32]) -> int:
        """How many of the first rows are no more; none that the next query sees may be among them."""
        here = np.flatnonzero(~np.isnan(k).all(axis=(1, 2)))
        gone = int(here[0]) if len(here) else len(k)
        window = self.oracle.kept[layer]
        if gone and (window is None or gone > min(len(k), len(held.shadow) - 1) - window + 1):
            self.wrong(held, f"the first {gone} of {len(k)} rows of K were given back")
            return 0
        return gone

    def wrong(self, held: Held, what: str) -> None:
        self.report.wrong(self.now, f"{held.seq!r}: {what}; its tokens should be {held.shadow}")


def _close(logprob: float, expected: float) -> bool:
    return math.isclose(logprob, expected, abs_tol=toy_model.TOLERANCE)
