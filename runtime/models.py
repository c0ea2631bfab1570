"""Loads a model, finds out how its layers attend, and runs it with attention of the caller's choice.

Nothing but this file and its parts (`joint`, `layers`, `plain`, `rewrites`, `routing`, `selfcheck`) knows mlx-lm. What
a layer looks like (heads, dims, scale, window, sinks) is read from what it passes to the attention call while the model
runs lazily, never from a configuration. A model whose attention cannot be routed, or whose logits come out different
when it is, is refused with `UnsupportedModel`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import dequantize_model
from mlx_lm.utils import load as load_mlx_lm

from pagefork import kernels
from pagefork.kernels import Rope
from pagefork.runtime import fetch, gguf, plain
from pagefork.runtime.errors import InvalidRequest, ModelUnavailable, UnsupportedModel
from pagefork.runtime.groups import Groups
from pagefork.runtime.joint import join, rotations
from pagefork.runtime.layers import LayerSpec, attempt, brief, grouped_layers, layer_spec, trunks
from pagefork.runtime.log import log
from pagefork.runtime.rewrites import REWRITES
from pagefork.runtime.routing import (
    Attend,
    AttendWhole,
    LayerCache,
    Patch,
    Probe,
    Step,
    refuse,
    run,
    take_rows,
)
from pagefork.runtime.selfcheck import check
from pagefork.runtime.tokenizer import Tokenizer, adapt

Source = str | Path | tuple[nn.Module, Any]
Progress = Callable[[str, float], None]

DEFAULT_MODEL = "smollm2-135m"

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


class Model:
    """A model whose attention is the caller's. Make one with `load`; use it in the thread that made it."""

    name: str
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    groups: Groups
    pools: tuple[tuple[int, int], ...]
    """(kv_heads, head_dim) of each pool that the groups share."""
    dtype: mx.Dtype
    """Of K and V."""
    eos_ids: frozenset[int]
    max_context: int | None
    tokenizer: Tokenizer | None
    weight_bytes: int
    module: nn.Module
    recast: tuple[bool, ...]
    """Layers that attend to a copy of their keys in another dtype; such keys are kept as they were stored."""
    rotations: tuple[Rope | None, ...]
    """Of the layers that do no more than rotate what their joint projection put out."""
    products: list[kernels.Linear]
    """Those that plain layers take in steps of few rows."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
        max_context: int | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.max_context = max_context
        self.weight_bytes = _bytes(module)
        self.module = module
        self._rows_inside = False
        self._patch = Patch(module)
        try:
            for part in module.modules():
                route = REWRITES.get((type(part).__module__, type(part).__name__))
                if route is not None:
                    self._patch.swap(part, route)
            if not self._patch.hooked:
                refuse("its attention does not go through mlx-lm's scaled_dot_product_attention")
            join(module, self._patch)  # before anything lazy names the weights as they were
            self._discover()
            self._step = Step()
            self._caches = [LayerCache(i, self._step, recast=recast) for i, recast in enumerate(self.recast)]
            self._rows_inside = self._skip_rows()
            check(self)
            self.take_rotations(rotations(self))
            self.products = plain.find(self, self._patch)
        except BaseException:
            self.restore()
            raise

    def __call__(
        self,
        tokens: mx.array,
        positions: mx.array,
        attend: Attend,
        rows: mx.array | None = None,
        attend_whole: AttendWhole | None = None,
        trials: list[plain.Trial] | None = None,
    ) -> mx.array:
        """Run one step over the tokens of any number of sequences, flattened.

        `tokens`, `positions`: int32 `[T]`. `attend(layer, q, k, v, sinks)` is called once a layer, with q
        `[T, heads, head_dim]`, k and v `[T, kv_heads, head_dim]` and sinks `[heads]` or None, and returns q's shape; it
        stores k and v before it attends. `rows`: int32 `[R]`, the rows whose logits are wanted, or None for all.
        `attend_whole` is called instead, where it is given, by the layers that have a rotation in `rotations`.
        `trials`: takes what layers that may be plain make of their input, see `plain.find`.
        Returns logits `[R, vocab_size]` in the model's own dtype, lazily.
        """
        step = self._step
        with run(step):
            step.positions, step.attend, step.rows, step.attend_whole = positions, attend, rows, attend_whole
            step.trials = trials
            logits: mx.array = self.module(tokens[:, None], cache=self._caches)
            if len(step.stored) != len(self.layers):
                refuse(f"{len(step.stored)} of its {len(self.layers)} layers stored keys and values")
        if rows is not None and not self._rows_inside:
            logits = mx.take(logits, rows, axis=0)
        return logits.squeeze(1)

    def take_rotations(self, ropes: tuple[Rope | None, ...]) -> None:
        """From now on, layers with one of these call `attend_whole` where it is given, all others `attend`."""
        self.rotations = ropes
        for cache, rope in zip(self._caches, ropes, strict=True):
            cache.rope = rope

    def restore(self) -> None:
        """Put everything that was patched in the user's model and its Python modules back; idempotent."""
        self._patch.restore()

    def _discover(self) -> None:
        """Run the model lazily on one row of several tokens and note what each layer passes to attention."""
        try:
            own = make_prompt_cache(self.module)
        except Exception as error:
            refuse(f"mlx-lm cannot make a cache for it ({brief(error)})")
        if not own:
            refuse("it keeps no keys and values at all")
        step = Step()
        probes = [Probe(i, step, _rotation(i, cache)) for i, cache in enumerate(own)]
        tokens = mx.zeros((1, 8), mx.int32)
        logits = attempt(self.module, lambda: self.module(tokens, cache=probes))
        if not isinstance(logits, mx.array) or logits.ndim != 3:
            refuse("it returns something other than an array of logits")
        self.vocab_size = logits.shape[-1]
        self.layers = tuple(layer_spec(probe) for probe in probes)
        self.groups = grouped_layers(self.layers)
        self.pools = tuple(self.layers[self.groups.layer(pool)].shape for pool in range(self.groups.pools))
        self.recast = tuple(probe.recast for probe in probes)
        self.dtype = probes[0].call["keys"].dtype if probes[0].call else mx.float32

    def _skip_rows(self) -> bool:
        """Find the module below the output head and make it drop the rows whose logits nobody wants."""
        for inner in trunks(self.module):
            self._patch.swap(inner, take_rows)
            try:
                logits = self._lazily(rows=mx.array([1, 2, 4]), tokens=5)
            except Exception:
                logits = None
            if logits is not None and logits.shape == (3, self.vocab_size):
                return True
            self._patch.unswap(inner)
        log.debug("model", name=self.name, note="logits of all rows are computed")
        return False

    def _lazily(self, rows: mx.array, tokens: int) -> mx.array:
        zeros = mx.zeros((tokens,), mx.int32)
        self._rows_inside = True
        try:
            return self(zeros, zeros, lambda layer, q, k, v, sinks: q, rows)
        finally:
            self._rows_inside = False


