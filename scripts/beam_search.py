"""Beam search on a real model: watch the beams grow and be pruned, and see what sharing their past saved.

Beams are sequences that fork. Those with a common past share its KV blocks; two that write to one block part with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import anyio
from beam_views import Frame, Result, View, plain, pretty

from pagefork.runtime import Beam, BeamSearchParams, PageforkError, Past, Runtime

PROMPT = (
    "Once upon a time, in a small village by the sea, there lived a lighthouse keeper who collected lost letters. "
    "One stormy night she found"
)
BLOCK_SIZE = 16


class Account:
    """Turns the steps of a search into frames, and keeps count of what private caches would have cost."""

    def __init__(self, rt: Runtime, prompt_tokens: int, params: BeamSearchParams, view: View) -> None:
        self._rt = rt
        self._prompt = prompt_tokens
        self._params = params
        self._view = view
        self._running: list[Past] = []
        self._start = time.perf_counter()
        self.tokens = 0
        self.unshared = 0
        self.unshared_bytes = 0

    def step(self, step: int, running: list[Past], finished: list[Past]) -> None:
        """What `Runtime.beam_search` calls after each step.

        The pool still holds the beams that went into the step, so those are what is counted: with caches of their own
        each of them would need the blocks of the prompt and its `step - 1` tokens.
        """
        stats = self._rt.stats()
        live, length = max(len(self._running), 1), self._prompt + step - 1
        private = live * -(-length // BLOCK_SIZE)
        self.unshared = max(self.unshared, private)
        self.tokens += live
        parents = {id(past.parent) for past in (*running, *finished)}
        forks = len(running) - len({id(past.parent) for past in running})
        self.unshared_bytes += forks * length * stats.block_bytes // BLOCK_SIZE
        frame = Frame(
            step=step,
            steps=self._params.max_tokens,
            running=running,
            finished=finished,
            pruned=[past for past in self._running if id(past) not in parents],
            blocks=stats.blocks_referenced,
            private=private,
            copied_bytes=stats.copied_bytes,
            tokens_per_s=self.tokens / self.seconds,
        )
        self._running = running
        self._view.step(frame)

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self._start, 1e-9)


async def search(options: argparse.Namespace, view: View) -> Result:
    params = BeamSearchParams(width=options.width, max_tokens=options.max_tokens, length_penalty=options.length_penalty)
    params.validate()
    async with Runtime.open(
        options.model, blocks=pool_size(options), block_size=BLOCK_SIZE, progress=view.loading
    ) as rt:
        if rt.tokenizer is None:
            raise PageforkError(f"{options.model} has no tokenizer")
        prompt = rt.tokenizer.encode(options.prompt)
        view.begin(options.model, options.prompt, params, rt.tokenizer.decode)
        account = Account(rt, len(prompt), params, view)
        beams = await rt.beam_search(prompt, params, on_step=account.step)
        seconds, stats = account.seconds, rt.stats()
        return Result(
            beams=beams,
            tokens=account.tokens,
            seconds=seconds,
            peak=stats.blocks_peak,
            unshared=account.unshared,
            copied_bytes=stats.copied_bytes,
            unshared_bytes=account.unshared_bytes,
        )


def pool_size(options: argparse.Namespace) -> int:
    """Blocks that are enough even if no beam shared anything and each forked: a token takes at least a byte."""
    length = len(options.prompt.encode()) + options.max_tokens + 1
    return 2 * options.width * -(-length // BLOCK_SIZE) + 1


def as_json(options: argparse.Namespace, result: Result) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": options.prompt,
        "width": options.width,
        "beams": [_beam(beam) for beam in result.beams],
        "tokens_per_s": round(result.tokens_per_s, 2),
        "seconds": round(result.seconds, 3),
        "blocks": {"peak": result.peak, "unshared": result.unshared, "copied_bytes": result.copied_bytes},
    }


def _beam(beam: Beam) -> dict[str, Any]:
    return {
        "text": beam.text,
        "tokens": beam.tokens,
        "score": beam.score,
        "logprob": beam.logprob,
        "finished": beam.finished,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name, folder, repo id or .gguf file (smollm2-135m)")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--width", type=int, default=4, help="how many beams (4)")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each beam (40)")
    parser.add_argument("--length-penalty", type=float, default=1.0, help="score = logprob / length ** this (1.0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


def main() -> int:
    options = parse()
    view = plain(sys.stderr) if options.json else pretty() if sys.stdout.isatty() else plain(sys.stdout)
    try:
        with view:
            result = anyio.run(search, options, view)
    except PageforkError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(as_json(options, result)))
    else:
        view.end(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
