"""Routes the attention of an mlx-lm style model to a function of ours, leaving other users of the model alone.

Every token of a step is fed as a batch row of length one (`[T, 1]`), so a ragged batch needs no padding. Each layer
gets a `LayerCache`. The model's own modules call `scaled_dot_product_attention(q, k, v, cache=...)`; that name is
replaced in them by a dispatcher that looks at the cache's type: ours goes to `LayerCache.attend`, any other to the
original function.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
import mlx.nn as nn

from pagefork.kernels import Rope
from pagefork.runtime.errors import UnsupportedModel

if TYPE_CHECKING:
    from pagefork.runtime.joint import Joint
    from pagefork.runtime.plain import Trial

Attend = Callable[[int, mx.array, mx.array, mx.array, "mx.array | None"], mx.array]
"""`attend(layer, q, k, v, sinks)`: q `[T, heads, head_dim]`, k and v `[T, kv_heads, head_dim]`, sinks `[heads]` or
None; returns `[T, heads, head_dim]`."""

AttendWhole = Callable[[int, mx.array, Rope, "mx.array | None"], mx.array]
"""`attend_whole(layer, qkv, rope, sinks)`: the same from the queries, keys and values of each row before their
rotation, `[T, (heads + 2 * kv_heads) * head_dim]`."""

HOOK = "scaled_dot_product_attention"


class Mask:
    """Stands for the attention mask that a model asks its cache for and hands back to the attention call.

    It is no array: a model that computes with it fails at load instead of attending to the wrong positions.
    """

    __slots__ = ("step", "window")

    def __init__(self, window: int | None, step: Step) -> None:
        self.window = window
        self.step = step


class Step:
    """What the layer caches of one forward pass share."""

    __slots__ = ("attend", "attend_whole", "positions", "projected", "rows", "stored", "trials", "whole")

    def __init__(self) -> None:
        self.positions: mx.array | int = 0
        self.attend: Attend | None = None
        self.attend_whole: AttendWhole | None = None
        self.rows: mx.array | None = None
        self.stored: dict[LayerCache, tuple[mx.array, mx.array]] = {}
        self.projected: dict[Joint, tuple[mx.array, list[mx.array], mx.array]] = {}
        """What joint projections made of which input: their parts, and the whole."""
        self.whole: tuple[Joint, mx.array] | None = None
        """The queries, keys and values that the next attention comes from."""
        self.trials: list[Trial] | None = None
        """Where layers are tried out."""

    def clear(self) -> None:
        """Forget the forward pass."""
        self.__init__()  # type: ignore[misc]

    def owner(self, keys: mx.array) -> LayerCache:
        """The cache that handed out these keys: layers that share keys and values attend without a cache."""
        for cache, stored in self.stored.items():
            if stored[0] is keys:
                return cache
        return refuse("a layer without a cache attends to keys that no other layer has stored")


class LayerCache:
    """The cache of one layer as a model sees it. `attend` is what the dispatcher calls.

    Layers that share keys and values attend to one cache in turn; each time they are written once more, as they were.
    """

    def __init__(self, layer: int, step: Step, *, recast: bool = False) -> None:
        self.layer = layer
        self.step = step
        self.recast = recast
        """Whether the layer attends to a copy, in another dtype, of the keys that it stores."""
        self.rope: Rope | None = None
        """The rotation where it is all that happens between the joint projection and attention."""
        self.plain = False
        """Whether the layer is no more than what `plain.multiply` computes."""

    @property
    def offset(self) -> mx.array | int:
        """int32 `[T]`: the position of every row."""
        return self.step.positions

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        return Mask(window_size, self.step)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.step.stored[self] = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the layer stored in this step, for layers that share it."""
        if self not in self.step.stored:
            refuse(f"a layer asks for the keys of layer {self.layer} before they are stored")
        return self.step.stored[self]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """`queries` `[T, heads, 1, head_dim]`, `keys` `[T, kv_heads, 1, head_dim]`, `values` as wide or narrower."""
        keys, values = self._take(keys, values)
        if self.step.attend is None:
            refuse("it attends outside of a step")
        if self.rope is not None and self.step.attend_whole is not None and self.step.whole is not None:
            (_, whole), self.step.whole = self.step.whole, None
            out = self.step.attend_whole(self.layer, whole.squeeze(1), self.rope, sinks)
            return out[:, :, None].astype(queries.dtype)
        q, k, v = queries.squeeze(2).astype(keys.dtype), keys.squeeze(2), values.squeeze(2)
        wide, narrow = k.shape[-1], v.shape[-1]
        if narrow < wide:
            v = mx.pad(v, [(0, 0), (0, 0), (0, wide - narrow)])
        out = self.step.attend(self.layer, q, k, v, sinks)
        self.step.whole = None
        return out[:, :, None, :narrow].astype(queries.dtype)

    def _take(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What the layer has stored, which must be what it attends to."""
        stored = self.step.stored.get(self)
        if stored is None or not self._same(stored, keys) or stored[1] is not values:
            refuse(f"layer {self.layer} attends to other keys and values than those it stores in its cache")
        return stored

    def _same(self, stored: tuple[mx.array, mx.array], keys: mx.array) -> bool:
        return self.recast or stored[0] is keys


class Probe(LayerCache):
    """Records what a layer passes to the attention call; used at load, with one row of several tokens."""

    def __init__(self, layer: int, step: Step, max_size: int | None) -> None:
        super().__init__(layer, step)
        self.max_size = max_size
        self.call: dict[str, Any] | None = None

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        return Mask(window_size or self.max_size, self.step)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        keys, values = self._take(keys, values)
        if not isinstance(mask, Mask):
            refuse(f"layer {self.layer} attends under a mask of its own")
        call = {
            "heads": queries.shape[1],
            "keys": keys,
            "values": values,
            "scale": float(scale),
            "window": mask.window,
            "sinks": sinks is not None,
            "softcap": softcap,
        }
        if queries.shape[-1] != keys.shape[-1]:
            refuse(f"layer {self.layer} has queries of {queries.shape[-1]} and keys of {keys.shape[-1]} dimensions")
        if self.call is not None and any(
            self.call[name] != call[name] for name in ("heads", "scale", "window", "sinks", "softcap")
        ):
            refuse(f"the layers that share the keys of layer {self.layer} attend to them in different ways")
        self.call = call
        return mx.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)

    def _same(self, stored: tuple[mx.array, mx.array], keys: mx.array) -> bool:
        if stored[0] is keys:
            return True
        self.recast = stored[0].shape == keys.shape and bool(mx.array_equal(stored[0], keys.astype(stored[0].dtype)))
        return self.recast


def refuse(reason: str) -> NoReturn:
    """Raise `UnsupportedModel` with the sentence that all refusals share."""
    raise UnsupportedModel(
        f"this model cannot be served from blocks: {reason}. Use a decoder-only model with full "
        "or sliding-window attention, such as a Llama, Qwen, Mistral, Phi or Gemma"
    )


_thread = threading.local()


def running() -> Step | None:
    """The step whose forward pass this thread is in, if any."""
    return getattr(_thread, "step", None)


@contextlib.contextmanager
def run(step: Step) -> Iterator[None]:
    """Make `step` the one that runs in this thread."""
    _thread.step = step
    try:
        yield
    finally:
        _thread.step = None
        step.clear()


class Patch:
    """The replaced attention functions and classes of one model; `restore` puts them back once nobody needs them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in _python_modules(model.modules()) if hasattr(m, HOOK)]
        self._swapped: list[nn.Module] = []
        self._last: list[Callable[[], None]] = []
        for module in self._modules:
            _hooks.acquire(module)

    @property
    def hooked(self) -> bool:
        return bool(self._modules) or bool(self._swapped)

    def swap(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Make `module(...)` run `call(original, module, ...)`; several models of one module share the replacement."""
        base: Any = type(module)
        if getattr(base, "pagefork_call", None) is call:
            base.pagefork_users += 1
        else:

            def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return call(base.__call__, self, *args, **kwargs)

            namespace = {
                "__call__": __call__,
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "pagefork_call": staticmethod(call),
                "pagefork_users": 1,
            }
            module.__class__ = type(base.__name__, (base,), namespace)
        self._swapped.append(module)

    def unswap(self, module: nn.Module) -> None:
        """Undo the `swap` of `module`."""
        self._swapped = [part for part in self._swapped if part is not module]
        kind: Any = type(module)
        kind.pagefork_users -= 1
        if kind.pagefork_users == 0:
            module.__class__ = kind.__bases__[0]

    def finally_do(self, call: Callable[[], None]) -> None:
        """Have `restore` call it, once."""
        self._last.append(call)

    def restore(self) -> None:
        """Undo everything; a second call does nothing."""
        for module in self._swapped[::-1]:
            self.unswap(module)
        while self._last:
            self._last.pop()()
        for python_module in self._modules:
            _hooks.release(python_module)
        self._modules.clear()


class _Hooks:
    """Reference-counted replacements of the attention function, shared by all models of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[ModuleType, tuple[Any, int]] = {}

    def acquire(self, module: ModuleType) -> None:
        with self._lock:
            original, count = self._held.get(module, (getattr(module, HOOK), 0))
            if count == 0:
                setattr(module, HOOK, _dispatcher(original))
            self._held[module] = original, count + 1

    def release(self, module: ModuleType) -> None:
        with self._lock:
            original, count = self._held.pop(module)
            if count > 1:
                self._held[module] = original, count - 1
            else:
                setattr(module, HOOK, original)


_hooks = _Hooks()


def _dispatcher(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(queries: Any, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(cache, LayerCache):
            return cache.attend(queries, keys, values, *args, **kwargs)
        mask = kwargs.get("mask")
        if cache is None and isinstance(mask, Mask):
            return mask.step.owner(keys).attend(queries, keys, values, *args, **kwargs)
        return original(queries, keys, values, cache, *args, **kwargs)

    return dispatch


def _python_modules(modules: Iterable[nn.Module]) -> list[ModuleType]:
    """The Python modules that define the classes of `modules`, bases included."""
    names = {base.__module__ for module in modules for base in type(module).__mro__}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def take_rows(original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A `Patch.swap` call for the module below the output head: keep only the rows whose logits are wanted.

    `[T, 1, hidden]` becomes `[R, 1, hidden]`; calls without our caches pass through.
    """
    hidden = original(module, *args, **kwargs)
    step = _step_of((*args, *kwargs.values()))
    if step is None or step.rows is None:
        return hidden
    return mx.take(hidden, step.rows, axis=0)


def _step_of(values: Sequence[Any]) -> Step | None:
    for value in values:
        if isinstance(value, list) and value and isinstance(value[0], LayerCache):
            return value[0].step
    return None
