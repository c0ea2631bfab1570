"""Decoding through the public API, one task a sequence, beside mlx-lm's BatchGenerator and the memory bound."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import anyio
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama

from pagefork.runtime import Runtime, SamplingParams, Sequence

CHUNK = 2048  # prompt tokens a step

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "rope_theta": 10000.0,
    },
}


def random_model(shape: str, dtype: mx.Dtype) -> nn.Module:
    """A llama of that shape with small random weights; its layers are the real ones, its words are not."""
    args = llama.ModelArgs(
        model_type="llama",
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        **{"tie_word_embeddings": False} | SHAPES[shape],
    )
    model = llama.Model(args)
    weights = []
    for index, (name, array) in enumerate(tree_flatten(model.parameters())):
        if "norm" in name:
            weights.append((name, mx.ones(array.shape, dtype)))
        else:
            noise = mx.random.normal(array.shape, dtype=dtype, key=mx.random.key(index))
            weights.append((name, noise * mx.array(0.02, dtype)))
        mx.eval(weights[-1][1])
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def prompts(batch: int, context: int, vocab: int) -> list[list[int]]:
    """Different prompts of `context` tokens: nothing is shared."""
    table = mx.random.randint(0, vocab, (batch, context), key=mx.random.key(7))
    rows: list[list[int]] = table.tolist()  # type: ignore[assignment]
    return rows


async def ours(model: nn.Module, texts: list[list[int]], tokens: int) -> float:
    """Tokens per second of sequences that all decode, each read by its own task."""
    batch, context = len(texts), len(texts[0])
    blocks = batch * (-(-(context + tokens) // 16) + 2)
    times: list[float] = []

    async def read(sequence: Sequence, count: int) -> None:
        async for _ in sequence.generate(SamplingParams(max_tokens=count, ignore_eos=True)):
            times.append(time.perf_counter())

    async with Runtime.open((model, None), blocks=blocks, max_batch=batch, prefill_step_size=CHUNK) as rt:
        sequences = [await rt.sequence(text) for text in texts]
        for count in (1, tokens):
            times.clear()
            async with anyio.create_task_group() as group:
                for sequence in sequences:
                    group.start_soon(read, sequence, count)
    return rate(times, batch)


def theirs(model: nn.Module, texts: list[list[int]], tokens: int) -> float:
    """Tokens per second of mlx-lm's BatchGenerator, its prompts computed before."""
    batch = len(texts)
    generator = BatchGenerator(
        model,
        max_tokens=tokens + 2,
        completion_batch_size=batch,
        prefill_batch_size=batch,
        prefill_step_size=max(CHUNK // batch, 64),
    )
    generator.insert(texts)
    times: list[float] = []
    while len(times) < batch * tokens:
        _, responses = generator.next()
        times += [time.perf_counter()] * len(responses)
    generator.close()
    return rate(times, batch)


def rate(times: list[float], batch: int) -> float:
    """Tokens per second from the end of a step in the first quarter to that of the last."""
    first = len(times) // batch // 4 * batch - 1
    return (len(times) - 1 - first) / (times[-1] - times[first])


def bound(model: nn.Module, batch: int, context: int, bandwidth: float) -> float:
    """Tokens per second if a step only read weights, K and V, once, at `bandwidth` bytes per second."""
    weights = sum(array.nbytes for name, array in tree_flatten(model.parameters()) if "embed_tokens" not in name)
    args = model.args
    head_dim = args.head_dim or args.hidden_size // args.num_attention_heads
    per_token = 2 * args.num_hidden_layers * args.num_key_value_heads * head_dim * mx.bfloat16.size
    return batch * bandwidth / (weights + batch * context * per_token)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy, the best of several."""
    size = 1 << (30 if mx.default_device().type == mx.DeviceType.gpu else 24)
    source = mx.random.normal((size // 2,), dtype=mx.bfloat16)
    mx.eval(source)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        mx.eval(mx.where(mx.array(True), source, source))
        best = max(best, 2 * source.nbytes / (time.perf_counter() - begin))
    return best


def add_command(commands: Any) -> None:
    parser = commands.add_parser("decode", help=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--random", action="store_true", help="random weights; the only kind there is for a shape")
    parser.add_argument("--case", action="append", metavar="BATCH,CONTEXT", help="repeat for several")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--peer", choices=("yes", "no"), default="yes", help="also time mlx-lm's BatchGenerator")
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: Any) -> None:
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    model = random_model(arguments.shape, mx.bfloat16 if on_gpu else mx.float32)
    bandwidth = copy_bandwidth()
    rows = []
    for case in arguments.case or ["1,1024", "32,1024", "32,8192", "128,1024"]:
        batch, context = map(int, case.split(","))
        texts = prompts(batch, context, SHAPES[arguments.shape]["vocab_size"])
        row = {"batch": batch, "context": context, "bound": bound(model, batch, context, bandwidth)}
        row["tokens_per_s"] = anyio.run(ours, model, texts, arguments.tokens, backend=arguments.backend)
        row["step_ms"] = batch / row["tokens_per_s"] * 1e3
        gc.collect()
        mx.clear_cache()
        if arguments.peer == "yes":
            row["mlx_lm_tokens_per_s"] = theirs(model, texts, arguments.tokens)
            row["ratio"] = row["tokens_per_s"] / row["mlx_lm_tokens_per_s"]
            gc.collect()
            mx.clear_cache()
        rows.append({name: round(value, 2) for name, value in row.items()})
        if not arguments.json:
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.json:
        print(json.dumps({"shape": arguments.shape, "copy_tb_per_s": round(bandwidth / 1e12, 3), "rows": rows}))