def load(source: Source, *, progress: Progress | None = None) -> Model:
    """Load a model and find out how to route its attention. Call it in the thread that will run the model.

    `source`: `"smollm2-135m"` (fetched once), the path of a .gguf file, any path or repo id that `mlx_lm.load` takes,
    or a `(model, tokenizer)` pair whose tokenizer may be None. On a CPU, models loaded by name or path are
    dequantised to float32, which is several times faster there than 4-bit or bfloat16; a pair is left as it is.
    `progress(stage, fraction)` is called from this thread.

    Raises UnsupportedModel when attention cannot be routed, ModelUnavailable when files are missing or cannot be
    fetched, InvalidRequest for a source of the wrong kind.
    """
    tell = progress or (lambda stage, fraction: None)
    if isinstance(source, tuple):
        model = _from_pair(source)
    elif source == DEFAULT_MODEL:
        path = fetch.smollm2(progress=lambda fraction: tell("fetch", fraction))
        tell("load", 0.0)
        model = _from_gguf(path, name=DEFAULT_MODEL)
    elif str(source).endswith(".gguf"):
        tell("load", 0.0)
        model = _from_gguf(Path(source).expanduser(), name=Path(source).stem)
    elif isinstance(source, str | Path):
        tell("load", 0.0)
        model = _from_mlx_lm(str(source))
    else:
        raise InvalidRequest(
            f"model must be a name, a path or a (model, tokenizer) pair, not {type(source).__name__}; "
            f'try model="{DEFAULT_MODEL}"'
        )
    tell("load", 1.0)
    return model


