"""Every architecture of mlx-lm, tiny and random: through the whole runtime as mlx-lm itself answers, or refused.

Each model generates with mlx-lm's own loop and cache first. The runtime then answers the same prompts alone, in a
batch of five while a long prompt is prefilled in chunks, and from forks; every context outgrows the sliding window.

Random models have near-ties, where float rounding may decide. A token that differs is right when mlx-lm's own logits
after the same tokens put it within `ROUNDING` of their best; the tokens after it are then compared with what mlx-lm
makes of that prefix. `test_near_ties_are_rare` keeps that from hiding faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import LAYERS, NEEDS, VOCAB, WINDOW, is_model, names, tiny
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from pagefork import kernels
from pagefork.runtime import Runtime, SamplingParams, Sequence, UnsupportedModel
from pagefork.runtime.models import load

ROUNDING = 2e-4
COUNT = 8
LONG = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(37)]
PROMPTS = [LONG[:9], [7], LONG[11:14], LONG[20:31], LONG[3:8]]
REFUSED = {
    "latent": "deepseek_v3 glm4_moe_lite kimi_k25 kimi_vl mistral4",
    "keeps its state in ArraysCache": (
        "bailing_hybrid bailing_moe_linear bailing_moe_v3 gear granitemoehybrid jamba kimi_k3 kimi_linear lfm2 lfm2-vl "
        "lfm2_moe longcat_flash_ngram nemotron_h olmo_hybrid prism_hadamard_qwen35 qwen3_5 qwen3_5_moe qwen3_next "
        "recurrent_gemma"
    ),
    "keeps its state in CacheList": ("baichuan_m1 deepseek_v32 falcon_h1 glm_moe_dsa longcat_flash minimax_m3_vl"),
    "keeps its state in ChunkedKVCache": "llama4",
    "does not go through mlx-lm's scaled_dot_product_attention": "deepseek_v41 mamba mamba2 plamo2 rwkv7",
    "its logits change": "afm7",
    "other keys and values": "iquestloopcoder plamo",
    "uses the attention mask": "phi3small",
    "cache keeps only": "plamo3",
}
REASONS = {name: reason for reason, group in REFUSED.items() for name in group.split()}
SERVED = [name for name in names() if is_model(name) and name not in NEEDS and name not in REASONS]
near_ties: dict[str, int] = {}


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "asyncio")


@pytest.fixture(autouse=True, scope="module")
def without_compiled_functions() -> Iterator[None]:
    """MLX compiles mlx-lm's small element-wise functions with a C++ compiler on a CPU, seconds for each shape."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("name", SERVED)
async def test_the_runtime_answers_as_mlx_lm_does(name: str) -> None:
    await compare(name, tiny(name))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
async def test_so_it_does_on_trio(name: str) -> None:
    await compare(name, tiny(name))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_quantised_models_answer_as_mlx_lm_does(name: str) -> None:
    module = tiny(name)
    nn.quantize(module, group_size=32, bits=4)
    await compare(f"{name}, 4 bits", module)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["llama", "qwen2"])
async def test_plain_layers_answer_as_mlx_lm_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of up to four rows take their products as on CUDA, here by MLX's own operations."""
    rows: set[int] = set()
    original = kernels.linear

    def linear(x: mx.array, *args: Any, **options: Any) -> mx.array:
        rows.add(x.shape[0])
        return original(x, *args, **options)

    monkeypatch.setattr(kernels, "linear", linear)
    monkeypatch.setattr(kernels, "can_multiply", lambda case, rows, inputs, outputs: rows <= 4)
    await compare(f"{name}, plain", tiny(name))
    assert {1, 2} <= rows <= {1, 2, 3, 4}


def test_keys_that_are_attended_to_in_float32_are_kept_as_they_were_stored() -> None:
    module = tiny("stablelm")
    module.set_dtype(mx.bfloat16)
    model = load((module, None))
    model.restore()
    assert (model.dtype, model.recast) == (mx.bfloat16, (True,) * LAYERS)


