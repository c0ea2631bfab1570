"""mlx-lm's BatchGenerator on random weights. As a program it prints its tokens per second in an environment that
pagefork has not touched, since pagefork sets up MLX for large pools, and that speeds the peer up as well."""

from __future__ import annotations

import argparse
import gc
import json
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama

CHUNK = 2048  # prompt tokens a step

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rope_theta": 10000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    # Three of four layers with a window, as in Cohere's Command R7B and OLMo 3.
    "llama-8b-sliding": LLAMA_8B
    | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "sliding_window": 1024},
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
    "tiny": TINY,
    "tiny-sliding": TINY | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
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
    times: list[float] = []
    try:
        generator.insert(texts)
        while len(times) < batch * tokens:
            _, responses = generator.next()
            times += [time.perf_counter()] * len(responses)
        return rate(times, batch)
    finally:
        generator.close()
        del generator
        gc.collect()
        mx.clear_cache()


def rate(times: list[float], batch: int) -> float:
    """Tokens per second from the end of a step in the first quarter to that of the last."""
    first = len(times) // batch // 4 * batch - 1
    return (len(times) - 1 - first) / (times[-1] - times[first])


def dtype() -> mx.Dtype:
    return mx.bfloat16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--case", action="append", required=True, metavar="BATCH,CONTEXT")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    model = random_model(arguments.shape, dtype())
    rates = {}
    for case in arguments.case:
        batch, context = map(int, case.split(","))
        texts = prompts(batch, context, SHAPES[arguments.shape]["vocab_size"])
        rates[case] = theirs(model, texts, arguments.tokens)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