def materialise(source: Source) -> None:
    """Evaluate the parameters of a `(model, tokenizer)` pair; call it in the thread that made the model.

    Arrays that are still lazy belong to that thread's stream and could not be evaluated by the engine. Does nothing
    for a name or a path.
    """
    if isinstance(source, tuple) and source and isinstance(source[0], nn.Module):
        mx.eval(source[0].parameters())


def _from_pair(pair: tuple[Any, ...]) -> Model:
    if len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise InvalidRequest("a model given as objects must be a pair (mlx.nn.Module, tokenizer or None)")
    module, tokenizer = pair
    adapted = None if tokenizer is None else adapt(tokenizer)
    name = getattr(module, "model_type", None) or type(module).__name__
    return Model(
        module,
        name=str(name),
        tokenizer=adapted,
        eos_ids=adapted.eos_ids if adapted is not None else frozenset(),
        max_context=_max_context(getattr(module, "args", None)),
    )


def _from_mlx_lm(source: str) -> Model:
    try:
        module, tokenizer, config = load_mlx_lm(source, lazy=True, return_config=True)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "not supported" in str(error):
            raise UnsupportedModel(f"mlx-lm has no such architecture: {brief(error)}") from error
        raise ModelUnavailable(
            f"cannot load {source!r}: {brief(error)}; give a folder with config.json and weights, a .gguf file, "
            f'or model="{DEFAULT_MODEL}"'
        ) from error
    if _on_cpu():
        _to_float32(module)
    mx.eval(module.parameters())
    adapted = adapt(tokenizer)
    return Model(
        module,
        name=source,
        tokenizer=adapted,
        eos_ids=adapted.eos_ids,
        max_context=_max_context(config),
    )


def _from_gguf(path: Path, *, name: str) -> Model:
    file = gguf.read(path)
    module = llama.Model(llama.ModelArgs(**file.llama_args()))
    weights = file.weights(float32=_on_cpu())
    bits = file.quantised()
    if bits and not _on_cpu():
        nn.quantize(module, class_predicate=lambda path, _: bits.get(path, False))
    try:
        module.load_weights(list(weights.items()))
    except ValueError as error:
        raise ModelUnavailable(f"{path} holds no whole llama ({brief(error)}); fetch it again") from error
    module.eval()
    mx.eval(module.parameters())
    return Model(
        module,
        name=name,
        tokenizer=file.tokenizer(),
        eos_ids=file.eos_ids,
        max_context=file.max_context,
    )


def _bytes(module: nn.Module) -> int:
    leaves: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in leaves)


def _on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def _to_float32(module: nn.Module) -> None:
    dequantize_model(module)
    module.update(
        tree_map(lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, module.parameters())
    )


def _rotation(layer: int, cache: Any) -> int | None:
    """The window that a layer's own cache keeps, None for all positions."""
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache:
        if cache.keep:
            refuse(f"layer {layer} keeps its first {cache.keep} positions beside a sliding window")
        return int(cache.max_size)
    return refuse(f"layer {layer} keeps its state in {type(cache).__name__}, not in keys and values of every position")


def _max_context(config: Any) -> int | None:
    """The longest context that a configuration (a mapping or an object) names."""
    for scope in (config, _field(config, "text_config")):
        for name in _CONTEXT_NAMES:
            value = _field(scope, name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _field(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)
