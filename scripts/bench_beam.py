"""Beam search on SmolLM2 beside transformers' `generate(num_beams=)`, same weights in float32, same machine.

As a program it is the peer: it needs torch, transformers, accelerate and gguf, which may be in an environment of their
own: `bench.py beam --peer PYTHON`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ORACLES = Path(__file__).parents[1] / "tests" / "oracles" / "hf_beam_smollm2.json"
PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is


async def ours(width: int, tokens: int, repeats: int) -> list[float]:
    """Seconds of each search."""
    from pagefork.runtime import BeamSearchParams, Runtime

    async with Runtime.open() as rt:
        times = []
        for count in (4, *[tokens] * repeats):
            begin = time.perf_counter()
            await rt.beam_search(PROMPT, BeamSearchParams(width=width, max_tokens=count))
            times.append(time.perf_counter() - begin)
        return times[1:]


async def sharing(widths: list[int], tokens: int, most: int) -> list[dict[str, Any]]:
    """Blocks that beams share instead of having them each, over the steps of a search on each oracle prompt."""
    from pagefork.runtime import BeamSearchParams, Runtime

    rows = []
    prompts = [case["prompt"] for case in json.loads(ORACLES.read_text())][:most]
    async with Runtime.open() as rt:
        for width in widths:
            for prompt in prompts:
                length, held, private = len(rt.tokenizer.encode(prompt)), 0, 0  # type: ignore[union-attr]

                def count(step: int, running: list[Any], finished: list[Any], length: int = length) -> None:
                    nonlocal held, private
                    held += rt.stats().blocks_referenced
                    private += len(running) * -(-(length + step) // 16)

                await rt.beam_search(prompt, BeamSearchParams(width=width, max_tokens=tokens), on_step=count)
                rows.append({"width": width, "prompt": prompt, "saved": round(1 - held / private, 3)})
    return rows


def theirs(width: int, tokens: int, repeats: int, path: str) -> list[float]:
    """Seconds of each search by transformers on the weights at `path`, a .gguf file."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, _, name = path.rpartition("/")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = {"num_beams": width, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    times = []
    with torch.no_grad():
        for count in (4, *[tokens] * repeats):
            begin = time.perf_counter()
            model.generate(ids, max_new_tokens=count, pad_token_id=2, **options)
            times.append(time.perf_counter() - begin)
    return times[1:]


def add_command(commands: Any) -> None:
    parser = commands.add_parser("sharing", help="blocks that beam search saves, averaged over its steps")
    parser.add_argument("--width", type=int, action="append", help="repeat for several; 4 and 6 if none is given")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=5, help="how many of the oracle prompts")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run_sharing)
    parser = commands.add_parser("beam", help="beam search on SmolLM2 beside transformers")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--peer", metavar="PYTHON", help="an interpreter that has torch, transformers, accelerate, gguf"
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: Any) -> None:
    import anyio

    from pagefork.runtime.fetch import smollm2

    shape = (arguments.width, arguments.tokens, arguments.repeats)
    figures: dict[str, Any] = {"width": arguments.width, "tokens": arguments.tokens}
    figures["seconds"] = round(min(anyio.run(ours, *shape)), 3)
    if arguments.peer:
        command = [arguments.peer, __file__, *map(str, shape), str(smollm2())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures["transformers_seconds"] = round(min(json.loads(done.stdout.splitlines()[-1])), 3)
        figures["ratio"] = round(figures["transformers_seconds"] / figures["seconds"], 2)
    print(json.dumps(figures) if arguments.json else "  ".join(f"{name} {value}" for name, value in figures.items()))


def run_sharing(arguments: Any) -> None:
    import anyio

    rows = anyio.run(sharing, arguments.width or [4, 6], arguments.tokens, arguments.prompts)
    mean = round(sum(row["saved"] for row in rows) / len(rows), 3)
    if arguments.json:
        print(json.dumps({"mean": mean, "rows": rows}))
        return
    for row in rows:
        print(f"width {row['width']}  saved {row['saved']:.1%}  {row['prompt']!r}")
    print(f"mean {mean:.1%}")


if __name__ == "__main__":
    print(json.dumps(theirs(*map(int, sys.argv[1:4]), sys.argv[4])))
