"""Write docs/models.md: which architectures of the installed mlx-lm are served, and why the others are refused.

    python scripts/models.py            write it
    python scripts/models.py --check    exit with 1 where it is not what would be written

Each architecture is built tiny (architectures.py), with random weights, and loaded on the CPU the way any model is.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from architectures import NEEDS, is_model, names, tiny

from pagefork.runtime.errors import UnsupportedModel
from pagefork.runtime.layers import LayerSpec, grouped_layers
from pagefork.runtime.models import load

PAGE = Path(__file__).parent.parent / "docs" / "models.md"

INTRO = """\
# Models

What the architectures of mlx-lm {version} come to when they are loaded. Written by `python scripts/models.py`, which
builds each one tiny, with random weights, and loads it; `--check` compares. A model outside this list is treated the
same way at load: served when its attention can be routed and its logits stay what they were, else refused with
`UnsupportedModel` and the reason.

{served} served, {refused} refused, {untried} that mlx-lm itself does not run on every machine.

**What is read from the model.** Heads, head dim, scale, window, sinks and caps of each layer are read from what it
passes to attention while it runs, never from its configuration. Layers that share keys and values (Gemma 3n, Gemma 4)
have one set of blocks. Values narrower than keys are kept padded with zeros. At load the logits of short prompts, in
ragged steps and far into the context, are compared with the model's own.

**Sliding windows.** A layer with a window attends to the last `window` positions: the attention kernel skips what lies
before them, and mlx-lm's answers do not change. Blocks that fell out of the widest window are given back while the
sequence goes on. Where every layer has a window it may be longer than the pool. Where some see all positions, as in
Gemma 3 and gpt-oss, the two kinds have block tables of their own in one pool, and only the others' blocks go back
(docs/engine.md, "Groups of layers"). "All blocks kept" means that they cannot share a pool, being of different shapes.
Mistral 7B v0.1, Phi-3 and StarCoder2 keep every block as well: mlx-lm does not apply their windows.

**What is refused.** Multi-head latent attention caches compressed states, but where mlx-lm expands them to keys and
values before it caches (DeepSeek V2, MiniCPM3, Youtu); state-space, linear-attention and convolution layers keep a
state that cannot be cut into blocks; chunked, block-sparse and indexed attention choose positions in ways that a block
table and a window do not say.

| architecture | | |
|---|---|---|
"""


class Verdict(NamedTuple):
    name: str
    status: str
    """served, refused, needs or unknown"""
    note: str


def judge(name: str) -> Verdict:
    """Build the architecture and load it."""
    if name in NEEDS:
        return Verdict(name, "needs", f"mlx-lm's own code needs {NEEDS[name]}")
    try:
        module = tiny(name)
        module(mx.array([[1, 2, 3]]))
    except Exception as error:
        return Verdict(name, "unknown", f"the tiny configuration does not run: {type(error).__name__}: {error}")
    try:
        model = load((module, None))
    except UnsupportedModel as error:
        return Verdict(name, "refused", reason(error))
    model.restore()
    return Verdict(name, "served", described(model.layers))


def reason(error: UnsupportedModel) -> str:
    """Why, without the sentence that all refusals share and without figures that depend on the machine."""
    text = str(error).partition(": ")[2].partition(". Use a decoder-only")[0]
    return re.sub(r" \(by [^)]*\)", "", text)


def described(layers: tuple[LayerSpec, ...]) -> str:
    windows = {layer.window is not None for layer in layers}
    attention = {(False,): "full attention", (True,): "sliding windows", (False, True): "full and sliding windows"}
    parts = [attention[tuple(sorted(windows))]]
    if any(layer.sinks for layer in layers):
        parts.append("sinks")
    if any(layer.softcap is not None for layer in layers):
        parts.append("capped scores")
    if len({(layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
        parts.append("layers of different shapes")
    if len(windows) > 1 and len(grouped_layers(layers).windows) == 1:
        parts.append("all blocks kept")
    return ", ".join(parts)


def verdicts() -> list[Verdict]:
    """Of every architecture of the installed mlx-lm. Changes MLX's default device."""
    mx.set_default_device(mx.cpu)
    # Compiling the small element-wise functions of a hundred architectures takes longer than all the rest.
    mx.disable_compile()
    return [judge(name) for name in names() if is_model(name)]


def page(judged: list[Verdict]) -> str:
    counts = {status: sum(verdict.status == status for verdict in judged) for status in ("served", "refused")}
    intro = INTRO.format(version=version("mlx-lm"), untried=len(judged) - sum(counts.values()), **counts)
    words = {"needs": "not run"}
    rows = [f"| {v.name} | {words.get(v.status, v.status)} | {v.note} |\n" for v in judged]
    helpers = [f"`{name}`" for name in names() if not is_model(name)]
    return f"{intro}{''.join(rows)}\nModules of `mlx_lm.models` that are no architectures: {', '.join(helpers)}.\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/models.md instead of writing it")
    options = parser.parse_args(arguments)
    judged = verdicts()
    written = page(judged)
    for verdict in judged:
        if verdict.status == "unknown":
            print(f"{verdict.name}: {verdict.note}; give it a configuration in scripts/architectures.py")
    if not options.check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(written)
        print(f"{PAGE.relative_to(PAGE.parent.parent)}: {len(judged)} architectures")
    elif (kept := PAGE.read_text() if PAGE.exists() else "") != written:
        lines = difflib.unified_diff(kept.splitlines(), written.splitlines(), "docs/models.md", "now", lineterm="", n=0)
        print("\n".join(lines), "\nrun python scripts/models.py", sep="\n")
        return 1
    return int(any(verdict.status == "unknown" for verdict in judged))


if __name__ == "__main__":
    sys.exit(main())