@pytest.mark.anyio
@pytest.mark.parametrize("name", REASONS)
async def test_others_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=REASONS[name]):
        async with Runtime.open((tiny(name), None), blocks=8, block_size=4):
            pass


def test_near_ties_are_rare() -> None:
    assert sum(near_ties.values()) <= max(2, len(near_ties) // 20), near_ties


async def compare(name: str, module: nn.Module) -> None:
    """Alone, in a batch beside the chunks of a long prompt, and from forks: the tokens are mlx-lm's own."""
    assert depends_on_its_context(module), "the tiny model would answer the same whatever it attends to"
    own = [own_greedy(module, prompt) for prompt in [*PROMPTS, LONG]]
    near_ties[name] = 0
    answers: dict[int, list[int]] = {}
    options = SamplingParams(max_tokens=COUNT)
    async with Runtime.open((module, None), blocks=96, block_size=4, prefill_step_size=8) as rt:
        async with await rt.sequence(PROMPTS[0]) as alone:
            first = [step.token async for step in alone.generate(options)]

        async def answer(index: int, sequence: Sequence) -> None:
            async with sequence:
                answers[index] = [step.token async for step in sequence.generate(options)]

        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate([*PROMPTS, LONG]):
                tasks.start_soon(answer, index, await rt.sequence(prompt))
        async with await rt.sequence(PROMPTS[3]) as parent:
            head = [step.token async for step in parent.generate(SamplingParams(max_tokens=3))]
            kids = await parent.fork(2)
            async with anyio.create_task_group() as tasks:
                for index, kid in enumerate(kids):
                    tasks.start_soon(answer, 10 + index, kid)
    agree(name, module, PROMPTS[0], first, own[0])
    for index, prompt in enumerate([*PROMPTS, LONG]):
        agree(name, module, prompt, answers[index], own[index])
    for index in (10, 11):
        agree(name, module, PROMPTS[3], (head + answers[index])[:COUNT], own[3])
        assert len(answers[index]) == COUNT


def depends_on_its_context(module: nn.Module) -> bool:
    """Whether other tokens before the last one change the logits by far more than rounding."""
    other = [*[(token + 1) % VOCAB for token in PROMPTS[3][:-1]], PROMPTS[3][-1]]
    one, two = (module(mx.array([p]), cache=make_prompt_cache(module))[0, -1] for p in (PROMPTS[3], other))
    return bool(mx.abs(one - two).max() > 100 * ROUNDING * mx.abs(one).max())


def own_greedy(module: nn.Module, prompt: list[int]) -> list[int]:
    """mlx-lm's own greedy tokens. The context outgrows the window, and prefill is cut as the runtime cuts it."""
    tokens = generate_step(mx.array(prompt), module, max_tokens=COUNT, prefill_step_size=8)
    return [int(token) for token, _ in tokens]


def agree(name: str, module: nn.Module, prompt: list[int], got: list[int], own: list[int]) -> None:
    assert len(got) == len(own)
    if got == own:
        return
    at = next(i for i, pair in enumerate(zip(got, own, strict=True)) if pair[0] != pair[1])
    context = mx.array([[*prompt, *own[:at]]])
    logits = module(context, cache=make_prompt_cache(module))[0, -1].astype(mx.float32)
    gap = float(logits[own[at]] - logits[got[at]])
    assert gap <= ROUNDING * float(mx.abs(logits).max()), f"{got} is not mlx-lm's {own}, by a logit of {gap:.3g}"
    near_ties[name] += 1
    rest = [*prompt, *got[: at + 1]]
    left = generate_step(mx.array(rest), module, max_tokens=len(got) - at - 1, prefill_step_size=8)
    agree(name, module, rest, got[at + 1 :], [int(token) for token, _ in left])


def test_contexts_outgrow_the_window() -> None:
    assert all(len(prompt) + COUNT > WINDOW for prompt in PROMPTS)
